"""A policy as an OpenAI-compatible HTTP server: `python -m posttrain.serve`.

app.py             routes, the API key, the size of bodies
protocol.py        the body of a request -> `protocol.ApiRequest`, or a refusal
fields.py          the checked fields of a body
texts.py           prompts as text, ids or messages -> token ids
call.py            an ApiRequest -> jobs of the worker -> a response
worker.py          the thread that owns the engine; all requests share its slots
token_logprobs.py  logprobs of given tokens, with ranks and alternatives
detokenizer.py     tokens -> text: stop strings, and partial UTF-8
output.py          the JSON objects of a response
server.py          the process: socket, signals, shutdown
"""
