"""Reward functions in processes of their own.

    run -- pickle: arguments -->  worker
    run <-- JSON: rewards ------  worker

A thread cannot be ended, so a function that backtracks in a regex without end,
exits, crashes or leaks takes the run with it. In a process it costs one fault:

1. The process starts with the first call, and stays for the following ones.
2. It is killed, with its children, after the timeout, and starts again with
   the next call. It also starts again once it has kept half of its memory.
3. It ends with the run, also if that is killed, and so do its children; see
   `supervisor` for the exceptions.
4. A reply counts if it has the nonce of its call. Other bytes on the socket are
   a fault, after which the process starts again.
5. It inherits no open file but its socket, and few environment variables
   (`VARIABLES`): no API key. What a function prints goes to stderr.

The rewards are those of the function in a thread, to the bit.
"""

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import pickle
import secrets
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from typing import Any

from posttrain.rollout.grading import calls, supervisor, values, worker
from posttrain.util import foreign

# Prefixes of the environment variables that the process gets.
VARIABLES = ('PATH', 'HOME', 'LANG', 'LC_', 'TZ', 'TMPDIR', 'LD_LIBRARY_PATH')
VARIABLES += ('VIRTUAL_ENV', 'OMP_', 'OPENBLAS_', 'MKL_', 'POSTTRAIN_DATA')
START_SECONDS = 120.0  # the longest import of a function's module
LARGEST_REPLY = 2**28  # bytes
POLL = 0.1  # seconds between checks that the process runs
_INTERFERES = 'must leave the socket of its process alone'
_LOGGERS = ('log_metric', 'log_extra')

# A process is killed when the thread that has started it ends, so one thread
# starts all of them. It starts nothing until the first call.
_starter = concurrent.futures.ThreadPoolExecutor(1, 'reward starter')


class Worker:
  """One function's process."""

  def __init__(self, path: str, memory: int):
    """Starts nothing yet.

    Args:
      path: 'package.module:function'.
      memory: the bytes that the function may allocate after its import.
    """
    self._path, self._memory = path, memory
    self._process: subprocess.Popen | None = None
    self._socket: Any = None
    self._at_exit: Any = None

  def call(
    self,
    arguments: Mapping[str, Any],
    logged: dict[str, list[float]],
    clock: calls.Clock,
    count: int,
    weight: float,
  ) -> list[values.Value]:
    """Calls the function; its loggers append to `logged`.

    Raises:
      Fault: it failed, or its process did.
    """
    message = message_of(arguments, count, weight, 'isolate=True')
    self._start()
    clock.restart()
    try:
      reply = calls.call(self._exchange, {'message': message}, clock)
      rewards = rewards_of(reply, logged, count)
    except calls.Fault as fault:
      if not fault.process_is_sound:
        self.stop()
      raise
    except BaseException:
      self.stop()
      raise
    if reply['grown'] > self._memory / 2:
      self.stop()
    return rewards

  def _start(self) -> None:
    """Starts the process unless it runs, and waits for its import."""
    if self._process is not None and self._process.poll() is None:
      return
    self.stop()
    start = (self._path, self._memory)
    try:
      reply = calls.call(
        self._begin, {'start': start}, calls.Clock(START_SECONDS)
      )
      if 'fault' in reply:
        raise calls.Fault(foreign.text(reply['fault'], 1000))
    except BaseException:
      self.stop()
      raise

  def stop(self) -> None:
    """Kills the process and its children."""
    process, self._process = self._process, None
    if self._at_exit is not None:
      self._at_exit.detach()
    if process is not None:
      _kill(process)
    if self._socket is not None:
      self._socket.close()
      self._socket = None

  def _begin(self, start: tuple[str, int]) -> Mapping[str, Any]:
    mine, theirs = multiprocessing.Pipe()
    with contextlib.closing(theirs):
      self._process = _starter.submit(_popen, theirs.fileno()).result()
    self._at_exit = weakref.finalize(self, _kill, self._process)
    self._socket = mine
    return self._exchange(pickle.dumps(start))

  def _exchange(self, message: bytes) -> Mapping[str, Any]:
    """Sends a message; returns the reply. `stop` interrupts it."""
    process, socket = self._process, self._socket
    nonce = secrets.token_bytes(worker.NONCE)
    try:
      if socket.poll():
        raise calls.Fault(_INTERFERES)  # of an earlier call
      socket.send_bytes(nonce + message)
      # A child of the function may hold the socket open after its end.
      while not socket.poll(POLL):
        if process.poll() is not None and not socket.poll():
          raise EOFError
      reply = socket.recv_bytes(LARGEST_REPLY)
    except (OSError, EOFError):  # also of a reply that is too long
      raise calls.Fault(
        f'must return rewards: its process {_end(process)}'
      ) from None
    if reply[: worker.NONCE] != nonce:
      raise calls.Fault(_INTERFERES)
    try:
      answer = json.loads(reply[worker.NONCE :])
    except ValueError:
      answer = None
    if not isinstance(answer, Mapping):
      raise calls.Fault(_INTERFERES)
    return answer


def _popen(descriptor: int) -> subprocess.Popen:
  """Starts the process, with its end of the socket."""
  variables = {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)}
  paths = [os.path.abspath(path) for path in sys.path]  # '' is this folder
  program = (
    'from posttrain.rollout.grading import worker; '
    f'worker.main({descriptor}, {os.getpid()})'
  )
  return subprocess.Popen(
    [sys.executable, '-P', '-c', program],
    stdin=subprocess.DEVNULL,
    stdout=2,
    pass_fds=(descriptor,),
    start_new_session=True,
    env={**variables, 'PYTHONPATH': os.pathsep.join(paths)},
  )


def _kill(process: subprocess.Popen) -> None:
  """Ends a supervisor, which kills its worker and all children of that."""
  if process.returncode is not None:
    return
  process.terminate()
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(2 * supervisor.SECONDS)
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(process.pid, signal.SIGKILL)  # what it could not
  process.wait()


def _end(process: subprocess.Popen) -> str:
  """Returns how a process has ended, in words."""
  try:
    code = process.wait(1)
  except subprocess.TimeoutExpired:
    return 'closed its socket, or replied too much'
  if code >= 0:
    return f'ended with exit code {code}'
  with contextlib.suppress(ValueError):
    return f'was ended by {signal.Signals(-code).name}'
  return f'was ended by signal {-code}'


def message_of(
  arguments: Mapping[str, Any], count: int, weight: float, option: str
) -> bytes:
  """Returns the message of a call, see `worker.answer`.

  Args:
    arguments: by name, the loggers among them.
    count: the number of rollouts.
    weight: the weight of the rewards.
    option: why the function runs in another process, for the error.

  Raises:
    Fault: an argument cannot be pickled.
  """
  plain = {k: x for k, x in arguments.items() if k not in _LOGGERS}
  loggers = [k for k in _LOGGERS if k in arguments]
  try:
    return pickle.dumps((plain, loggers, count, weight))
  except Exception as error:
    raise calls.Fault(
      f'must get arguments that can be pickled, since it has {option}: '
      f'got {foreign.error(error)}'
    ) from error


def rewards_of(
  reply: Mapping[str, Any], logged: dict[str, list[float]], count: int
) -> list[values.Value]:
  """Returns a reply's rewards; raises its fault."""
  if isinstance(reply.get('fault'), str):
    fault = calls.Fault(foreign.text(reply['fault'], 2000))
    fault.stack = str(reply.get('stack', ''))[:10_000]
    fault.process_is_sound = not reply.get('full')
    raise fault
  rewards, logs = reply.get('rewards'), reply.get('logged')
  if not (
    isinstance(rewards, list)
    and len(rewards) == count
    and all(_is_value(x) for x in rewards)
    and isinstance(logs, Mapping)
    and all(
      isinstance(x, list) and all(map(_is_float, x)) for x in logs.values()
    )
    and isinstance(reply.get('grown'), int)
  ):
    raise calls.Fault(_INTERFERES)
  logged.update(logs)
  return [values.Bad(*x) if isinstance(x, list) else x for x in rewards]


def _is_value(value: Any) -> bool:
  if isinstance(value, list):
    return len(value) == 2 and all(isinstance(x, str) for x in value)
  return value is None or (_is_float(value) and abs(value) <= values.LARGEST)


def _is_float(value: Any) -> bool:
  return isinstance(value, float)
