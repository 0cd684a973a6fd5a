"""vLLM's routes for weights and completions, on an engine of ours.

As vLLM 0.32 answers: a weight update has to be started, updates are JSON with
`update_info`, and nothing samples while it is paused. Its backend of weight
transfer, which reads a HuggingFace directory, is this test's own.
"""

import contextlib
import http.server
import json
import threading
import urllib.parse

import numpy as np

from posttrain.decode import requests
from posttrain.models import hf
from tests import fixtures


class Vllm(http.server.ThreadingHTTPServer):
  """The server; `calls` are the paths of the weights' routes, in order."""

  def __init__(self, engine, model):
    super().__init__(('127.0.0.1', 0), Handler)
    self.engine, self.model = engine, model
    self.calls, self.version, self.lock = [], None, threading.Lock()
    self.is_paused = self.is_updating = False
    self.url = f'http://127.0.0.1:{self.server_port}'

  def control(self, path, query, body):
    self.calls.append(path + (f'?{query}' if 'mode' in query else ''))
    if path == '/pause':
      self.is_paused = True
    elif path == '/resume':
      self.is_paused = False
    elif path == '/init_weight_transfer_engine':
      assert isinstance(body['init_info'], dict)
    elif path == '/start_weight_update':
      assert self.is_paused and not self.is_updating
      self.is_updating = True
    elif path == '/update_weights':
      assert self.is_updating
      info = body['update_info']
      assert len(info['names']) == len(info['shapes'])
      assert set(info['dtype_names']) == {'float32'}
      self.loaded = hf.load(info['folder'], self.model)
    elif path == '/finish_weight_update':
      assert self.is_updating
      self.is_updating, self.version = False, body['weight_version']
      self.engine.set_params(self.loaded, 0)
    else:
      return None
    return {}

  def complete(self, body):
    assert not self.is_paused and body['ignore_eos']
    request = requests.Request(
      0,
      np.array(body['prompt'], np.int32),
      body['max_tokens'],
      tuple(body['stop_token_ids']),
      requests.Sampling(body['temperature']),
      key=body['seed'],
    )
    with self.lock:
      (x,) = self.engine.generate([request])
    choice = {
      'index': 0,
      'text': '',
      'token_ids': x.ids.tolist(),
      'finish_reason': 'stop' if x.stop_reason == 'eos' else 'length',
      'stop_reason': int(x.ids[-1]) if x.stop_reason == 'eos' else None,
      'prompt_token_ids': body['prompt'],
      'logprobs': {
        'tokens': [f'token_id:{i}' for i in x.ids],
        'token_logprobs': x.logprobs.tolist(),
      },
    }
    return {'object': 'text_completion', 'choices': [choice]}


class Handler(http.server.BaseHTTPRequestHandler):
  def log_message(self, *_):
    pass

  def do_GET(self):
    self._send({'data': [{'id': 'policy'}]})

  def do_POST(self):
    url = urllib.parse.urlsplit(self.path)
    size = int(self.headers['Content-Length'])
    body = json.loads(self.rfile.read(size) or '{}')
    if url.path == '/v1/completions':
      reply = self.server.complete(body)
    elif url.path == '/tokenize':
      encode = fixtures.RENDERER.tokenizer.encode_scaffold
      reply = {'tokens': list(map(int, encode(body['prompt'])))}
    else:
      reply = self.server.control(url.path, url.query, body)
    self._send(reply)

  def _send(self, reply):
    data = json.dumps(reply).encode()
    self.send_response(404 if reply is None else 200)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    self.wfile.write(data)


@contextlib.contextmanager
def running(engine, model):
  with Vllm(engine, model) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
      yield server
    finally:
      server.shutdown()
      thread.join()
