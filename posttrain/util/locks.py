"""A lock of a folder that the process holds, so that one run writes to it.

The lock is `flock` on a file in the folder, which the system drops when the
process ends, however it ends. The file names the holder. It is never deleted:
another process may be about to lock it.
"""

import contextlib
import datetime
import fcntl
import os
import socket
import time
import warnings
from collections.abc import Iterator, Sequence

from posttrain.util import errors

NAME = 'lock'  # of the file in the folder
_NAMED = 8  # processes that a file names beside the holder
BRIEFLY = 0.2  # seconds; `is_held` holds a lock for a moment


class Locked(ValueError):
  """The folder is locked by another run."""


@contextlib.contextmanager
def hold(
  folder: str, what: str, others: Sequence[str] = (), seconds: float = BRIEFLY
) -> Iterator[None]:
  """Locks an existing folder while the block runs.

  Warns, and locks nothing, where the file system has no locks.

  Args:
    folder: the folder.
    what: its name in errors, such as '--workdir'.
    others: the other processes of the run, as in 'process 1 on HOST'.
    seconds: how long to wait for a lock that is held.

  Raises:
    Locked: another run holds it; names that.
    OSError: the lock file cannot be opened or written.
  """
  with open(os.path.join(folder, NAME), 'a+', errors='replace') as f:
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
        raise Locked(
          f'{what} must have one run at a time: got '
          f'{os.path.abspath(folder)!r}, which is in use by '
          f'{errors.text(f.read(), 600) or "a process that starts"}; wait for '
          'its end, or stop it'
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
    if others:
      holder += f', with {", ".join(others[:_NAMED])}'
    if len(others) > _NAMED:
      holder += f', {len(others) - _NAMED} more'
    f.truncate(0)
    f.write(holder)
    f.flush()
    yield


def is_held(folder: str) -> bool:
  """Returns whether a process, this one or another, holds a folder's lock.

  True where that is unknown: the file cannot be read, or there are no locks.
  """
  try:
    with open(os.path.join(folder, NAME)) as f:
      fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except FileNotFoundError:
    return False
  except OSError:
    return True
  return False
