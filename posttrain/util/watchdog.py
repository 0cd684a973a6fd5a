"""A watchdog: reports, and may end, a run that makes no progress.

    with watchdog.watch(seconds=600, exit_seconds=None, folder='DIR/stalls'):
      with watchdog.phase('rollout'):
        with watchdog.waiting(lambda: 'environment sums: step of task 3'):
          ...
        watchdog.progress()

Progress is the begin or end of a phase or of a wait, and `progress()`, which
loops of unknown length call in each round. After `seconds` without any:

  1. the stacks of all threads in `folder`;
  2. one line on stderr, with the phase and what it waits for;
  3. after `exit_seconds`, the process ends with `exits.STALLED`.

Time in which jax compiles does not count, nor does time in which the process
was suspended. A call that holds the interpreter lock stops the watchdog's
thread too; then `faulthandler`, which needs no lock, writes the stacks to
stderr, and ends the process with exit code 1, an hour after `exit_seconds`: it
cannot tell such a call from a suspended process.
"""

import contextlib
import datetime
import faulthandler
import itertools
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from posttrain.util import exits

# What a phase waits for where no wait is registered.
_WAITS_FOR = {
  'update': 'the device, or another process in a collective',
  'save': 'the file system of the checkpoints',
  'rollout': 'the device',
  'scoring': 'the device',
  'eval': 'the device',
}
_SHOWN = 3  # waits in a message
NO_PHASE = 'other work'  # the text of no phase
LOCK_MARGIN = 3600.0  # seconds that a held interpreter lock gets beyond others
_COMPILER = os.fsencode(os.path.join('jax', '_src', 'compiler.py'))

# Name, text, start.
_phases: list[tuple[str, str, float]] = []
# Number -> what, its start.
_waits: dict[int, tuple[Callable[[], str], float]] = {}
_numbers = itertools.count()
_last = time.monotonic()  # of the last progress
_count = 0  # of progress


def progress() -> None:
  """Registers progress."""
  global _last, _count
  _last = time.monotonic()
  _count += 1


def count() -> int:
  """Returns how much progress there was, a number that only grows."""
  return _count


def others_progress() -> None:
  """Registers progress of another process, which does not count as ours."""
  global _last
  _last = time.monotonic()


@contextlib.contextmanager
def phase(name: str, text: str = '') -> Iterator[None]:
  """Names the phase that the main thread is in; phases may nest.

  Args:
    name: its name.
    text: the name in more words, for `activity`; '' = the name.
  """
  progress()
  _phases.append((name, text or name, _last))
  try:
    yield
  finally:
    _phases.pop()
    progress()


@contextlib.contextmanager
def waiting(what: Callable[[], str]) -> Iterator[None]:
  """Registers a wait, in any thread.

  Args:
    what: returns what it waits for, as in 'environment sums: step of task 3';
      called only if the run makes no progress.
  """
  number = next(_numbers)
  _waits[number] = what, time.monotonic()
  try:
    yield
  finally:
    del _waits[number]
    progress()


@contextlib.contextmanager
def watch(
  seconds: float, exit_seconds: float | None, folder: str
) -> Iterator[None]:
  """Watches the process; does nothing if `seconds` is 0.

  Args:
    seconds: without progress, before stacks are written.
    exit_seconds: without progress, before the process ends; None = never.
    folder: of the stacks; created when the first are written.
  """
  if not seconds:
    yield
    return
  watcher = _Watcher(seconds, exit_seconds, folder)
  watcher.start()
  try:
    yield
  finally:
    watcher.stop()


def current() -> str:
  """Returns the name of the phase."""
  return _phases[-1][0] if _phases else 'start'


def activity() -> tuple[str, float]:
  """Returns the text of the phase, and its start (`time.monotonic`)."""
  phases = _phases[-1:]  # another thread may end the phase
  return phases[0][1:] if phases else (NO_PHASE, _last)


def describe() -> str:
  """Returns the phase, and what it waits for with the seconds of each wait."""
  name, now = current(), time.monotonic()
  waits = sorted(list(_waits.values()), key=lambda wait: wait[1])
  texts = [f'{what()} ({now - start:.0f} s)' for what, start in waits[:_SHOWN]]
  if len(waits) > _SHOWN:
    texts.append(f'{len(waits) - _SHOWN} more')
  return f'in phase {name}, which waits for ' + (
    ', '.join(texts) or _WAITS_FOR.get(name, 'its own code')
  )


class _Watcher:
  """The watchdog's thread."""

  def __init__(self, seconds: float, exit_seconds: float | None, folder: str):
    self._seconds, self._exit_seconds = seconds, exit_seconds
    self._folder = folder
    self._tick = min(5.0, seconds / 10)
    self._stopped = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name='watchdog', daemon=True
    )

  def start(self) -> None:
    progress()
    self._arm()
    self._thread.start()

  def stop(self) -> None:
    self._stopped.set()
    self._thread.join()
    faulthandler.cancel_dump_traceback_later()

  def _arm(self) -> None:
    """Asks faulthandler for stacks unless it is asked again before."""
    ends = self._exit_seconds is not None
    timeout = self._exit_seconds + LOCK_MARGIN if ends else self._seconds
    faulthandler.dump_traceback_later(
      timeout + 2 * self._tick, exit=ends, file=2
    )

  def _run(self) -> None:
    reported = None  # time of the progress after which a stall was reported
    late, idle, before = 4 * self._tick, 0.0, time.monotonic()
    since = _last
    while not self._stopped.wait(self._tick):
      self._arm()
      now = time.monotonic()
      # A tick that lasted far too long: the process was suspended, or the
      # interpreter lock was held. Only a part of it counts.
      idle, before = idle + min(now - before, late), now
      if compiles():
        progress()
      if _last != since:
        since, idle = _last, min(now - _last, idle)
      if reported is not None and since != reported:
        _within(self._tick, _log, 'progress again after the stall')
        reported = None
      if idle >= self._seconds and reported is None:
        reported = since
        self._report(idle)
      if self._exit_seconds is not None and idle >= self._exit_seconds:
        end(f'no progress for {idle:.0f} s {describe()}', self._tick)

  def _report(self, idle: float) -> None:
    path = os.path.join(self._folder, _file_name())
    # The file system may be what hangs, or a full pipe behind stderr.
    _within(self._tick, _write_stacks, path)
    text = 'no progress for %.0f s %s; stacks: %s'
    _within(self._tick, _log, text, idle, describe(), path)


def end(
  reason: str, seconds: float = 5.0, code: int = exits.STALLED
) -> NoReturn:
  """Ends the process, whatever its threads do.

  Args:
    reason: for the log.
    seconds: how long to wait for the log.
    code: the exit code.
  """
  _within(seconds, _log, '%s; exit %d', reason, code)
  _within(seconds, _flush)
  os._exit(code)


def _within(seconds: float, fn: Callable[..., object], *args: object) -> None:
  """Calls a function that may hang; gives it up after some seconds."""
  thread = threading.Thread(target=fn, args=args, daemon=True)
  thread.start()
  thread.join(seconds)


def _log(text: str, *values: object) -> None:
  logging.getLogger('absl').error(f'watchdog: {text}', *values)


def _file_name() -> str:
  now = datetime.datetime.now(datetime.UTC)
  # Processes of other hosts, or containers, may have the same id.
  return f'{now:%Y%m%dT%H%M%S}_{socket.gethostname()}_{os.getpid()}.txt'


def _write_stacks(path: str) -> None:
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path, 'w') as f:
    print(f'no progress {describe()}\n', file=f, flush=True)
    faulthandler.dump_traceback(f, all_threads=True)


def compiles() -> bool:
  """Returns whether some thread is in jax's compiler.

  faulthandler reads all stacks at once, of the newest 100 threads. A loop over
  `frame.f_back` lets other threads run in between, and may read frames that
  they have freed: CPython 3.11 then ends with a segmentation fault. So it is
  left to what faulthandler cannot read, the main thread behind 100 others.
  """
  with contextlib.suppress(OSError), tempfile.TemporaryFile() as f:
    faulthandler.dump_traceback(f, all_threads=True)
    f.seek(0)
    stacks = f.read()
    if _COMPILER in stacks or not stacks.rstrip().endswith(b'...'):
      return _COMPILER in stacks
  # No folder for temporary files, or more threads.
  frame = sys._current_frames().get(threading.main_thread().ident or 0)
  while frame is not None:
    if _COMPILER in frame.f_code.co_filename.encode():
      return True
    frame = frame.f_back
  return False


def _flush() -> None:
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(Exception):
      stream.flush()
