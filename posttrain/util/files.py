"""Files that are written whole or not at all, and never through a link."""

import contextlib
import os
from collections.abc import Iterator
from typing import IO, Any


@contextlib.contextmanager
def replacing(
  path: str | os.PathLike[str], mode: str = 'x'
) -> Iterator[IO[Any]]:
  """Opens a new file that takes the name of a path when the block ends.

  An existing file or link of that name is replaced; a link's target stays as it
  is. If the block raises, nothing changes.

  Args:
    path: the file.
    mode: 'x' for text (UTF-8), 'xb' for bytes.
  """
  partial = f'{os.fspath(path)}.tmp'
  with contextlib.suppress(FileNotFoundError):
    os.remove(partial)  # of a run that was killed; removes no link's target
  try:
    encoding = None if 'b' in mode else 'utf-8'
    with open(partial, mode, encoding=encoding) as file:
      yield file
    os.replace(partial, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.remove(partial)
    raise
