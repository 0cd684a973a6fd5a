"""Calls of reward functions where they run: in a thread, or a worker process.

    run -- pickle: `Call` ---->  worker
    run <-- pickle: `Reply` ---

`answer` calls a function and checks its result there, because reading a result
runs a user's code too (the `__float__` of what it holds). `main` serves calls
in a process of its own, see `calls.Process`.

Standard library only, no jax: a worker imports what its function does.
"""

import contextlib
import importlib
import multiprocessing.connection
import numbers
import os
import pickle
import resource
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from posttrain.util import coroutines, errors, imports

LARGEST = 1e18  # the largest |reward|: advantages are float32, and squared
_LARGEST_METRIC = 1e300  # the largest |metric|: means add them up
_QUOTED = 80  # characters of a value in an error


class Call(NamedTuple):
  """One call of a function, for some rollouts."""

  arguments: dict[str, Any]  # by name, without loggers
  loggers: tuple[str, ...]  # names of the loggers that the function takes
  count: int  # number of rollouts
  weight: float  # factor of the rewards in the sum


class Reply(NamedTuple):
  """The rewards of one call, or its fault."""

  rewards: tuple[float | None, ...] = ()  # None = not scorable, or bad
  bad: Mapping[int, str] = {}  # index -> a value that is no reward, quoted
  logged: Mapping[str, list[float]] = {}
  error: str = ''  # the fault of the whole call; '' = none
  stack: str = ''  # last frames of the exception, for the log
  is_full: bool = False  # the process has no memory left


def answer(
  fn: Callable, call: Call, passes: tuple[type[Exception], ...] = ()
) -> Reply:
  """Calls a function; returns its rewards and metrics, or its fault.

  Args:
    fn: the function.
    call: its arguments.
    passes: exceptions that are raised and no faults; the first one of a group.
  """
  logged: dict[str, list[float]] = {}

  def log_extra(column, values):
    known = [plain(x) for x in values]
    logged.setdefault(errors.text(column, _QUOTED), []).extend(
      float(x)
      for x in known
      if isinstance(x, numbers.Real) and abs(x) <= _LARGEST_METRIC
    )

  def log_metric(name, value):
    log_extra(name, [value])

  loggers = {'log_metric': log_metric, 'log_extra': log_extra}
  try:
    result = fn(**call.arguments, **{k: loggers[k] for k in call.loggers})
    result = plain(coroutines.wait(result))
    if not isinstance(result, Iterable):
      return Reply(
        error=f'must return a list of {call.count}, one per completion: got '
        f'{errors.quote(result, _QUOTED)}'
      )
    values = [plain(coroutines.wait(x)) for x in result]
    if len(values) != call.count:
      return Reply(
        error=f'must return a reward per rollout: got {len(values)}, expected '
        f'{call.count}'
      )
    rewards, bad = [], {}
    largest = LARGEST / max(1.0, abs(call.weight))
    for index, value in enumerate(values):
      if isinstance(value, numbers.Real) and abs(value) <= largest:  # no NaN
        value = float(value)
      elif value is not None:
        value, bad[index] = None, errors.quote(value, _QUOTED)
      rewards.append(value)
    return Reply(tuple(rewards), bad, {k: x for k, x in logged.items() if x})
  except BaseException as error:
    passed = error
    if isinstance(error, BaseExceptionGroup):
      passed = error.subgroup(passes)
    while isinstance(passed, BaseExceptionGroup):
      passed = passed.exceptions[0]
    if isinstance(passed, passes):
      raise passed from None
    return _raised(error)


def plain(value: Any) -> Any:
  """Converts a scalar of numpy, jax or torch to Python's."""
  return value.item() if getattr(value, 'ndim', None) == 0 else value


def _raised(error: BaseException) -> Reply:
  """Returns the fault of a function that raised."""
  place = errors.place(error)
  return Reply(
    error=f'must return rewards: it raised {errors.describe(error)}'
    f'{f" ({place})" if place else ""}; None marks a rollout as not scorable',
    stack=''.join(traceback.format_tb(error.__traceback__, -12)),
    is_full=isinstance(error, MemoryError),
  )


def main(descriptor: int) -> None:
  """Serves calls until the socket closes.

  A second process waits for the end of the run, whose end of stdin then
  closes, and kills the group: a function may hang, and have children.

  Args:
    descriptor: the socket's file descriptor.
  """
  socket = multiprocessing.connection.Connection(descriptor)
  if not os.fork():
    socket.close()
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  path, memory = socket.recv()
  try:
    fn = imports.function(path, 'fn')
  except BaseException as error:  # importing a module runs it
    socket.send(Reply(error=f'must be importable: {errors.describe(error)}'))
    return
  importlib.import_module('posttrain.types')  # numpy, before the limit
  if memory is not None:  # beyond what is in use, where the system can
    with (
      contextlib.suppress(OSError, ValueError),
      open('/proc/self/statm') as f,
    ):
      size = int(f.read().split()[0]) * resource.getpagesize() + memory
      resource.setrlimit(resource.RLIMIT_AS, (size, size))
  socket.send(Reply())
  pid = os.getpid()
  while True:
    try:
      message = socket.recv_bytes()
    except EOFError:
      return
    reply = read_and_answer(fn, message)
    if os.getpid() != pid:  # a child that the function forked
      os._exit(0)
    socket.send(reply)


def read_and_answer(fn: Callable, message: bytes) -> Reply:
  """Returns the reply to a call, which is a pickle of `Call`'s fields."""
  try:
    call = Call(*pickle.loads(message))
  except BaseException as error:  # of a class that cannot be imported
    return _raised(error)
  return answer(fn, call)
