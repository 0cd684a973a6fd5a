"""A policy as an OpenAI-compatible HTTP server: `python -m posttrain.serve`.

app.py       routes, who may use them, and the process
protocol.py  the body of a request -> `protocol.ApiRequest`, or a refusal
call.py      an ApiRequest -> jobs of the worker -> text -> a response
worker.py    the threads that decode and score; all requests share them
"""
