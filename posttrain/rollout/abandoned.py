"""Threads of calls that exceeded their time limits.

A thread cannot be ended, so such a call runs on: it is left behind, its result
is ignored, and it is counted. All of them are daemon threads, which the exit of
the process does not wait for.
"""

import threading

MOST = 64  # threads that run on at a time; one more stops the run

_threads: list[threading.Thread] = []
_lock = threading.Lock()


class TooManyThreads(RuntimeError):
  """More abandoned calls run on than a process can carry."""


def add(thread: threading.Thread) -> None:
  """Counts a thread until it ends."""
  with _lock:
    _threads.append(thread)


def count() -> int:
  """Returns the number of abandoned threads that still run."""
  with _lock:
    _threads[:] = [thread for thread in _threads if thread.is_alive()]
    return len(_threads)


def check(what: str) -> None:
  """Checks that few abandoned threads still run.

  Args:
    what: the calls that hang, and their option, for the error.

  Raises:
    TooManyThreads: more than `MOST` run.
  """
  if (running := count()) > MOST:
    raise TooManyThreads(
      f'{what}: got {running} calls that were given up and still run, '
      f'expected at most {MOST}; fix what hangs'
    )
