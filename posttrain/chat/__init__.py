"""Messages <-> token ids, with role and content attribution per token (np).

`tokenizers` turns text into ids; `renderer` turns messages into ids by a chat
template: the built-in one, or a HuggingFace-style one (`jinja`); `messages`
says what is a message at all.
"""
