"""The fault matrix: its table, its registry, and all of it (slow)."""

import pytest

from experiments.trials import __main__ as faults
from experiments.trials import base


def test_each_trial_has_a_name_of_its_own_and_a_promise():
  trials = faults.find()
  assert len({t.name for t in trials}) == len(trials)
  assert all(t.promise for t in trials)
  with pytest.raises(ValueError, match='nothing'):
    faults.find('nothing')


@pytest.fixture(scope='module')
def shared(tmp_path_factory):
  return base.Shared(tmp_path_factory.mktemp('shared'))


@pytest.mark.slow
@pytest.mark.parametrize('trial', faults.find(), ids=lambda t: t.name)
def test_the_promise_holds(trial, tmp_path, shared):
  trial.run(base.Scratch(tmp_path / 'scratch', shared))
