"""GRPO of a model with experts whose routes are recorded, or replayed."""

import dataclasses

import numpy as np
import pytest

from experiments.trials import kill_resume
from posttrain import main, schema
from posttrain.config import checks
from posttrain.util import preemption
from tests import toys

pytestmark = pytest.mark.slow

MODEL = dataclasses.replace(
  schema.PRESETS['tiny'],
  layers=3,
  experts=schema.Experts(count=32, per_token=4, mlp_dim=32),
  dense_layers=(1,),
  dtype='bfloat16',
)


AGAIN = dataclasses.replace(
  toys.entry(group_size=8, max_tokens=9), replay=schema.Replay(share=0.5)
)


def _run(workdir, routes, steps, envs, **rollout):
  stage = toys.stage(
    envs={'toy': toys.entry(group_size=8, max_tokens=9), **envs},
    steps=steps,
    rollout=schema.Rollout(slots=16, prefill_rows=4, **rollout),
    optim=schema.Optim(lr=1e-2, schedule='constant', weight_decay=0.0),
    eval=schema.Eval(every=None),
  )
  model = dataclasses.replace(MODEL, routes=routes)
  run = toys.run(
    {'grpo': stage}, model=model, checkpoint=schema.Checkpoint(every=2)
  )
  checks.check(run)
  with pytest.MonkeyPatch.context() as patch:
    toys.install(patch)
    main.train(run, str(workdir))
  return kill_resume.outcome(workdir)


def _values(outcome, name):
  return [row[name] for row in outcome['rows'] if name in row]


def test_replay_is_nearer_to_the_sampler(tmp_path):
  own, record, replay = (
    _run(tmp_path / routes, routes, 2, {}) for routes in schema.ROUTES
  )
  assert not _values(own, 'router/flipped')
  # To record changes nothing but metrics. (With stored groups trees share less:
  # the experts of a prompt are then those of two versions.)
  for name, x in own['arrays'].items():
    np.testing.assert_array_equal(record['arrays'][name], x)
  # The first step has the same weights and tokens in all runs.
  flipped = _values(record, 'router/flipped')[0]
  assert 0 < flipped < 0.2
  assert _values(replay, 'router/flipped')[0] == flipped
  recorded, replayed = (
    _values(x, 'mismatch/abs_mean')[0] for x in (record, replay)
  )
  assert replayed < recorded


def test_a_resumed_run_replays_what_waits(tmp_path):
  """Batches of an earlier version, and stored groups."""
  options = {'steps': 6, 'envs': {'again': AGAIN}, 'max_lag': 1}
  truth = _run(tmp_path / 'whole', 'replay', **options)
  assert sum(_values(truth, 'replay/groups/again')) > 1
  # The trained version would choose others than the one that sampled.
  assert sum(_values(truth, 'router/flipped')) > 0
  with pytest.MonkeyPatch.context() as patch:
    toys.stop_at(patch, 3)
    with pytest.raises(preemption.Preempted, match='step 3'):
      _run(tmp_path / 'parts', 'replay', **options)
  other = _run(tmp_path / 'parts', 'replay', **options)
  assert not kill_resume.differences(truth, other)
