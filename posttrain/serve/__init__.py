"""A policy behind the OpenAI-compatible HTTP API: `python -m posttrain.serve`.

app.py       routes; who may ask, and how much
protocol.py  the body of a request -> `protocol.Ask`, or a refusal
fields.py    its fields, one by one
call.py      an Ask -> jobs of the worker -> what came of them
worker.py    the thread that owns the engine; all requests share its slots
laws.py      logprobs of given tokens, with ranks and alternatives
speech.py    tokens -> text: stop strings, and UTF-8 in pieces
output.py    the objects of an answer
server.py    the process around it: a socket, signals, the way out
"""
