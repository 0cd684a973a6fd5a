"""What a run costs: compilations, seconds, memory; and one clear OOM error."""

import collections
import contextlib
import ctypes
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

_COMPILED = '/jax/core/compile/backend_compile_duration'
_CACHE_HIT = '/jax/compilation_cache/cache_hits'
_counters: list['CompileCounter'] = []  # those that are counting now
_listening = False


class CompileCounter:
  """Counts the XLA programs made ready while it is open.

  A program counts when it was compiled and also when the persistent
  compilation cache had it: both mean that jax met a new program, which is
  what a recompilation bug looks like, and so `count` does not depend on what
  the disk holds. `cached` says how many of them were only loaded, `seconds`
  what all of them took. A call that jax answers from memory counts nothing.

    with CompileCounter() as compiles:
      step(state, batch)
    assert compiles.count == 0
  """

  def __init__(self):
    self.count = 0
    self.cached = 0
    self.seconds = 0.0
    self._taken = 0.0

  def __enter__(self) -> 'CompileCounter':
    _listen()
    _counters.append(self)
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def open(self) -> 'CompileCounter':
    """Starts counting without a `with` block."""
    return self.__enter__()

  def take(self) -> float:
    """Returns the seconds since the last take."""
    seconds, self._taken = self.seconds - self._taken, self.seconds
    return seconds

  def close(self) -> None:
    """Stops counting; the numbers stay."""
    if self in _counters:
      _counters.remove(self)


def _listen() -> None:
  """Registers this module with jax, once per process."""
  global _listening
  if _listening:
    return
  _listening = True

  def on_duration(event: str, seconds: float, **_) -> None:
    if event == _COMPILED:
      for counter in _counters:
        counter.count += 1
        counter.seconds += seconds

  def on_event(event: str, **_) -> None:
    if event == _CACHE_HIT:
      for counter in _counters:
        counter.cached += 1

  jax.monitoring.register_event_duration_secs_listener(on_duration)
  jax.monitoring.register_event_listener(on_event)


class Timers:
  """Seconds per name, accumulated until they are taken.

    timers = Timers()
    with timers('data'):
      batch = next(pipeline)
    timers.take()  # {'data': 0.01}; the next step starts at zero
  """

  def __init__(self):
    self._now = collections.Counter()

  @contextlib.contextmanager
  def __call__(self, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
      yield
    finally:
      self._now[name] += time.perf_counter() - start

  def take(self) -> dict[str, float]:
    """Returns the seconds since the last take, and starts from zero."""
    taken = dict(self._now)
    self._now.clear()
    return taken


def enable_compilation_cache(folder: str | None) -> None:
  """Keeps every compiled program in `folder`; None does nothing."""
  if folder is None:
    return
  folder = os.path.abspath(os.path.expanduser(folder))
  os.makedirs(folder, exist_ok=True)
  jax.config.update('jax_compilation_cache_dir', folder)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


def keep_freed_memory() -> bool:
  """Makes glibc keep freed memory in the process; True where that worked.

  Large buffers come from `mmap` and go back to the kernel when freed, so the
  next step pays for the first touch of every page again. Elsewhere than on
  glibc this does nothing.
  """
  if not sys.platform.startswith('linux'):
    return False
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (OSError, AttributeError):
    return False
  trim_threshold, mmap_threshold = -1, -3  # M_* of malloc.h
  large = 2**31 - 1
  # Off 64-bit glibc the largest allowed mmap threshold is lower.
  return bool(mallopt(mmap_threshold, large) and mallopt(trim_threshold, large))


class OutOfDeviceMemory(RuntimeError):
  """The device ran out of memory; says at which sizes, and what to turn."""


def is_oom(error: BaseException) -> bool:
  """Whether `error` is jax saying that a device's memory is exhausted."""
  text = str(error)
  return isinstance(error, RuntimeError) and (
      'RESOURCE_EXHAUSTED' in text or 'Out of memory' in text
  )


@contextlib.contextmanager
def explain_oom(
    sizes: Mapping[str, Any], knobs: Sequence[str]
) -> Iterator[None]:
  """Turns jax's out-of-memory error into one that says what to do.

  Args:
    sizes: resolved sizes to print, such as {'micro_batch_tokens': 4096}.
    knobs: dotted config keys to lower, the most useful first.

  Raises:
    OutOfDeviceMemory: in place of the jax error, which is its cause.
  """
  try:
    yield
  except OutOfDeviceMemory:
    raise
  except RuntimeError as error:
    if not is_oom(error):
      raise
    listed = ', '.join(f'{name}={value}' for name, value in sizes.items())
    raise OutOfDeviceMemory(
        f'the device ran out of memory: got {listed}; lower '
        f'{", or ".join(f"config.{knob}" for knob in knobs)} '
        f'(jax said: {str(error).splitlines()[0][:200]})'
    ) from error


def quiet(package: str) -> None:
  """Drops what `package` logs through absl, but for its errors."""
  logger = logging.getLogger('absl')
  if not any(getattr(f, 'package', None) == package for f in logger.filters):
    logger.addFilter(_ErrorsOnly(package))


class _ErrorsOnly(logging.Filter):

  def __init__(self, package: str):
    super().__init__()
    self.package = package

  def filter(self, record: logging.LogRecord) -> bool:
    folder = f'{os.sep}{self.package}{os.sep}'
    return record.levelno >= logging.ERROR or folder not in record.pathname
