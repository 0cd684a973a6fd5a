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
  trial.run(base.Scratch(tmp_path / 'scratch', shared))
