"""Runs that sample ahead: in turns, in a thread, delayed, and resumed."""

import dataclasses
import random
import time

import pytest

from experiments.trials import kill_resume
from posttrain import main, schema, types
from posttrain.checkpoints import store
from posttrain.config import checks
from posttrain.pipeline import ahead
from posttrain.training import step
from posttrain.util import preemption
from tests import toys

pytestmark = pytest.mark.slow

STEPS = 12


def _run(
  workdir, steps=STEPS, reference='init', more=(), samplers=None, **rollout
):
  entry = toys.entry(
    group_size=8, max_tokens=4, kl_beta=1e-3, reference=reference
  )
  stage = toys.stage(
    envs={'toy': entry, **dict(more)},
    steps=steps,
    rollout=schema.Rollout(prefill_rows=4, **{'slots': 8, **rollout}),
    optim=schema.Optim(lr=1e-2, schedule='constant', weight_decay=0.0),
    eval=schema.Eval(every=5, prompts=4, samples=2, max_tokens=4),
  )
  run = toys.run({'grpo': stage}, checkpoint=schema.Checkpoint(every=4))
  checks.check(run)
  with pytest.MonkeyPatch.context() as patch:
    toys.install(patch)
    main.train(run, str(workdir), samplers=samplers)
  return kill_resume.outcome(workdir)


def _delay(monkeypatch, name, seconds, of=ahead.Ahead):
  """Makes a method, of the pipeline, wait a random time first."""
  method = getattr(of, name)

  def late(*args, **kwargs):
    time.sleep(random.random() * seconds)
    return method(*args, **kwargs)

  monkeypatch.setattr(of, name, late)


@pytest.mark.parametrize('max_lag, reference', [(1, 'ema:0.9'), (4, 'init')])
def test_a_thread_changes_no_bit(max_lag, reference, tmp_path, monkeypatch):
  options = {'max_lag': max_lag, 'reference': reference}
  truth = _run(tmp_path / 'turns', in_turns=True, **options)
  assert any('grpo/past/0' in x for x in truth['arrays'])
  row = truth['rows'][-1]
  assert row['staleness/max/toy'] == row['staleness/mean/toy'] == max_lag
  assert row['mismatch/rounding/max'] < 1e-4 < row['mismatch/max']
  _delay(monkeypatch, '_make', 0.05)
  _delay(monkeypatch, 'publish', 0.05)
  other = _run(tmp_path / 'thread', **options)
  assert not kill_resume.differences(truth, other)


@pytest.mark.parametrize('max_lag', [1, 4])
def test_a_late_sampler_changes_no_bit(max_lag, tmp_path, monkeypatch):
  """Waits in both: weights, decoding; batches, hand-over, updates, saves."""
  pytest.importorskip('starlette')
  pytest.importorskip('uvicorn')
  from posttrain.serve import sampler
  from tests.serve import samplers

  truth = _run(tmp_path / 'one', max_lag=max_lag, in_turns=True)
  for name in ('_run', '_update', '_finish_update'):
    _delay(monkeypatch, name, 0.02, sampler.Sampler)
  for name in ('_make', 'publish'):
    _delay(monkeypatch, name, 0.05)
  _delay(monkeypatch, '__call__', 0.05, step.TrainStep)
  _delay(monkeypatch, 'save', 0.3, store.Checkpointer)
  with samplers.running() as (url, _):
    other = _run(
      tmp_path / 'two', max_lag=max_lag, samplers=types.Samplers((url,))
    )
  assert not kill_resume.differences(truth, other)


@pytest.mark.parametrize('keep_cache', [False, True])
def test_a_thread_changes_no_bit_of_episodes_in_flight(
  keep_cache, tmp_path, monkeypatch
):
  options = {
    'max_lag': 1,
    'more': {'long': toys.entry(group_size=8, max_tokens=9)},
    'slots': 16,
    'in_flight': True,
    'hold_tokens': 1,
    'keep_cache': keep_cache,
    'rounding_share': 1.0,
  }
  truth = _run(tmp_path / 'turns', in_turns=True, **options)
  rows = [row for row in truth['rows'] if 'rollout/held/long' in row]
  assert any(row['rollout/held/long'] for row in rows)
  assert 1 < max(row.get('staleness/max/long', 0) for row in rows) <= 3
  rounding = max(row['mismatch/rounding/max'] for row in rows)
  assert (rounding > 1e-3) == keep_cache
  _delay(monkeypatch, '_make', 0.05)
  _delay(monkeypatch, 'publish', 0.05)
  other = _run(tmp_path / 'thread', **options)
  assert not kill_resume.differences(truth, other)


def test_a_resumed_run_samples_with_past_versions(tmp_path):
  """And draws the same tasks and groups by their past pass rates."""
  again = dataclasses.replace(
    toys.entry(group_size=4, max_tokens=4),
    curriculum=schema.Curriculum(rare=0.2),
    replay=schema.Replay(share=0.5),
  )
  options = {'max_lag': 3, 'more': {'again': again}}
  truth = _run(tmp_path / 'whole', **options)
  assert sum(x.get('replay/groups/again', 0) for x in truth['rows']) > 2
  for stop in (2, 7):
    with pytest.MonkeyPatch.context() as patch:
      toys.stop_at(patch, stop)
      with pytest.raises(preemption.Preempted, match=f'step {stop}'):
        _run(tmp_path / 'parts', **options)
  other = _run(tmp_path / 'parts', **options)
  assert not kill_resume.differences(truth, other)


def test_another_lag_is_another_run(tmp_path):
  _run(tmp_path, steps=4, max_lag=1)
  with pytest.raises(ValueError, match=r'config\.grpo\.rollout\.max_lag'):
    _run(tmp_path, steps=8, max_lag=2)
