"""Files that are written whole, JSON files, and the lock of a folder."""

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import IO, Any

from posttrain.util import errors

LOCK = 'lock'  # name of the locked file in a folder
BRIEFLY = 0.2  # seconds; `is_locked` holds a lock for a moment


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


def read_json(path: str | os.PathLike[str]) -> Any:
  """Returns the value of a JSON file.

  Args:
    path: the file; UTF-8, with or without a byte order mark.

  Raises:
    ValueError: it is missing, cannot be read, or is no JSON; names the file.
  """
  try:
    data = pathlib.Path(path).read_bytes()
  except OSError as error:
    raise ValueError(f'{path} must be a file with JSON: {error}') from error
  return parse_json(data, os.fspath(path))


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the JSON object in a file; see `read_json`."""
  value = read_json(path)
  if not isinstance(value, dict):
    raise ValueError(
      f'{path} must hold a JSON object: got {errors.quote(value)}'
    )
  return value


def parse_json(data: bytes | str, where: str) -> Any:
  """Returns the value of a JSON text.

  Args:
    data: the text; bytes are UTF-8, with or without a byte order mark.
    where: the name of its place in errors, such as a path or 'rows.jsonl:3'.

  Raises:
    ValueError: it is no JSON; names the place.
  """
  try:
    return json.loads(data)
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f'{where} must be JSON: {errors.text(error)}{errors.pointer(where)}'
    ) from None


class Locked(ValueError):
  """The folder is locked by another run."""


@contextlib.contextmanager
def lock(
  folder: str, what: str, others: Sequence[str] = (), seconds: float = BRIEFLY
) -> Iterator[None]:
  """Locks an existing folder while the block runs, so that one run writes.

  The lock is `flock` on a file in the folder, which the system drops when the
  process ends, however it ends. The file names the holder. It is never deleted:
  another process may be about to lock it. Warns, and locks nothing, where the
  file system has no locks.

  Args:
    folder: the folder.
    what: its name in errors, such as '--workdir'.
    others: the other processes of the run, as in 'process 1 on HOST'.
    seconds: how long to wait for a lock that is held.

  Raises:
    Locked: another run holds it; names that.
    OSError: the lock file cannot be opened or written.
  """
  with open(os.path.join(folder, LOCK), 'a+', errors='replace') as f:
    end = time.monotonic() + seconds
    while True:
      try:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        if time.monotonic() < end:
          time.sleep(seconds / 10)
          continue
        f.seek(0)
        holder = errors.text(f.read(), 600) or 'a process that starts'
        raise Locked(
          f'{what} must have one run at a time: got '
          f'{os.path.abspath(folder)!r}, which is in use by {holder}'
        ) from None
      except OSError as error:
        warnings.warn(
          f'{what} should be on a file system with locks: got {folder}, '
          f'{errors.text(error)}; start no second run in it',
          stacklevel=4,
        )
        break
    now = datetime.datetime.now().astimezone().isoformat(timespec='seconds')
    holder = f'process {os.getpid()} on {socket.gethostname()}, since {now}'
    f.truncate(0)
    f.write(', with '.join([holder, *others]))
    f.flush()
    yield


def is_locked(folder: str) -> bool:
  """Returns whether a process, this one or another, holds a folder's lock.

  True where that is unknown: the file cannot be read, or there are no locks.
  """
  try:
    with open(os.path.join(folder, LOCK)) as f:
      fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except FileNotFoundError:
    return False
  except OSError:
    return True
  return False
