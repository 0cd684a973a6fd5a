"""Errors of reading a step: those of damaged files, and all others."""

import errno
import re
from collections.abc import Callable
from typing import Any

from posttrain.util import foreign, memory

# Errors of the storage service that do not mean that a file is damaged.
TRANSIENT = 'CANCELLED|DEADLINE_EXCEEDED|UNAVAILABLE|RESOURCE_EXHAUSTED'
# Errors of the operating system that concern one file, not the process.
_OF_A_FILE = (
  errno.ENOENT,
  errno.ENOTDIR,
  errno.EISDIR,
  errno.EACCES,
  errno.EPERM,
  errno.EIO,
  errno.ELOOP,
)
_NOT_FOUND = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class Damaged(Exception):
  """A step that cannot be read, or differs from the data written."""


def attempt(read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
  """Calls `read`; turns its errors about broken files into `Damaged`."""
  try:
    return read(*args, **kwargs)
  except Exception as error:  # plain `Exception` is raised as well
    text = (str(error).strip().splitlines() or [''])[0][:200]
    unrelated = isinstance(error, (MemoryError, OSError))
    unrelated = unrelated or re.search(TRANSIENT, text) or memory.is_oom(error)
    of_a_file = isinstance(error, OSError) and error.errno in _OF_A_FILE
    # Orbax raises some FileNotFoundErrors without a number.
    if unrelated and not (of_a_file or isinstance(error, _NOT_FOUND)):
      raise
    # TensorStore adds its whole specification.
    text = text.partition(' See full TensorStore details')[0]
    raise Damaged(f'{foreign.kind(error)}: {foreign.text(text)}') from error
