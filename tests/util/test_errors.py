"""Reports of expected errors."""

import pytest

from posttrain.util import errors, imports


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
