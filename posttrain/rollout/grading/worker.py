"""The process of an isolated reward function; see `isolated`.

Reads calls from a socket, and answers each with one line of JSON, so that the
run reads no object of the function. A reply begins with the nonce of its call.
Imports no jax, unless the function does.
"""

import asyncio
import importlib
import io
import json
import multiprocessing.connection
import os
import pickle
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

from posttrain.rollout.grading import supervisor, values
from posttrain.util import foreign, imports

NONCE = 16  # bytes before each message


def main(descriptor: int, parent: int) -> None:
  """Serves calls until the socket closes.

  Args:
    descriptor: the socket's file descriptor.
    parent: the id of the run's process.
  """
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  if isinstance(sys.stdout, io.TextIOWrapper):  # the process may be killed
    sys.stdout.reconfigure(line_buffering=True)
  if sys.platform == 'linux':
    supervisor.start(parent, descriptor)
  socket = multiprocessing.connection.Connection(descriptor)
  pid = os.getpid()
  os.register_at_fork(after_in_child=socket.close)  # of a function's child
  nonce, call = _receive(socket)
  path, memory = pickle.loads(call)
  try:
    fn = imports.function(path, 'fn')
  except BaseException as error:  # importing a module runs it
    fault = f'must be importable: {foreign.error(error)}'
    _send(socket, nonce, {'fault': fault})
    return
  importlib.import_module('posttrain.types')  # numpy, for the rollouts
  start = address_space()
  _limit(start + memory)
  _send(socket, nonce, {})
  runner = asyncio.Runner()  # it makes its loop with the first coroutine
  while True:
    try:
      nonce, call = _receive(socket)
    except EOFError:
      return
    reply = answer(fn, call, runner)
    if os.getpid() != pid:  # a child that the function forked returns as well
      os._exit(0)
    try:
      _send(socket, nonce, {**reply, 'grown': address_space() - start})
    except OSError:  # the function has closed the socket
      os._exit(1)


def answer(fn: Callable, call: bytes, runner: asyncio.Runner) -> dict[str, Any]:
  """Calls the function; returns its rewards and metrics, or its fault.

  Args:
    fn: the function.
    call: pickle of its arguments, the names of the loggers that it takes, the
      number of rollouts, and the weight of the rewards.
    runner: runs the coroutine that it may return.
  """
  logged: dict[str, list[float]] = {}
  try:
    arguments, loggers, count, weight = pickle.loads(call)
    arguments |= {k: values.loggers(logged)[k] for k in loggers}
    result = fn(**arguments)
    if asyncio.iscoroutine(result):
      result = runner.run(result)
    rewards = values.listed(result, count, weight)
  except values.Fault as fault:
    return {'fault': str(fault)}
  except BaseException as error:
    fault = values.raised(error)
    full = issubclass(type(error), MemoryError)
    return {'fault': str(fault), 'stack': fault.stack, 'full': full}
  return {'rewards': [*map(_plain, rewards)], 'logged': logged}


def _plain(value: values.Value) -> float | list[str] | None:
  if isinstance(value, values.Bad):
    return [value.requirement, value.value]
  return value


def _receive(
  socket: multiprocessing.connection.Connection,
) -> tuple[bytes, bytes]:
  """Returns a call's nonce and its pickle."""
  message = socket.recv_bytes()
  return message[:NONCE], message[NONCE:]


def _send(
  socket: multiprocessing.connection.Connection,
  nonce: bytes,
  reply: Mapping[str, Any],
) -> None:
  socket.send_bytes(nonce + json.dumps(reply).encode())


def address_space() -> int:
  """Returns the size of this process's address space, in bytes."""
  try:
    with open('/proc/self/statm') as file:
      return int(file.read().split()[0]) * resource.getpagesize()
  except OSError:  # not on Linux: the largest resident size, in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _limit(size: int) -> None:
  """Limits the address space, which the operating system may not support."""
  try:
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
  except (OSError, ValueError):
    print('no limit of memory can be set for rewards', file=sys.stderr)
