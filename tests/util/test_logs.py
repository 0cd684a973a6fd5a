"""Filters for the log records of other packages."""

import logging
import sys
import threading
import types
import warnings

import absl.logging
import pytest

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


@pytest.mark.parametrize('where', ['main', 'thread', 'callback'])
def test_errors_in_the_background_are_one_line_each(where, caplog, capsys):
  """A callback of C code has no frame of ours; Python asks unraisablehook."""

  def throw(error):
    try:
      raise error
    except Exception as caught:
      shown = {'exc_value': caught, 'exc_type': type(caught)}
      if where == 'main':
        sys.excepthook(type(caught), caught, caught.__traceback__)
      elif where == 'thread':
        threading.excepthook(types.SimpleNamespace(**shown))
      else:
        sys.unraisablehook(types.SimpleNamespace(**shown))

  hooks = sys.excepthook, sys.unraisablehook, threading.excepthook
  with logs.one_line_background():
    throw(OSError('disk full'))
    throw(OSError('disk full'))
    throw(RuntimeError('Event loop is closed'))
  (line,) = caplog.messages
  assert line.startswith('in the background: ') and 'disk full' in line
  assert capsys.readouterr().err.count('Traceback') == 0
  assert hooks == (sys.excepthook, sys.unraisablehook, threading.excepthook)


def test_records_and_warnings_of_a_process_have_one_form(capsys, monkeypatch):
  before = warnings.showwarning
  monkeypatch.setattr(logging.getLogger(), 'handlers', [])  # those of pytest
  with logs.one_form():
    logging.getLogger('absl').warning('slow: %s', 'disk')
    warnings.showwarning('odd', UserWarning, '/x/posttrain/train.py', 3)
    warnings.showwarning('old', DeprecationWarning, '/x/other.py', 4)
  assert capsys.readouterr().err.splitlines() == [
    'warning: slow: disk',
    'warning: odd',
    'warning: old (other.py:4)',
  ]
  assert warnings.showwarning is before


def test_the_form_is_kept_after_absl_has_logged(capsys, monkeypatch):
  """absl calls `basicConfig` if the root logger has no handler; orbax logs."""
  root = logging.getLogger()
  before = logging.basicConfig
  monkeypatch.setattr(root, 'handlers', [])
  monkeypatch.setattr(logging.getLogger('absl'), 'propagate', True)
  with logs.one_form():
    absl.logging.vlog(1, 'imported')
    logging.debug('a module-level function')
    logging.getLogger('absl').warning('slow: %s', 'disk')
    absl.logging.warning('slower')
    logging.warning('slowest')
    assert root.handlers == []
  assert capsys.readouterr().err.splitlines() == [
    'warning: slow: disk',
    'warning: slower',
    'warning: slowest',
  ]
  assert logging.basicConfig is before


def test_a_level_and_a_form_of_a_user_are_kept_after_absl_has_logged(
  capsys, monkeypatch
):
  root = logging.getLogger()
  monkeypatch.setattr(root, 'handlers', [])
  monkeypatch.setattr(root, 'level', root.level)
  with logs.one_form():
    absl.logging.vlog(1, 'imported')
    logging.basicConfig(level=logging.INFO, format='MINE %(message)s')
    absl.logging.vlog(1, 'again')
    logging.getLogger('mine').info('a reward')
    logging.getLogger('absl').warning('slow')
  assert capsys.readouterr().err.splitlines() == ['MINE a reward', 'MINE slow']


def test_logging_that_a_user_sets_up_is_kept(tmp_path, monkeypatch):
  monkeypatch.setattr(logging.getLogger(), 'handlers', [])
  path = tmp_path / 'log'
  with logs.one_form():
    logging.basicConfig(filename=path)
    logging.getLogger('mine').warning('a reward')
  for handler in logging.getLogger().handlers:
    handler.close()
  assert 'a reward' in path.read_text()
