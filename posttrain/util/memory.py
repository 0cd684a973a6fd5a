"""Host memory settings of the process, and the out-of-memory error."""

import contextlib
import ctypes
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


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
  """An out-of-memory error with the sizes and the config keys to lower."""


def is_oom(error: BaseException) -> bool:
  """Returns whether `error` is jax's out-of-memory error."""
  text = str(error)
  return isinstance(error, RuntimeError) and (
    'RESOURCE_EXHAUSTED' in text or 'Out of memory' in text
  )


@contextlib.contextmanager
def explain_oom(
  sizes: Mapping[str, Any], knobs: Sequence[str]
) -> Iterator[None]:
  """Replaces jax's out-of-memory error by one with sizes and config keys.

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
    text = ', '.join(f'{name}={value}' for name, value in sizes.items())
    raise OutOfDeviceMemory(
      f'the device ran out of memory: got {text}; lower '
      f'{", or ".join(f"config.{knob}" for knob in knobs)} '
      f'(jax: {str(error).splitlines()[0][:200]})'
    ) from error
