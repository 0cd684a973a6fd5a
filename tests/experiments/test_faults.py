"""The fault matrix: its table, its registry, and all of it (slow)."""

import pytest

from experiments.trials import __main__ as faults
from experiments.trials import base


@pytest.fixture(scope='module')
def shared(tmp_path_factory):
  return base.Shared(tmp_path_factory.mktemp('shared'))


@pytest.mark.slow
@pytest.mark.parametrize('trial', faults.find(), ids=lambda t: t.name)
def test_the_promise_holds(trial, tmp_path, shared):
  try:
    trial.run(base.Scratch(tmp_path / 'scratch', shared))
  except base.NotTried as error:
    pytest.skip(f'{error}')


@pytest.mark.parametrize(
  ('error', 'result'),
  [
    (base.NotTried('no Ray'), 'not tried'),
    (AssertionError('lost'), 'FELL SHORT'),
    (RuntimeError('of the trial'), 'FELL SHORT'),
    (None, 'good'),
  ],
)
def test_only_a_kept_promise_is_good(error, result, tmp_path, shared):
  def run(_):
    if error:
      raise error
    return 'seen'

  assert faults.run(base.Trial('x', 'y', run), tmp_path, shared)[-1] == result
