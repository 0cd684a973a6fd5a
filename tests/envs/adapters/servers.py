"""A server with OpenEnv's protocol: guess the number of a seed.

The number is `seed % 10`. An observation has `hint` and `tries`. Some numbers
are no guesses: see `TROUBLE`, and `HANGS` and `DROPS` below.
"""

import contextlib
import json
import threading

from websockets import exceptions
from websockets.sync import server

TROUBLE = {
  11: 'INVALID_JSON',
  12: 'EXECUTION_ERROR',
  13: 'UNKNOWN_TYPE',
  14: 'SESSION_ERROR',
}
HANGS, DROPS, PAYS_NOTHING = 21, 22, 23


class Server:
  """A server, and the record of its sessions."""

  def __init__(self, capacity=100, refuses=None):
    self.capacity, self.refuses = capacity, refuses
    self.seeds, self.most, self.closed = [], 0, 0
    self._active, self._lock = 0, threading.Lock()
    self.ended = threading.Event()

  @contextlib.contextmanager
  def running(self):
    """Yields the url."""
    with server.serve(self._session, 'localhost', 0) as made:
      thread = threading.Thread(target=made.serve_forever)
      thread.start()
      try:
        yield f'ws://localhost:{made.socket.getsockname()[1]}/ws'
      finally:
        self.ended.set()
        made.shutdown()
        thread.join()

  def _session(self, socket):
    with self._lock:
      full = self._active >= self.capacity
      self._active += not full
      self.most = max(self.most, self._active)
    try:
      if full or self.refuses:
        code = 'CAPACITY_REACHED' if full else self.refuses
        socket.send(error(code, 'no place'))
      else:
        self._serve(socket)
    except exceptions.ConnectionClosed:
      pass
    finally:
      with self._lock:
        self._active -= not full

  def _serve(self, socket):
    secret = tries = 0
    for raw in socket:
      message = json.loads(raw)
      if message['type'] == 'close':
        assert set(message) == {'type'}
        self.closed += 1
        return
      data = message['data']
      if message['type'] == 'reset':
        assert set(data) == {'seed'}
        with self._lock:
          self.seeds.append(data['seed'])
        secret, tries = data['seed'] % 10, 0
        socket.send(observation('guess', 0))
        continue
      number = data.get('number')
      if not isinstance(number, int) or len(data) > 1:
        socket.send(
          error(
            'VALIDATION_ERROR',
            'Invalid message',
            [{'loc': ['number'], 'msg': 'Field required', 'type': 'missing'}],
          )
        )
        continue
      if number in TROUBLE:
        socket.send(error(TROUBLE[number], f'trouble {number}'))
        continue
      if number == HANGS:
        self.ended.wait()
      if number in (HANGS, DROPS):
        return
      tries += 1
      hint = 'higher' if number < secret else 'lower'
      if number == secret:
        hint = 'right'
      reward = {'right': 1.0, 'higher': 0.25}.get(hint)
      if number == PAYS_NOTHING:
        hint = 'right'
      socket.send(observation(hint, tries, reward, hint == 'right'))


def observation(hint, tries, reward=None, done=False):
  return json.dumps(
    {
      'type': 'observation',
      'data': {
        'observation': {'hint': hint, 'tries': tries, 'reward': 9, 'done': 9},
        'reward': reward,
        'done': done,
      },
    }
  )


def error(code, message, errors=None):
  data = {'message': message, 'code': code}
  if errors:
    data['errors'] = errors
  return json.dumps({'type': 'error', 'data': data})
