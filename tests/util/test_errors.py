"""Reports of expected errors."""

import errno
import logging
import sys
import warnings

import pytest

from posttrain.util import errors, imports


@pytest.fixture(autouse=True)
def restored(monkeypatch):
  """Undoes what a failure's report silences."""
  monkeypatch.setattr(sys, 'unraisablehook', sys.unraisablehook)
  monkeypatch.setattr(logging.getLogger('asyncio'), 'disabled', False)
  with warnings.catch_warnings():
    yield


def caught(function, *args):
  with pytest.raises(Exception) as info:
    function(*args)
  return info.value


@pytest.mark.parametrize(
  ('error', 'code'),
  [(ValueError('x must be y'), 2), (RuntimeError('the run failed'), 1)],
)
def test_an_expected_error_is_one_line_and_an_exit_code(error, code, capsys):
  def fail():
    raise error

  assert errors.report(caught(fail), __name__) == code
  assert capsys.readouterr().err == f'error: {error}\n'


def test_an_error_of_another_module_is_raised_again(capsys):
  with pytest.raises(ValueError, match='invalid literal'):
    errors.report(caught(int, 'x'))
  assert not capsys.readouterr().err


def test_errors_are_expected_by_the_module_that_raises_them():
  assert errors.is_expected(caught(imports.load, '', 'config.x'))
  assert not errors.is_expected(caught(int, 'x'))
  assert errors.is_expected(caught(int, 'x'), __name__)


def raised_by(module, error):
  """Returns an error that a function of another module has raised."""
  scope = {'__name__': module, 'error': error}
  exec('def fail():\n  raise error', scope)
  return caught(scope['fail'])


@pytest.mark.parametrize(
  ('error', 'words'),
  [
    (OSError(errno.ENOSPC, 'No space left', 'x'), "left: 'x' ("),
    (PermissionError(errno.EACCES, 'Permission denied'), 'change the permiss'),
    (MemoryError(), 'must have enough memory: MemoryError ('),
    (RuntimeError("can't start new thread"), 'allowed to start threads'),
    (RuntimeError('Unable to initialize backend cuda'), 'install jax for it'),
    (ValueError('OUT_OF_RANGE: Too many open files'), 'ulimit -n'),
    (ExceptionGroup('x', [OSError(errno.EIO, 'bad')]), 'bad; check the disk'),
  ],
)
def test_failures_of_the_machine_are_one_line_with_the_remedy(
  error, words, capsys
):
  assert errors.report(raised_by('orbax.x', error)) == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: ') and words in line


def test_a_wrapped_failure_of_the_machine_is_its_cause():
  def fail():
    raise KeyError('state') from OSError(errno.ENOSPC, 'No space left', '/x')

  assert errors.machine_failure(caught(fail)) == (
    "No space left: '/x'; free some space, or lower config.checkpoint.keep_last"
  )


def test_bugs_after_failures_or_with_their_words_are_bugs():
  def handle():
    try:
      raise FileNotFoundError(errno.ENOENT, 'No such file', 'x')
    except FileNotFoundError:
      return {}['bug']

  assert errors.machine_failure(caught(handle)) is None
  bug = raised_by('mine', TypeError('Input/output error, no devices found'))
  assert errors.machine_failure(bug) is None


def test_messages_are_short_and_printable(capsys):
  def fail():
    raise ValueError('x must be y: got \x1b[31m\n' + 'z' * 10**6)

  errors.report(caught(fail), __name__)
  text = capsys.readouterr().err
  assert len(text) < 5000 and text.count('\n') == 1 and '\x1b' not in text
