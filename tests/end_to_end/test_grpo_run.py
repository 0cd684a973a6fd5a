"""GRPO as a run: the recipe, sampler against trainer, resume, learning."""

import dataclasses
import json
import shutil

import pytest

from experiments.trials import kill_resume
from posttrain import main, schema
from posttrain.checkpoints import store
from posttrain.config import checks
from posttrain.metrics import statistics, writers
from posttrain.stage import preflight
from posttrain.util import preemption
from tests import toys

STEPS, SAVED = 80, 15  # SAVED: the first checkpoint's step


class Ragged(toys.Letters):
  """Fails now and then; long prompts leave room for 2 and 3 tokens of 4."""

  prompts = ('yes', 'no', 'yes' + 24 * '!', 'no' + 24 * '!')

  def grade(self, task, text):
    if text.startswith(tuple('abcdefgh')):  # a few times a step, at first
      raise RuntimeError('not this one')
    return super().grade(task, text)


def _run(
  steps=STEPS,
  every=SAVED,
  slots=8,
  limit=1.0,
  kl_beta=1e-3,
  reference='init',
  **options,
):
  entry = toys.entry(
    group_size=16, max_tokens=4, kl_beta=kl_beta, reference=reference
  )
  stage = toys.stage(
    envs={'toy': entry},
    steps=steps,
    rollout=schema.Rollout(slots=slots, prefill_rows=4, max_error_share=limit),
    optim=schema.Optim(lr=1e-2, schedule='constant', weight_decay=0.0),
    eval=schema.Eval(every=20, prompts=4, samples=4, max_tokens=4),
  )
  saves = schema.Checkpoint(every=every)
  run = toys.run({'grpo': stage}, checkpoint=saves, **options)
  checks.check(run)
  return run


def _launch(workdir, run=None, env=Ragged):
  with pytest.MonkeyPatch.context() as patch:
    toys.install(patch, env)
    main.train(run or _run(), str(workdir))


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('grpo') / 'run'
  _launch(workdir)
  return workdir


@pytest.fixture(scope='module')
def rows(finished):
  return writers.read(str(finished / 'metrics.jsonl'))


def test_sampler_and_policy_logprobs_agree(rows):
  for row in rows[1:]:
    assert row['mismatch/abs_mean'] <= 1e-5, row['step']
    assert row['mismatch/max'] <= 1e-4
    assert row['optim/empty'] == 0
    # The leash is on every token that was sampled, pruned or not.
    assert row['batch/ref_kl_tokens'] > 0
  trained = [row for row in rows[1:] if row['batch/rl_tokens']]
  assert len(trained) > 10 and trained[0]['step'] == 1
  assert rows[-1]['batch/ref_kl_tokens'] > rows[-1]['batch/rl_tokens']


def test_nothing_recompiles(rows):
  lengths = {row['rollout/length/toy'] for row in rows[1:]}
  assert len(lengths) > 3  # of tokens that were sampled, on average
  assert any(0 < row['rollout/truncated/toy'] < 1 for row in rows[1:])
  assert len({row['time/programs'] for row in rows[1:]}) == 1
  assert all(row['compiles'] == 1 for row in rows[1:])


def test_scoring_is_timed(rows):
  for row in rows[1:]:
    assert 0 < row['time/scoring'] <= row['time/rollout']


def test_rewards_and_pass_rates_rise_to_1(rows):
  """Four prompts, two to be answered in one way and two in the other."""
  rewards = [row['rollout/reward/toy'] for row in rows[1:]]
  assert rewards[0] < 0.7 and rows[0]['eval/sampled_pass_rate/toy'] < 0.7
  assert sum(rewards[-20:]) / 20 > 0.99  # of 1280 rollouts
  for name in ('reward', 'pass_rate', 'sampled_pass_rate'):
    assert rows[-1][f'eval/{name}/toy'] == 1.0, name


def _interrupt(workdir, run, step):
  """Launches a run that is stopped after a step, and once more to its end."""
  with pytest.MonkeyPatch.context() as patch:
    toys.stop_at(patch, step)
    message = f'stage grpo, step {step}'
    with pytest.raises(preemption.Preempted, match=message):
      _launch(workdir, run)
  _launch(workdir, run)


@pytest.mark.slow
def test_prompts_that_are_stored_once_change_no_answer(tmp_path):
  """Of evaluations, and of two steps; numbers differ by rounding."""
  run = _run(steps=2)
  _launch(tmp_path / 'own', run)
  stage = run.stages['grpo']
  rollout = dataclasses.replace(
    stage.rollout, shared_prompts=True, prefill_tokens=4
  )
  stage = dataclasses.replace(stage, rollout=rollout)
  run = dataclasses.replace(run, stages={'grpo': stage})
  _launch(tmp_path / 'shared', run)
  with pytest.MonkeyPatch.context() as patch:
    toys.install(patch, Ragged)
    parts = preflight.make(preflight.resolve(run), 'grpo')
  # A slot has 16 of 48 tokens, and the long prompts more than 12.
  assert parts.plan.load.prompt_tokens == 32
  truth, others = (
    writers.read(str(tmp_path / name / 'metrics.jsonl'))
    for name in ('own', 'shared')
  )
  for row, other in zip(truth, others, strict=True):
    keys = [x for x in row if x.startswith(('eval/', 'rollout/', 'loss/'))]
    assert len(keys) > 5
    for key in keys:
      assert other[key] == pytest.approx(row[key], rel=1e-4, abs=1e-5), key


@pytest.mark.gate
@pytest.mark.slow
def test_resumed_in_the_middle_it_is_bitwise_the_same(finished, tmp_path):
  _interrupt(tmp_path, _run(), 7)
  truth = kill_resume.outcome(finished)
  assert len(truth['arrays']) > 20 and len(truth['rows']) == STEPS + 1
  assert not kill_resume.differences(truth, kill_resume.outcome(tmp_path))


@pytest.mark.gate
@pytest.mark.slow
def test_bfloat16_resumes_bitwise_and_its_mismatch_is_bounded(tmp_path):
  model = dataclasses.replace(schema.PRESETS['tiny'], dtype='bfloat16')
  run = _run(steps=12, model=model)
  _launch(tmp_path / 'undisturbed', run)
  _interrupt(tmp_path / 'stopped', run, 7)
  truth, other = (
    kill_resume.outcome(tmp_path / name) for name in ('undisturbed', 'stopped')
  )
  assert len(truth['rows']) == 13
  assert not kill_resume.differences(truth, other)
  for row in truth['rows'][1:]:
    assert row['mismatch/abs_mean'] <= 1e-3, row['step']
    assert row['mismatch/max'] <= 0.05, row['step']
  assert truth['rows'][1]['batch/rl_tokens'] > 0


def _errors(workdir):
  """Step -> the lines about it."""
  return {
    int(path.stem.removeprefix('grpo_errors_')): [
      json.loads(line)['error'] for line in path.read_text().splitlines()
    ]
    for path in (workdir / 'rollouts').glob('grpo_errors_*.jsonl')
  }


def test_environment_errors_are_written_down(finished, rows):
  errors = _errors(finished)
  for row in rows[1:]:
    assert len(errors.get(row['step'], ())) == row['rollout/errors/toy']
  assert len(errors) > 5
  assert ': RuntimeError: not this one (step, ' in errors[1][0]


def test_those_that_stop_the_run_are_written_down(finished, tmp_path):
  """And written anew, when the step is done again: there is no double."""

  class Unevaluated(Ragged):
    def source(self, split, seed):
      self.prompts = Ragged.prompts if split == 'train' else ()
      return super().source(split, seed)

  run = _run(steps=1, limit=0.0)
  for _ in range(2):
    with pytest.raises(statistics.TooManyErrors):
      _launch(tmp_path, run, Unevaluated)
    assert _errors(tmp_path) == {1: _errors(finished)[1]}
  # The environment is mended: nothing is left of them.
  _launch(tmp_path, run, toys.Letters)
  assert not _errors(tmp_path)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_reference_despite_newer_steps(
  finished, tmp_path
):
  """Another run trains on, between the kill and the resume."""
  other = tmp_path / 'other'
  step = 'checkpoints/grpo/75'
  shutil.copytree(finished / step, other / step)
  run = _run(steps=4, every=2, kl_beta=0.1, reference=str(other))
  _launch(tmp_path / 'whole', run)
  with pytest.MonkeyPatch.context() as patch:
    toys.stop_at(patch, 2)
    with pytest.raises(preemption.Preempted, match='stage grpo, step 2'):
      _launch(tmp_path / 'cut', run)
  shutil.copytree(
    finished / 'checkpoints/grpo/80', other / 'checkpoints/grpo/80'
  )
  host = store.read_host(str(tmp_path / 'cut'))
  assert host['references'] == {str(other): str((other / step).resolve())}
  _launch(tmp_path / 'cut', run)
  truth = kill_resume.outcome(tmp_path / 'whole')
  assert not kill_resume.differences(
    truth, kill_resume.outcome(tmp_path / 'cut')
  )
  # The newer step would have told: it is another model.
  _launch(tmp_path / 'anew', run)
  anew = kill_resume.outcome(tmp_path / 'anew')
  assert 'metrics' in kill_resume.differences(truth, anew)


@pytest.mark.parametrize('key', ['algorithm.reference', 'rewards.x.model'])
def test_preflight_refuses_models_that_are_not_there(monkeypatch, key):
  toys.install(monkeypatch)
  entry = toys.entry(kl_beta=0.1, reference='/no/such')
  if key != 'algorithm.reference':
    rewards = {'x': schema.RewardFn(model='/no/such')}
    entry = dataclasses.replace(toys.entry(), rewards=rewards)
  run = toys.run({'grpo': toys.stage(envs={'toy': entry})})
  with pytest.raises(ValueError, match=f"^config.grpo.*{key} .*'/no/such'"):
    preflight.check(preflight.resolve(run))


@pytest.mark.slow
def test_the_recipe(tmp_path, capsys):
  """Both stages of configs/arithmetic.py, as the command line runs them."""
  assert toys.command('arithmetic:tiny', tmp_path) == 0
  final = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert (final['stage'], final['step']) == ('grpo', 20)
  rows = writers.read(str(tmp_path / 'metrics.jsonl'))
  assert [(row['stage'], row['step']) for row in rows] == [
    (stage, step) for stage in ('sft', 'grpo') for step in range(21)
  ]
  # The second stage starts with what the first one ended with.
  name = 'eval/entropy/arithmetic'
  assert rows[21][name] == pytest.approx(rows[20][name], rel=1e-5)
  for row in rows[22:]:
    assert row['optim/empty'] == 0 < row['batch/rl_tokens']
    assert row['mismatch/abs_mean'] <= 1e-5
