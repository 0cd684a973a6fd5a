"""Host memory settings of the process, and the out-of-memory error."""

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence


def keep_freed_memory() -> bool:
  """Makes glibc keep freed memory; returns whether that worked.

  By default large buffers come from `mmap` and return to the kernel when freed,
  so every step pays for the first touch of each page again. Does nothing
  without glibc.
  """
  if not sys.platform.startswith('linux'):
    return False
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (OSError, AttributeError):
    return False
  trim_threshold, mmap_threshold = -1, -3  # M_* of malloc.h
  large = 2**31 - 1
  # On 32-bit glibc the largest allowed mmap threshold is lower.
  return bool(mallopt(mmap_threshold, large) and mallopt(trim_threshold, large))


class OutOfDeviceMemory(RuntimeError):
  """An out-of-memory error with its phase and what to do."""


def is_oom(error: BaseException) -> bool:
  """Returns whether `error` is jax's out-of-memory error."""
  text = str(error)
  return isinstance(error, RuntimeError) and (
    'RESOURCE_EXHAUSTED' in text or 'Out of memory' in text
  )


@contextlib.contextmanager
def explain_oom(
  what: str, advice: Callable[[str], Sequence[str]]
) -> Iterator[None]:
  """Replaces jax's out-of-memory error by one with phase and remedies.

  Args:
    what: a noun for the block.
    advice: returns what to do, the most useful first, for a phase of
      `watchdog`, or '' outside of all.

  Raises:
    OutOfDeviceMemory: in place of the jax error, which is its cause.
  """
  try:
    yield
  except RuntimeError as error:
    if isinstance(error, OutOfDeviceMemory) or not is_oom(error):
      raise
    phase = getattr(error, 'phase', '')
    line = str(error).splitlines()[0][:200]
    advices = advice(phase) or ['take a device with more of it']
    raise OutOfDeviceMemory(
      f'{what}{phase and f", phase {phase}"} must fit into the memory of a '
      f'device: got {line}; {", or ".join(advices)}; other processes on '
      'it take memory as well'
    ) from error
