"""A lock of a folder that the process holds, so that one run writes to it.

The lock is a POSIX record lock (`fcntl.lockf`) on a file in the folder: the
system drops it when the process ends, however it ends, and forked workers do
not inherit it. The file names the holder. It is never deleted: another process
may be about to lock it. A user may delete it, so the holder looks at it again
before it writes (`check`).
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import stat
import struct
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.util import foreign, json_files

NAME = 'lock'  # of the file in the folder
_NAMED = 8  # processes that a file names beside the holder
_BUSY = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# A process does not exclude itself from a record lock, and closing any
# descriptor of the file drops it: (device, inode) of each file that is locked
# here -> its holder. Such a file is not opened again.
_held: dict[tuple[int, int], dict[str, Any]] = {}
# The path of each locked file -> its (descriptor, (device, inode)).
_files: dict[str, tuple[int, tuple[int, int]]] = {}
_guard = threading.Lock()  # of `_held`: one thread locks or unlocks at a time


class Locked(ValueError):
  """The folder is locked by another run."""


@contextlib.contextmanager
def hold(folder: str, what: str, others: Sequence[str] = ()) -> Iterator[None]:
  """Locks an existing folder while the block runs.

  Warns, and locks nothing, where the file system has no locks.

  Args:
    folder: the folder.
    what: its name in errors, such as '--workdir'.
    others: the other processes of the run, as in 'process 1 on HOST'.

  Raises:
    Locked: another run holds it; names that.
    OSError: the lock file cannot be opened or written.
  """
  path = _path(folder)
  with _guard:
    _files[path] = _take(path, what, _holder(others))
  try:
    yield
  finally:
    with _guard:
      descriptor, identity = _files.pop(path)
      del _held[identity]
      os.close(descriptor)


def check(folder: str) -> None:
  """Checks that the lock of a folder is still the one taken here.

  Locks again if the file was deleted, with a warning. Does nothing if `hold`
  has not locked the folder.

  Raises:
    Locked: the file is another one: a second run may use the folder.
  """
  path = _path(folder)
  with _guard:
    if path not in _files:
      return
    descriptor, identity = _files[path]
    if not os.path.lexists(path):
      _files[path] = _take(path, folder, _held[identity])
      del _held[identity]
      os.close(descriptor)
      warnings.warn(f'{path} was deleted; it is put back', stacklevel=2)
    elif _identity(os.lstat(path)) != identity:
      raise Locked(
        f'{path} must be the file that this run has locked: it was deleted or '
        'replaced, so that a second run may have started in this folder; this '
        'one stops without saving'
      )


def is_held(folder: str) -> bool:
  """Returns whether a process, this one or another, holds a folder's lock.

  Takes no lock, so that a run which starts meanwhile is not refused. True where
  the system cannot tell: the file cannot be read, or there are no locks.
  """
  path = _path(folder)
  with _guard:
    try:
      if path in _files or _identity(os.lstat(path)) in _held:
        return True  # closing another descriptor of the file would drop it
      flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
      descriptor = os.open(path, flags)
    except FileNotFoundError:
      return False
    except OSError:
      return True
    try:
      return _conflicts(descriptor)
    except OSError:
      return True
    finally:
      os.close(descriptor)


def _conflicts(descriptor: int) -> bool:
  """Returns whether another process has locked a file (`F_GETLK`)."""
  kind, whence = fcntl.F_RDLCK, os.SEEK_SET
  if sys.platform == 'darwin':  # start, length, process, kind, whence
    layout, index, lock = 'qqihh0q', 3, (0, 0, 0, kind, whence)
  else:  # kind, whence, start, length, process
    layout, index, lock = 'hhqqi0q', 0, (kind, whence, 0, 0, 0)
  answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(layout, *lock))
  return struct.unpack(layout, answer)[index] != fcntl.F_UNLCK


def _path(folder: str) -> str:
  return os.path.join(os.path.realpath(folder), NAME)


def _take(
  path: str, what: str, holder: dict[str, Any]
) -> tuple[int, tuple[int, int]]:
  """Locks a file, which is created if it is missing, and names the holder."""
  with contextlib.suppress(FileNotFoundError):
    identity = _identity(os.lstat(path))
    if identity in _held:
      raise _locked(path, what, _held[identity])
  flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
  descriptor = os.open(path, flags, 0o644)
  try:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
      raise OSError(errno.EINVAL, 'no regular file', path)
    _lock(descriptor, path, what)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(holder).encode())
  except BaseException:
    os.close(descriptor)
    raise
  _held[_identity(status)] = holder
  return descriptor, _identity(status)


def _lock(descriptor: int, path: str, what: str) -> None:
  try:
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    if error.errno in _BUSY:
      raise _locked(path, what, _read(descriptor, path)) from None
    if error.errno not in _NO_LOCKS:
      raise
    warnings.warn(
      f'{what} should be on a file system with locks: got {path}, '
      f'{foreign.text(error)}; start no second run in it',
      stacklevel=5,
    )


def _read(descriptor: int, path: str) -> dict[str, Any]:
  """Returns the holder that a file names; {} if it names none."""
  try:
    holder = json_files.parse(os.pread(descriptor, 4096, 0), path)
  except ValueError:
    return {}
  return holder if isinstance(holder, dict) else {}


def _locked(path: str, what: str, holder: dict[str, Any]) -> Locked:
  who = 'another process, which is starting'
  if holder:
    who = (
      f'process {foreign.text(holder.get("pid"), 20)} on '
      f'{foreign.text(holder.get("host"), 80)}, since '
      f'{foreign.text(holder.get("since"), 40)}'
    )
    if holder.get('others'):
      who += f', with {foreign.text(holder["others"], 400)}'
  return Locked(
    f'{what} must have one run at a time: got {os.path.dirname(path)!r}, which '
    f'is in use by {who}; wait for its end, or stop it'
  )


def _holder(others: Sequence[str]) -> dict[str, Any]:
  now = datetime.datetime.now().astimezone()
  return {
    'pid': os.getpid(),
    'host': socket.gethostname(),
    'since': now.isoformat(timespec='seconds'),
    **({'others': _named(others)} if others else {}),
  }


def _named(others: Sequence[str]) -> str:
  """Returns the first processes in words, few enough for `_read`."""
  rest = len(others) - _NAMED
  return ', '.join([*others[:_NAMED], *([f'{rest} more'] if rest > 0 else [])])


def _identity(status: os.stat_result) -> tuple[int, int]:
  return status.st_dev, status.st_ino
