"""The options of a stage's workers, and what they refuse."""

import importlib.util

import pytest

from posttrain import schema
from posttrain.envs import registry
from posttrain.rollout import remote
from posttrain.stage import preflight
from tests.rollout import remote_toys as toys

LENGTH = schema.RewardFn(fn='tests.rollout.hostile:length')


@pytest.fixture(autouse=True)
def installed(monkeypatch):
  """Lets the check of the installation pass."""
  monkeypatch.setattr(remote, 'check', lambda key: None)


def make(env=None, where='ray', **fields):
  """Returns the workers of a stage with one environment."""
  env = env or toys.options()['recall']
  entry = schema.EnvEntry(env=env, **fields)
  stage = schema.Stage(envs={'x': entry}, rollout=schema.Rollout(workers=where))
  return preflight.make_workers('s', stage, {'x': registry.make('x', env)})


def test_blocking_environments_and_reward_functions_have_workers():
  assert make(where='threads') is None
  assert make() is not None
  assert make(schema.Arithmetic(), rewards={'l': LENGTH}) is not None


def test_a_judge_of_an_environment_is_refused():
  with pytest.raises(ValueError, match=r'^config\.s\.envs\.x\.judge must be'):
    make(judge='init')


def test_an_installation_without_ray_is_one_line(monkeypatch):
  monkeypatch.undo()
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match="must be 'threads' in an installation"):
    make()
