"""GRPO as a run: the recipe, sampler against trainer, resume, learning."""

import collections
import json

import pytest

from experiments import kill_resume
from posttrain import job, main, metrics, preemption, schema, validation
from tests import toys

STEPS, SAVED = 80, 15  # SAVED: the first checkpoint's step


class Ragged(toys.Letters):
  """Fails now and then; long prompts leave room for 2 and 3 tokens of 4."""

  prompts = ('yes', 'no', 'yes' + 24 * '!', 'no' + 24 * '!')

  def grade(self, task, text):
    if text.startswith(tuple('abcdefgh')):  # a few times a step, at first
      raise RuntimeError('not this one')
    return super().grade(task, text)


def _run():
  entry = toys.entry(group_size=16, max_tokens=4, kl_beta=1e-3)
  stage = toys.stage(
      envs={'toy': entry}, steps=STEPS,
      rollout=schema.Rollout(slots=8, prefill_rows=4, max_errors=64),
      optim=schema.Optim(lr=1e-2, schedule='constant', weight_decay=0.0),
      eval=schema.Eval(every=20, prompts=4, samples=4, max_tokens=4),
  )  # fmt: skip
  run = schema.Run(
      model=schema.PRESETS['tiny'], compilation_cache=None,
      stages={'grpo': stage}, metrics=schema.Metrics(progress=False),
      checkpoint=schema.Checkpoint(every=SAVED),
  )  # fmt: skip
  validation.check(run)
  return run


def _launch(workdir):
  with pytest.MonkeyPatch.context() as patch:
    toys.install(patch, Ragged)
    main.launch(_run(), str(workdir), dry_run=False)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('grpo') / 'run'
  _launch(workdir)
  return workdir


@pytest.fixture(scope='module')
def rows(finished):
  return metrics.read(str(finished / 'metrics.jsonl'))


def test_what_was_sampled_is_what_is_trained(rows):
  trained = [row for row in rows[1:] if row['batch/rl_tokens']]
  assert len(trained) > 10 and trained[0]['step'] == 1
  for row in trained:
    assert row['mismatch/abs_mean'] <= 1e-5, row['step']
    assert row['mismatch/max'] <= 1e-4
    assert row['optim/empty'] == 0
  # The leash is on every token that was sampled, pruned or not.
  assert all(row['batch/ref_kl_tokens'] > 0 for row in rows[1:])
  assert rows[-1]['batch/ref_kl_tokens'] > rows[-1]['batch/rl_tokens']


def test_nothing_recompiles(rows):
  lengths = {row['rollout/length/toy'] for row in rows[1:]}
  assert len(lengths) > 3  # of tokens that were sampled, on average
  assert any(0 < row['rollout/truncated/toy'] < 1 for row in rows[1:])
  # The first checkpoint is copied and summed by programs of its own.
  for part in (rows[1 : SAVED + 1], rows[SAVED + 1 :]):
    assert len({row['time/programs'] for row in part}) == 1
  assert all(row['compiles'] == 1 for row in rows[1:])


def test_it_learns_what_is_asked(rows):
  """Four prompts, two to be answered in one way and two in the other."""
  rewards = [row['rollout/reward/toy'] for row in rows[1:]]
  assert rewards[0] < 0.7 and rows[0]['eval/sampled_pass_rate/toy'] < 0.7
  assert sum(rewards[-5:]) / 5 > 0.97
  assert rows[-1]['eval/reward/toy'] == 1.0 == rows[-1]['eval/pass_rate/toy']
  assert rows[-1]['eval/sampled_pass_rate/toy'] > 0.9


def test_resumed_in_the_middle_it_is_bitwise_the_same(finished, tmp_path):
  log, signal, stopper = job.Job.log, preemption.Signal, []

  def stop(self, step, *args):
    if step == 7:
      stopper[0].requested = True
    return log(self, step, *args)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(job.Job, 'log', stop)
    patch.setattr(
        preemption, 'Signal', lambda: stopper.append(signal()) or stopper[0]
    )
    with pytest.raises(preemption.Preempted, match='stage grpo, step 7'):
      _launch(tmp_path)
  _launch(tmp_path)
  truth = kill_resume.outcome(finished)
  assert len(truth['arrays']) > 20 and len(truth['rows']) == STEPS + 1
  assert not kill_resume.differences(truth, kill_resume.outcome(tmp_path))


def test_environment_errors_are_written_down(finished, rows):
  lines = (finished / 'rollouts' / 'grpo_errors.jsonl').read_text()
  errors = [json.loads(line) for line in lines.splitlines()]
  counts = collections.Counter(error['step'] for error in errors)
  for row in rows[1:]:
    assert counts[row['step']] == row['rollout/errors/toy']
  assert len(errors) > 10
  assert errors[0]['error'].endswith('RuntimeError: not this one')


def test_the_recipe(tmp_path, capsys):
  """Both stages of configs/arithmetic.py, as the command line runs them."""
  argv = ['--config=configs/arithmetic.py:tiny', f'--workdir={tmp_path}',
          '--config.compilation_cache=None']  # fmt: skip
  assert main.main(argv) == 0
  final = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert (final['stage'], final['step']) == ('grpo', 20)
  rows = metrics.read(str(tmp_path / 'metrics.jsonl'))
  assert [(row['stage'], row['step']) for row in rows] == [
      (stage, step) for stage in ('sft', 'grpo') for step in range(21)
  ]
  for stage in (rows[:21], rows[21:]):
    for step in (0, 10, 20):
      for name in ('pass_rate', 'format_rate', 'length', 'truncated',
                   'sampled_pass_rate', 'pass@2', 'entropy'):
        assert f'eval/{name}/arithmetic' in stage[step], name
      assert stage[step]['eval/errors/arithmetic'] == 0
    assert len({row['time/programs'] for row in stage[1:]}) == 1
  # The second stage starts with what the first one ended with.
  for name in ('pass_rate', 'length', 'entropy'):
    name = f'eval/{name}/arithmetic'
    assert rows[21][name] == pytest.approx(rows[20][name], rel=1e-5)
  for row in rows[22:]:
    assert row['rollout/errors/arithmetic'] == 0
    assert 0 <= row['rollout/reward/arithmetic'] <= 1
    assert row['time/rollout'] > 0
    if row['batch/rl_tokens']:
      assert row['mismatch/abs_mean'] <= 1e-5
  assert '<svg' in (tmp_path / 'report.html').read_text()
