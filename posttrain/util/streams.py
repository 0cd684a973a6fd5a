"""Standard streams that may be closed, broken or full.

A daemon may be started with descriptors 0, 1 or 2 closed: the next files that
the process opens get these numbers, and the output of libraries goes into
them. The reader of a pipe may end first (`| head`). Neither is a failure of a
run.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


def open_closed() -> None:
  """Opens the null device for each standard stream that is closed."""
  for number, mode, name in (
    (0, 'r', 'stdin'),
    (1, 'w', 'stdout'),
    (2, 'w', 'stderr'),
  ):
    try:
      os.fstat(number)
    except OSError:
      null = os.open(os.devnull, os.O_RDWR)
      if null != number:  # not the lowest free descriptor
        os.dup2(null, number, inheritable=True)
        os.close(null)
      else:
        os.set_inheritable(number, True)
    if getattr(sys, name) is None:
      stream = open(number, mode, closefd=False)
      setattr(sys, name, stream)
      setattr(sys, f'__{name}__', stream)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
  """Drops what is printed after the reader of stdout or stderr has ended.

  Nothing that happens to stderr is an error; a full disk under stdout is one.
  """
  stdout, stderr = sys.stdout, sys.stderr
  sys.stdout, sys.stderr = _Guarded(stdout, False), _Guarded(stderr, True)
  try:
    yield
    sys.stdout.flush()
  finally:
    sys.stderr.flush()
    sys.stdout, sys.stderr = stdout, stderr


def keep_stdout() -> None:
  """Sends to stderr what C++ code writes to stdout, for ever."""
  sys.stdout.flush()
  stdout = os.fdopen(os.dup(1), 'w', buffering=1)
  os.dup2(2, 1)
  if isinstance(sys.stdout, _Guarded):
    sys.stdout.redirect(stdout)
  else:
    sys.stdout = stdout


class _Guarded:
  """A text stream; after a broken pipe it writes to the null device."""

  def __init__(self, stream: TextIO, any_error: bool):
    self._stream, self._any_error = stream, any_error

  def redirect(self, stream: TextIO) -> None:
    """Writes to another stream from now on."""
    self._stream = stream

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    with self._drop():
      self._stream.write(text)
    return len(text)

  def writelines(self, lines: Any) -> None:
    for line in lines:
      self.write(line)

  def flush(self) -> None:
    with self._drop():
      self._stream.flush()

  @contextlib.contextmanager
  def _drop(self) -> Iterator[None]:
    try:
      yield
    except OSError as error:
      if not (self._any_error or error.errno == errno.EPIPE):
        raise
      # What is still in the buffer, and what follows, goes to the null device:
      # the interpreter flushes the stream again when it ends.
      null = os.open(os.devnull, os.O_WRONLY)
      os.dup2(null, self._stream.fileno())
      os.close(null)
