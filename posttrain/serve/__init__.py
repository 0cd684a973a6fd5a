"""A policy as an OpenAI-compatible HTTP server: `python -m posttrain.serve`.

app.py             routes
access.py          the API key, the Host header, the content type
bodies.py          reading of bodies; their bytes are bounded in all
release.py         freed memory, returned to the kernel
pool.py            threads for reading requests and writing responses
protocol.py        the body of a request -> `protocol.ApiRequest`, or a refusal
fields.py          the checked fields of a body
texts.py           prompts as text, ids or messages -> token ids
call.py            an ApiRequest -> jobs of the worker -> a response
worker.py          the threads that decode and score; all requests share them
token_logprobs.py  logprobs of given tokens, with ranks and alternatives
detokenizer.py     tokens -> text, piece by piece: partial UTF-8
stop_strings.py    search for stop strings in a text of pieces
output.py          the JSON objects of a response
connection.py      bounds and deadlines of connections
server.py          the process: socket, signals, shutdown
"""
