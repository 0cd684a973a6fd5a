"""Filters for the log records of other packages."""

import logging
import os


def quiet(package: str) -> None:
  """Drops the records below ERROR that `package` logs through absl."""
  logger = logging.getLogger('absl')
  if not any(getattr(f, 'package', None) == package for f in logger.filters):
    logger.addFilter(_ErrorsOnly(package))


class _ErrorsOnly(logging.Filter):
  def __init__(self, package: str):
    super().__init__()
    self.package = package

  def filter(self, record: logging.LogRecord) -> bool:
    folder = f'{os.sep}{self.package}{os.sep}'
    return record.levelno >= logging.ERROR or folder not in record.pathname
