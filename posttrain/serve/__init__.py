"""A policy as an OpenAI-compatible HTTP server: `python -m posttrain.serve`.

app.py             routes, who may use them, and the process
protocol.py        the body of a request -> `protocol.ApiRequest`, or a refusal
call.py            an ApiRequest -> jobs of the worker -> a response
worker.py          the threads that decode and score; all requests share them
token_logprobs.py  logprobs of given tokens, with ranks and alternatives
detokenizer.py     tokens -> text, piece by piece: partial UTF-8, stop strings
output.py          the JSON objects of a response
"""
