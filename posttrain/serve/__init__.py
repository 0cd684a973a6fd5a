"""A policy behind HTTP: `python -m posttrain.serve`.

An OpenAI-compatible server:

app.py       routes, who may use them, and the process
protocol.py  the body of a request -> `protocol.ApiRequest`, or a refusal
call.py      an ApiRequest -> jobs of the worker -> text -> a response
worker.py    the threads that decode and score; all requests share them

With --train, for clients of Tinker's SDK, by the same worker:

training_routes.py  routes
wire.py             the SDK's messages -> data and jobs, and results -> protobuf
training.py         the models, their requests in order, and the replay
journal.py          accepted requests and their results, on the disk

With --sampler:

sampler.py   the engine of a learner in another process
"""
