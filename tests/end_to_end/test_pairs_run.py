"""Whole runs on pairs: DPO and a reward model, from their own answers."""

import json
import math
import os
import signal

import numpy as np
import pytest

from experiments.trials import kill_resume
from posttrain import evaluate
from posttrain.checkpoints import policies, store
from posttrain.data import preferences
from posttrain.metrics import writers
from posttrain.training import step as train_step
from tests import toys

RECIPES = {'dpo': 'arithmetic_dpo', 'rm': 'arithmetic_reward_model'}


def _run(recipe, workdir, *more):
  few = '--config.sft.eval.prompts=2'
  return toys.command(f'{RECIPES[recipe]}:tiny', workdir, few, *more)


@pytest.fixture(
  scope='module', params=['dpo', pytest.param('rm', marks=pytest.mark.slow)]
)
def finished(request, tmp_path_factory):
  """(stage, workdir) of an undisturbed run."""
  workdir = tmp_path_factory.mktemp(request.param)
  assert _run(request.param, workdir) == 0
  return request.param, workdir


def _rows(workdir, stage):
  rows = writers.read(str(workdir / 'metrics.jsonl'))
  return [row for row in rows if row['stage'] == stage]


def test_it_begins_where_both_answers_are_alike(finished):
  """Delta = 0: loss log 2, implicit reward 0; a fresh head tells nothing."""
  stage, workdir = finished
  rows = _rows(workdir, stage)
  start = {k: v for k, v in rows[0].items() if k.startswith('eval/pairs/')}
  loss = 'preference' if stage == 'dpo' else 'ranking'
  assert start[f'eval/pairs/loss/{loss}'] == pytest.approx(
    math.log(2), rel=1e-5
  )
  for name in ('chosen', 'rejected', 'margins'):
    assert start[f'eval/pairs/rewards/{name}'] == pytest.approx(0, abs=1e-5)
  last = rows[-1]
  assert last['compiles'] == 1 and last['optim/skipped'] == 0
  assert rows[1]['batch/pairs'] == 8 and rows[1]['batch/answers'] == 16
  assert 'rewards/accuracies' in rows[1]
  assert ('drift/chosen' in rows[1]) == (stage == 'dpo')
  # A reward model generates no text and has no pass rate.
  assert ('eval/pass_rate/arithmetic' in last) == (stage == 'dpo')


def test_pairs_and_reference_logprobs_are_written_to_files(finished):
  stage, workdir = finished
  made = preferences.read(workdir / 'pairs' / f'{stage}.jsonl')
  assert made and all(pair.chosen != pair.rejected for pair in made)
  cache = workdir / 'pairs' / f'{stage}_reference.npz'
  assert cache.exists() == (stage == 'dpo')
  if stage == 'dpo':
    with np.load(cache) as found:
      assert found['logprobs'].shape == (2 * len(made),)
      assert (found['logprobs'] < 0).all()


def test_a_reward_model_is_no_policy(finished, tmp_path, capsys):
  stage, workdir = finished
  folder = str(workdir / 'checkpoints' / stage)
  if stage == 'dpo':
    assert policies.load(folder).params
    return
  with pytest.raises(ValueError, match='hold a policy: got a reward model'):
    policies.load(folder)
  assert _run('dpo', tmp_path, f'--config.dpo.init={folder}') == 2
  assert 'config.dpo.init must name a model that fits' in (
    capsys.readouterr().err
  )


def test_evaluate_measures_the_pairs_of_the_run(finished, tmp_path, capsys):
  stage, workdir = finished
  last = _rows(workdir, stage)[-1]
  flags = [f'--answers={tmp_path / "a"}']
  checkpoint = f'--checkpoint={workdir}'
  against = f'--against={workdir / "checkpoints" / stage}'
  assert evaluate.main([checkpoint, against, *flags]) == 0
  values = json.loads(capsys.readouterr().out.splitlines()[-1])
  for name, key in (('accuracy', 'accuracies'), ('margin', 'margins')):
    expected = last[f'eval/pairs/rewards/{key}']
    assert values[f'eval/{name}/pairs'] == pytest.approx(expected, abs=1e-5)
    assert values[f'against/{name}/pairs'] == values[f'eval/{name}/pairs']
  lines = (tmp_path / 'a').read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  pairs = [row for row in rows if row['env'] == 'pairs']
  margins = [row['measures']['margin'] for row in pairs]
  assert np.mean(margins) == pytest.approx(values['eval/margin/pairs'])


class TermAfter(train_step.TrainStep):
  """Sends this process a SIGTERM within a step of the second stage."""

  def __call__(self, state, batch):
    TermAfter.calls -= 1
    if TermAfter.calls == 0:
      os.kill(os.getpid(), signal.SIGTERM)
    return super().__call__(state, batch)


@pytest.mark.slow
def test_a_preempted_run_resumes_bitwise(finished, tmp_path, monkeypatch):
  stage, workdir = finished
  with monkeypatch.context() as patch:
    patch.setattr(TermAfter, 'calls', 44, raising=False)
    patch.setattr(train_step, 'TrainStep', TermAfter)
    assert _run(stage, tmp_path) == 75
  assert store.find(str(tmp_path)).name == '4'
  assert _run(stage, tmp_path) == 0
  truth = kill_resume.outcome(workdir)
  assert not kill_resume.differences(truth, kill_resume.outcome(tmp_path))
