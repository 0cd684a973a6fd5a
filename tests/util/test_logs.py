"""Filters for the log records of other packages."""

import logging

from posttrain.util import logs


def test_quiet_drops_logs_of_a_package_below_errors():
  logs.quiet('chatty')
  logs.quiet('chatty')
  (mine,) = [
    f
    for f in logging.getLogger('absl').filters
    if getattr(f, 'package', None) == 'chatty'
  ]

  def passes(path, level):
    return mine.filter(logging.LogRecord('absl', level, path, 1, '', (), None))

  assert not passes('/lib/chatty/a.py', logging.WARNING)
  assert passes('/lib/chatty/a.py', logging.ERROR)
  assert passes('/lib/other/a.py', logging.INFO)
