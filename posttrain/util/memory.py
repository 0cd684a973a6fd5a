"""Host memory that stays in the process, and one clear out-of-memory error."""

import contextlib
import ctypes
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


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
