"""A server with OpenEnv's protocol: guess the number of a seed.

The number is `seed % 10`. An observation has `hint` and `tries`. Some numbers
are no guesses: see `TROUBLE` and `DROPS` below.
"""

import contextlib
import json
import threading

from websockets import exceptions
from websockets.sync import server

TROUBLE = {11: 'INVALID_JSON', 12: 'EXECUTION_ERROR'}
DROPS = 22


@contextlib.contextmanager
def serving(handle):
  """Yields the url of a server that calls `handle(socket)` per connection."""
  with server.serve(handle, 'localhost', 0, close_timeout=0.1) as made:
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
      yield f'ws://localhost:{made.socket.getsockname()[1]}/ws'
    finally:
      made.shutdown()
      thread.join()


class Server:
  """A server, and the record of its sessions."""

  def __init__(self, capacity=100):
    self.seeds, self.closed = [], 0
    self._free = threading.BoundedSemaphore(capacity)

  def running(self):
    """Yields the url."""
    return serving(self._session)

  def _session(self, socket):
    if not self._free.acquire(blocking=False):
      socket.send(error('CAPACITY_REACHED', 'no place'))
      return
    try:
      self._serve(socket)
    except exceptions.ConnectionClosed:
      pass
    finally:
      self._free.release()

  def _serve(self, socket):
    secret = tries = 0
    for raw in socket:
      message = json.loads(raw)
      if message['type'] == 'close':
        self.closed += 1
        return
      data = message['data']
      if message['type'] == 'reset':
        self.seeds.append(data['seed'])
        secret, tries = data['seed'] % 10, 0
        socket.send(observation('guess', 0))
        continue
      number = data.get('number')
      if not isinstance(number, int):
        wrong = [{'loc': ['number'], 'msg': 'Field required'}]
        socket.send(error('VALIDATION_ERROR', 'Invalid message', wrong))
      elif number in TROUBLE:
        socket.send(error(TROUBLE[number], f'trouble {number}'))
      elif number == DROPS:
        return
      else:
        tries += 1
        hint = 'higher' if number < secret else 'lower'
        hint = 'right' if number == secret else hint
        reward = {'right': 1.0, 'higher': 0.25}.get(hint)
        socket.send(observation(hint, tries, reward, hint == 'right'))


def observation(hint, tries, reward=None, done=False):
  shown = {'hint': hint, 'tries': tries, 'reward': 9, 'done': 9}
  data = {'observation': shown, 'reward': reward, 'done': done}
  return json.dumps({'type': 'observation', 'data': data})


def error(code, message, errors=()):
  data = {'message': message, 'code': code, 'errors': errors}
  return json.dumps({'type': 'error', 'data': data})
