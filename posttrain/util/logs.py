"""Filters for what other packages log, and print from their threads."""

import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from posttrain.util import errors, foreign

_LONGEST = 4000  # characters of a warning


def quiet(package: str) -> None:
  """Drops the records below ERROR that `package` logs through absl.

  Errors are one line without a traceback: the package raises them as well.
  """
  logger = logging.getLogger('absl')
  if not any(getattr(f, 'package', None) == package for f in logger.filters):
    logger.addFilter(_ErrorsOnly(package))


@contextlib.contextmanager
def one_form() -> Iterator[None]:
  """Prints log records and warnings as 'warning: TEXT'.

  For the process of a command; other programs have their own forms. A module of
  the user that sets up logging itself replaces the form of log records.

  A library does so without being asked to: absl, whenever it logs anything and
  the root logger has no handler, calls `logging.basicConfig()`, as functions
  such as `logging.warning` do. Without arguments it has no effect here.
  """
  handler = logging.StreamHandler(sys.stderr)
  handler.setLevel(logging.WARNING)
  handler.setFormatter(_WithLevel())
  before = warnings.showwarning, logging.lastResort
  configure = logging.basicConfig

  def show(message, category, filename, lineno, file=None, line=None):
    del category, file, line
    ours = f'{os.sep}posttrain{os.sep}' in filename
    place = '' if ours else f' ({os.path.basename(filename)}:{lineno})'
    text = foreign.text(message, _LONGEST)
    print(f'warning: {text}{place}', file=sys.stderr)

  def configure_if_asked(**options: Any) -> None:
    if options:
      configure(**options)

  # The handler of records that no other handles: `basicConfig` has no effect
  # once the root logger has one.
  warnings.showwarning, logging.lastResort = show, handler
  logging.basicConfig = configure_if_asked
  try:
    yield
  finally:
    warnings.showwarning, logging.lastResort = before
    logging.basicConfig = configure


class _WithLevel(logging.Formatter):
  def format(self, record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info:  # a bug in a thread, for example
      text = super().format(record)
    return f'{record.levelname.lower()}: {text}'


@contextlib.contextmanager
def one_line_background() -> Iterator[None]:
  """Shows exceptions of background threads and of C callbacks as one line.

  Orbax prints one traceback per file that it cannot write; the error itself is
  raised where the main thread waits. Equal lines are printed once. An error of
  posttrain's own code that is no failure of the machine keeps its traceback.
  """
  seen: set[str] = set()

  def show(error: BaseException | None, plain: Callable[[], object]) -> None:
    line = 'unknown'
    if error is not None and _is_bug(error):
      plain()
      return
    if error is not None:
      line = f'{foreign.error(error)} ({foreign.place(error)})'
    if line not in seen and 'Event loop is closed' not in line:
      logging.getLogger('absl').warning('in the background: %s', line)
    seen.add(line)

  def shorten(record: logging.LogRecord) -> bool:
    record.msg, record.args = foreign.text(record.getMessage()), ()
    record.exc_info = None
    return True

  before = sys.excepthook, sys.unraisablehook, threading.excepthook
  sys.excepthook = lambda kind, error, trace: show(
    error, lambda: before[0](kind, error, trace)
  )
  sys.unraisablehook = lambda arguments: show(
    arguments.exc_value, lambda: before[1](arguments)
  )
  threading.excepthook = lambda arguments: show(
    arguments.exc_value, lambda: before[2](arguments)
  )
  loops = logging.getLogger('asyncio')  # errors of tasks that were dropped
  loops.addFilter(shorten)
  try:
    yield
  finally:
    loops.removeFilter(shorten)
    sys.excepthook, sys.unraisablehook, threading.excepthook = before


def _is_bug(error: BaseException) -> bool:
  ours = error.__traceback__ is not None and errors.is_expected(error)
  return ours and errors.machine_failure(error) is None


class _ErrorsOnly(logging.Filter):
  def __init__(self, package: str):
    super().__init__()
    self.package = package

  def filter(self, record: logging.LogRecord) -> bool:
    folder = f'{os.sep}{self.package}{os.sep}'
    if folder not in record.pathname:
      return True
    record.msg, record.args = foreign.text(record.getMessage()), ()
    record.exc_info = None
    return record.levelno >= logging.ERROR
