"""Reports of expected errors, and values shortened for messages."""

import jax.numpy as jnp
import pytest

from posttrain.util import errors, imports


def caught(function, *args):
  with pytest.raises(BaseException) as info:
    function(*args)
  return info.value


def fail(error):
  raise error


class Coded(RuntimeError):
  exit_code = errors.NO_REWARD


@pytest.mark.parametrize(
  ('error', 'code'),
  [
    (ValueError('x must be y'), errors.USAGE),
    (RuntimeError('the run failed'), errors.FAILED),
    (Coded('no reward'), errors.NO_REWARD),
    (MemoryError(), errors.FAILED),
  ],
)
def test_an_expected_error_is_one_line_and_an_exit_code(error, code, capsys):
  assert errors.report(caught(fail, error), __name__) == code
  (line,) = capsys.readouterr().err.splitlines()
  assert line == f'error: {error}'.rstrip() or line == 'error: MemoryError'


def test_a_missing_device_names_the_variable(capsys):
  raise_it = compile('raise AssertionError', 'jax/xla_bridge.py', 'exec')
  try:
    exec(raise_it)
  except AssertionError as error:
    assert errors.report(error) == errors.FAILED
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: JAX_PLATFORMS must name devices')


def test_a_bug_is_raised_again():
  with pytest.raises(KeyError):
    errors.report(KeyError('x'), __name__)


def test_a_value_error_of_another_module_is_a_bug():
  with pytest.raises(ValueError, match='invalid literal'):
    errors.report(caught(int, 'x'))
  assert errors.is_expected(caught(imports.load, '', 'config.x'))
  assert not errors.is_expected(caught(int, 'x'))
  # Errors of C, and of jax, which removes its frames, end in our own code.
  assert not errors.is_expected(caught(int, 'x'), __name__)
  wrong = caught(lambda: jnp.zeros(2) + jnp.zeros(3))
  assert not errors.is_expected(wrong, __name__)
  assert errors.is_expected(caught(fail, ValueError('x')), __name__)


class Bad:
  def __repr__(self):
    raise KeyError('x')


@pytest.mark.parametrize(
  ('value', 'shown'),
  [
    ('x' * 1000, "'" + 'x' * 199 + '... (802 more characters)'),
    (Bad(), '<Bad, whose repr raises KeyError>'),
  ],
)
def test_quoted_values_are_short_lines(value, shown):
  assert errors.quote(value) == shown


def test_the_place_of_an_error_is_in_the_users_code():
  error = caught(lambda: int('x'))
  assert errors.place(error).startswith('test_errors.py:')
  assert errors.place(ValueError()) == ''
