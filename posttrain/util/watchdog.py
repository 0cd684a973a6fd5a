"""A process that reports, and may end, a run that makes no progress.

    with watchdog.watch(600, 3600, exit_seconds=None, code=errors.STALLED):
      with watchdog.phase('rollout', first=True):
        with watchdog.waiting(lambda: 'environment sums: step of task 3'):
          ...
        watchdog.progress()

Progress is the begin or end of a phase or of a wait, and `progress()`, which
loops of unknown length call in each round. The run writes a counter of it, its
phase and what it waits for into a file that both processes map. The watchdog,
which is this module run as a script, reads the file. It imports the standard
library alone, works while the interpreter lock of the run is held, and ends
with the run:

  1. after `seconds` without progress, one line on stderr names phase and waits;
  2. after `exit_seconds` it sends SIGUSR1, at which the run writes the stacks
     of all its threads to stderr; then it has the run end with `code`, and
     after five seconds, if the run cannot, it sends SIGKILL.

Both limits are at least `first_seconds` in the first pass of a phase, which
compiles. Stacks are read only from a run that is about to end: reading those of
other threads can crash it.
"""

import collections
import contextlib
import faulthandler
import itertools
import logging
import mmap
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO, NoReturn

# What a phase waits for where no wait is registered.
_WAITS_FOR = {
  'update': 'the device, or another process in a collective',
  'save': 'the file system of the checkpoints',
  'rollout': 'the device',
  'scoring': 'the device',
  'eval': 'the device',
}
_SHOWN = 3  # waits in a message
_GRACE = 5.0  # seconds from the stacks, or the log, to the end
# The file: counter, whether the phase is in its first pass, bytes of the text;
# the process and the three limits, 0 = none; the text.
_STATE, _LIMITS = struct.Struct('Q?H'), struct.Struct('qddd')
_TEXT = _STATE.size + _LIMITS.size
_SIZE = 4096  # bytes of the file

_shared = mmap.mmap(-1, _SIZE)  # read by nobody outside of `watch`
_lock = threading.RLock()  # of a write
_phases: list[tuple[str, bool]] = []  # name, whether in its first pass
_waits: dict[int, Callable[[], str]] = {}  # by number, the oldest first
_numbers = itertools.count()
_count = _others = 0  # progress of this process, and of others


def progress() -> None:
  """Registers progress."""
  global _count
  _count += 1
  struct.pack_into('Q', _shared, 0, _count + _others)


def count() -> int:
  """Returns how much progress there was, a number that only grows."""
  return _count


def others_progress() -> None:
  """Registers progress of another process, which does not count as ours."""
  global _others
  _others += 1
  struct.pack_into('Q', _shared, 0, _count + _others)


@contextlib.contextmanager
def phase(name: str, first: bool = False) -> Iterator[None]:
  """Names the phase that the main thread is in; phases may nest.

  In another thread it has no effect.

  Args:
    name: its name.
    first: whether the block may compile, and so take long.
  """
  if not _is_main():
    yield
    return
  _phases.append((name, first))
  _write()
  try:
    yield
  except Exception as error:
    vars(error).setdefault('phase', name)  # for `memory.explain_oom`
    raise
  finally:
    _phases.pop()
    _write()


def _is_main() -> bool:
  return threading.current_thread() is threading.main_thread()


class Timers:
  """Seconds by name, accumulated until `take`.

  timers = Timers()
  with timers('data'):
    batch = next(pipeline)
  timers.take()  # {'data': 0.01}; the next step starts at zero

  Blocks of other threads than the main one are named `beside/NAME`.
  """

  def __init__(self):
    self._seconds: dict[str, float] = collections.defaultdict(float)
    self.last: dict[str, float] = {}  # seconds of the latest block of a name
    self._lock = threading.Lock()

  @contextlib.contextmanager
  def __call__(self, name: str) -> Iterator[None]:
    """Times a block, which is a phase; the first of a name may compile."""
    if not _is_main():
      name = f'beside/{name}'
    start = time.perf_counter()
    try:
      with phase(name, first=name not in self.last):
        yield
    finally:
      self.last[name] = time.perf_counter() - start
      self.add(name, self.last[name])

  def add(self, name: str, seconds: float) -> None:
    """Adds seconds that were timed elsewhere."""
    with self._lock:
      self._seconds[name] += seconds

  def take(self) -> dict[str, float]:
    """Returns the seconds since the last `take`, and resets them."""
    with self._lock:
      seconds = dict(self._seconds)
      self._seconds.clear()
    return seconds


@contextlib.contextmanager
def waiting(what: Callable[[], str]) -> Iterator[None]:
  """Registers a wait, in any thread.

  Args:
    what: returns what it waits for, as in 'environment sums: step of task 3'.
  """
  number = next(_numbers)
  _waits[number] = what
  _write()
  try:
    yield
  finally:
    del _waits[number]
    _write()


def current() -> str:
  """Returns the name of the phase."""
  return _phases[-1][0] if _phases else 'start'


def describe() -> str:
  """Returns the phase and what it waits for."""
  name, waits = current(), list(_waits.values())
  texts = [what() for what in waits[:_SHOWN]]
  if len(waits) > _SHOWN:
    texts.append(f'{len(waits) - _SHOWN} more')
  return f'in phase {name}, which waits for ' + (
    ', '.join(texts) or _WAITS_FOR.get(name, 'its own code')
  )


def _write() -> None:
  """Registers progress, and writes phase and waits."""
  with _lock:
    text = describe().encode(errors='replace')[: _SIZE - _TEXT]
    first = _phases[-1][1] if _phases else False
    progress()
    _shared[_TEXT : _TEXT + len(text)] = text
    _STATE.pack_into(_shared, 0, _count + _others, first, len(text))


@contextlib.contextmanager
def watch(
  seconds: float, first_seconds: float, exit_seconds: float | None, code: int
) -> Iterator[None]:
  """Watches this process; does nothing if `seconds` is 0.

  Args:
    seconds: without progress, before a line on stderr.
    first_seconds: the least of both limits in the first pass of a phase.
    exit_seconds: without progress, before the process ends; None = never.
    code: the exit code at that end.
  """
  global _shared
  if not seconds:
    yield
    return
  before = _shared
  with tempfile.TemporaryFile() as f:
    f.write(bytes(_SIZE))  # a full disk fails here, and not in the mapping
    f.flush()
    _shared = mmap.mmap(f.fileno(), _SIZE)
    limits = seconds, first_seconds, exit_seconds or 0.0
    _LIMITS.pack_into(_shared, _STATE.size, os.getpid(), *limits)
    _write()
    process = subprocess.Popen(
      [sys.executable, '-I', '-S', __file__],
      stdin=f,
      stdout=subprocess.PIPE,
      bufsize=0,
    )
  faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
  assert process.stdout is not None

  def end_if_told(pipe: BinaryIO) -> None:
    if pipe.read(1):
      os._exit(code)

  ending = threading.Thread(
    target=end_if_told, args=(process.stdout,), daemon=True
  )
  ending.start()
  try:
    yield
  finally:
    process.kill()
    process.wait()
    ending.join()
    process.stdout.close()
    faulthandler.unregister(signal.SIGUSR1)
    _shared = before


def end(reason: str, code: int) -> NoReturn:
  """Ends this process, whatever its threads do.

  Args:
    reason: for the log.
    code: the exit code.
  """
  limit = threading.Timer(_GRACE, os._exit, (code,))  # for the log
  limit.start()
  logging.getLogger('absl').error('watchdog: %s; exit %d', reason, code)
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError):
      stream.flush()
  os._exit(code)


def _main() -> None:
  """Watches the parent process until it ends; see the module."""
  for number in (signal.SIGINT, signal.SIGTERM):  # meant for the run
    signal.signal(number, signal.SIG_IGN)
  shared = mmap.mmap(0, _SIZE)  # of stdin
  limits = _LIMITS.unpack_from(shared, _STATE.size)
  parent, seconds, first_seconds, exit_seconds = limits
  tick = min(1.0, seconds / 10)
  latest, idle, reported, before = -1, 0.0, False, time.monotonic()
  while os.getppid() == parent:
    time.sleep(tick)
    now = time.monotonic()
    # Of a time in which this process was suspended as well, a part counts.
    idle, before = idle + min(now - before, 2 * tick), now
    number, first, length = _STATE.unpack_from(shared)
    if number != latest:
      if reported:
        _say('progress again')
      latest, idle, reported = number, 0.0, False
    text = shared[_TEXT : _TEXT + length].decode(errors='replace')
    text = f'no progress for {idle:.0f} s {text}'
    least = first_seconds if first else 0.0
    if idle >= max(seconds, least) and not reported:
      reported = True
      _say(text)
    if exit_seconds and idle >= max(exit_seconds, least):
      _say(f'{text}; the run ends, with these stacks:')
      os.kill(parent, signal.SIGUSR1)
      time.sleep(_GRACE / 5)
      with contextlib.suppress(OSError):
        os.write(1, b'.')
      end_at = time.monotonic() + _GRACE
      while os.getppid() == parent and time.monotonic() < end_at:
        time.sleep(0.05)
      if os.getppid() == parent:
        _say('it holds the interpreter lock, or cannot end: SIGKILL')
        os.kill(parent, signal.SIGKILL)
      return


def _say(text: str) -> None:
  """Prints a line, unless nobody reads stderr."""
  line = f'watchdog: {text}\n'.encode()
  thread = threading.Thread(target=os.write, args=(2, line), daemon=True)
  thread.start()
  thread.join(1.0)


if __name__ == '__main__':
  _main()
