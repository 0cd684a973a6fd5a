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
  experts=schema.Experts(count=8, per_token=2, mlp_dim=32),
  dense_layers=(1,),
  dtype='bfloat16',
)


def _run(workdir, routes, steps=6, **rollout):
  stage = toys.stage(
    envs={
      'toy': toys.entry(group_size=8, max_tokens=4),
      'again': dataclasses.replace(
        toys.entry(group_size=8, max_tokens=9), replay=schema.Replay(share=0.5)
      ),
    },
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


def _mean(outcome, name):
  return np.mean([row[name] for row in outcome['rows'] if name in row])


@pytest.mark.xfail(reason='the bits of a recorded run differ: cause not found')
def test_replay_is_nearer_to_the_sampler(tmp_path):
  own, record, replay = (
    _run(tmp_path / routes, routes) for routes in schema.ROUTES
  )
  assert not any('router/flipped' in row for row in own['rows'])
  # To record changes nothing but metrics.
  for name, x in own['arrays'].items():
    np.testing.assert_array_equal(record['arrays'][name], x)
  assert 0 < _mean(record, 'router/flipped') < 0.2
  distance = [_mean(x, 'mismatch/abs_mean') for x in (record, replay)]
  assert distance[1] < distance[0]


def test_a_resumed_run_replays_what_waits(tmp_path):
  """Batches of an earlier version, and stored groups."""
  truth = _run(tmp_path / 'whole', 'replay', max_lag=1)
  assert sum(x.get('replay/groups/again', 0) for x in truth['rows']) > 1
  # The trained version would choose others than the one that sampled.
  assert _mean(truth, 'router/flipped') > 0
  with pytest.MonkeyPatch.context() as patch:
    toys.stop_at(patch, 3)
    with pytest.raises(preemption.Preempted, match='step 3'):
      _run(tmp_path / 'parts', 'replay', max_lag=1)
  other = _run(tmp_path / 'parts', 'replay', max_lag=1)
  assert not kill_resume.differences(truth, other)
