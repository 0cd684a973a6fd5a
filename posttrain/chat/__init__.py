"""Messages <-> token ids, with role and content attribution per token (np).

`tokenizers` turns text into ids; `renderer` turns messages into ids by a chat
template, the built-in one or a Jinja one (`templates`); `messages` checks the
form of messages.
"""
