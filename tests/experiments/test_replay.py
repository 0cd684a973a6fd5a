"""Replaying a run from its exports: the same batches, the same losses."""

import contextlib
import dataclasses

import pytest

from experiments.examples import replay
from posttrain import schema, train
from posttrain.metrics import writers
from posttrain.pipeline import tokens as token_pipeline
from posttrain.stage import build, job, preflight
from posttrain.util import preemption
from tests import fixtures

STEPS = 3


def _run(first):
  first = dataclasses.replace(
    first, steps=STEPS, optim=schema.Optim(lr=1e-2, schedule='constant')
  )
  return schema.Run(
    compilation_cache=None,
    model=schema.PRESETS['tiny'],
    metrics=schema.Metrics(progress=False, export_tokens=1),
    stages={'first': first},
  )


RUN = _run(fixtures.stage())


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """A run of the first stage, on batches with tokens of every component.

  Demonstrations stand in for samples: no engine decodes, nothing is evaluated.
  """
  workdir = tmp_path_factory.mktemp('replay')
  (workdir / 'rollouts').mkdir()
  advance = token_pipeline.TokenPipeline.__next__

  def sampled(self):
    item = advance(self)
    batch = fixtures.sampled(item.batch, seed=int(item.batch.ids.sum()))
    return dataclasses.replace(item, batch=batch)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(token_pipeline.TokenPipeline, '__next__', sampled)
    patch.setattr(job.Job, 'evaluate', lambda *args: {})
    stop = preemption.Signal()
    stage = preflight.make(preflight.resolve(RUN), 'first')
    first = build.make(stage, str(workdir), 0, stop)
    with contextlib.closing(first):
      train.train(first, stop)
  return workdir


def _flags(finished, workdir, **options):
  return replay.Flags(
    config='',
    exports=str(finished / 'token_exports'),
    workdir=str(workdir),
    **{'stage': 'first', **options},
  )


def _check_equal(finished, workdir):
  """Asserts that each metric of the replay equals the run's."""
  rows, truth = (
    writers.read(str(path / 'metrics.jsonl')) for path in (workdir, finished)
  )
  truth = [row for row in truth if row['step']]
  assert len({row['loss/total'] for row in rows} - {0}) == STEPS
  for row, true in zip(rows, truth, strict=True):
    names = {key for key in row if not key.startswith(('time/', 'memory/'))}
    assert {'loss/rl', 'loss/ref_kl', 'optim/grad_norm', 'entropy'} <= names
    assert {k: row[k] for k in names} == {k: true[k] for k in names}


def test_a_replay_equals_the_run_bitwise(finished, tmp_path):
  last = replay.replay(_flags(finished, tmp_path), RUN)
  _check_equal(finished, tmp_path)
  assert 'loss/ce' in last and last['step'] == STEPS
