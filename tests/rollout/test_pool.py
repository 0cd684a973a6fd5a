"""Blocking environments: called in threads, with results in a fixed order."""

import threading
import time

import numpy as np
import pytest

from posttrain import schema
from posttrain.decode import engines
from posttrain.rollout import episodes
from tests import fixtures
from tests.rollout import fakes

EOS = fixtures.RENDERER.tokenizer.eos_id
WAITS = 10  # seconds after which a test that hangs fails


class Slow(fakes.Recall):
  """Recall with random, unseeded delays."""

  def make(self, task):
    self.nap()
    episode = super().make(task)
    step = episode.step
    episode.step = lambda *args: self.nap() or step(*args)
    return episode

  def nap(self):
    time.sleep(np.random.default_rng().uniform(0, 0.004))


@pytest.fixture(scope='module')
def params():
  """The tiny model with a higher probability of eos."""
  params = fixtures.params()
  table = params['embed']['table']
  params['embed']['table'] = table.at[EOS].multiply(4)
  return params


def run(params, env, **options):
  """Runs twelve episodes of one to four turns; all slots may be held."""
  engine = engines.Engine(
    fixtures.MODEL, engines.Options(slots=3, capacity=48, chunk=4, seed=1)
  )
  engine.set_params(params, version=5)
  config = schema.Rollout(**options)
  rollouts = episodes.Driver(engine, fixtures.RENDERER, 48, config).run(
    [
      fakes.spec(uid, env(1 + uid % 4, blocking=env is Slow), 9, max_tokens=9)
      for uid in range(12)
    ]
  )
  engine.set_params(params, version=6)  # raises if a slot is taken
  return rollouts


@pytest.mark.parametrize('chunks', [1, 4])
def test_durations_of_calls_do_not_change_rollouts(params, chunks, monkeypatch):
  options = {'env_chunks': chunks}
  slow = run(params, Slow, **options)
  fakes.assert_same(run(params, Slow, env_threads=2, **options), slow)
  monkeypatch.setattr(Slow, 'nap', lambda self: None)
  fakes.assert_same(run(params, Slow, **options), slow)
  # Other requests share the slots, so that matrix products round differently.
  fakes.assert_same(run(params, fakes.Recall), slow, atol=1e-5)


@pytest.mark.parametrize('env', [fakes.Recall, Slow])
def test_overlap_does_not_change_rollouts(params, env, monkeypatch):
  monkeypatch.setattr(Slow, 'nap', lambda self: None)
  plain, overlapped = run(params, env), run(params, env, overlap=True)
  fakes.assert_same(overlapped, plain, atol=1e-5)
  fakes.assert_same(run(params, env, overlap=True), overlapped)


def test_blocking_episodes_are_called_concurrently():
  """Sequential calls would never return."""
  count = 16
  barrier = threading.Barrier(count)
  env = fakes.Recall(
    blocking=True,
    fails={'reset': lambda: (barrier.wait(WAITS), fakes.Recall.prompt)[1]},
  )
  engine = fakes.Engine(
    {uid: ['red', 'red'] for uid in range(count)}, pick=lambda uids: uids
  )
  rollouts = episodes.Driver(engine, fakes.RENDERER, 64).run(
    [fakes.spec(uid, env) for uid in range(count)]
  )
  assert {rollout.score.reward for rollout in rollouts} == {1.0}
