"""Freed memory of large bodies and responses, returned to the kernel."""

import threading

from posttrain.util import memory

DELAY = 1.0  # seconds, in which what is large may be freed
_due = threading.Event()


def soon() -> None:
  """Returns freed memory to the kernel after `DELAY`, in a thread."""
  if not _due.is_set():
    _due.set()
    timer = threading.Timer(DELAY, _release)
    timer.daemon = True
    timer.start()


def _release() -> None:
  _due.clear()
  memory.release_freed_memory()
