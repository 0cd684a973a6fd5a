"""Messages <-> token ids, with role and content attribution per token (np).

tokenizers.py  text <-> ids
templates.py   messages -> text, and the pieces of the text by message
rendering.py   messages -> ids; directories of tokenizers and templates
tool_calls.py  tools in templates, and calls in the text of a turn
"""
