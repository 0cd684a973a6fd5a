"""A stage that hands on its best weights, as a run: saved, resumed, read."""

import dataclasses
import json
import math
import os
import shutil

import jax
import numpy as np
import pytest

from experiments.trials import kill_resume
from posttrain import config, main, schema
from posttrain.checkpoints import store, weights
from posttrain.config import checks
from posttrain.metrics import writers
from posttrain.models import transformer
from posttrain.stage import from_checkpoint, job, resume
from posttrain.util import preemption
from tests import toys

BEST = 'eval/sampled_pass_rate/toy'
# At this step size the policy soon forgets what it has learned.
OPTIM = schema.Optim(
  lr=3e-2, schedule='constant', weight_decay=0.0, average=0.5
)


class Falling(toys.Letters):
  """Held-out tasks for selection, after the reported ones."""

  prompts = ('yes', 'no', 'yes, and more of it', 'no, and none of it')


def run_of(steps=30, patience=3, **options):
  cfg = schema.Eval(every=3, prompts=1, samples=8, max_tokens=4)
  options = {'best': BEST, 'best_prompts': 3, 'patience': patience, **options}
  stage = toys.stage(
    envs={'toy': toys.entry(group_size=8, max_tokens=4)},
    steps=steps,
    optim=OPTIM,
    eval=dataclasses.replace(cfg, **options),
  )
  after = dataclasses.replace(
    stage, init='stage:grpo', steps=1, eval=schema.Eval(1, 1, 1)
  )
  saves = schema.Checkpoint(every=4, keep_last=1)
  run = toys.run({'grpo': stage, 'after': after}, checkpoint=saves)
  checks.check(run)
  return run


def launch(workdir, run=None):
  with pytest.MonkeyPatch.context() as patch:
    toys.install(patch, Falling)
    return main.train(run or run_of(), str(workdir))


def alone(**options):
  """The stage that selects, without the one after it."""
  run = run_of(**options)
  return dataclasses.replace(run, stages={'grpo': run.stages['grpo']})


@pytest.fixture(scope='module')
def lines(tmp_path_factory):
  """Results of the run of one stage; again, when it is over."""
  workdir = tmp_path_factory.mktemp('selection') / 'run'
  return workdir, [launch(workdir, alone()) for _ in range(2)]


@pytest.fixture(scope='module')
def finished(lines):
  workdir, _ = lines
  launch(workdir)  # with the second stage
  return workdir


@pytest.fixture(scope='module')
def rows(finished):
  rows = writers.read(str(finished / 'metrics.jsonl'))
  return [row for row in rows if row['stage'] == 'grpo']


@pytest.fixture(scope='module')
def best(rows):
  """The step of the best evaluation, worked out from the metrics."""
  key = BEST.replace('eval', 'select')
  values = {row['step']: row[key] for row in rows if key in row}
  assert len(values) >= 5 and all(step % 3 == 0 for step in values)
  return max(values, key=lambda step: (values[step], -step))


def test_the_stage_ends_when_its_patience_does(rows, best):
  assert 0 < best < rows[-1]['step'] < 30
  assert rows[-1]['step'] == best + 9  # three evaluations later


def test_the_best_step_is_kept_and_found(finished, best, rows):
  folder = finished / 'checkpoints' / 'grpo'
  last = rows[-1]['step']
  assert sorted(map(int, os.listdir(folder))) == [best, last]
  assert store.find(str(folder)).name == str(best)
  assert store.read_host(str(folder / str(last)))['finished'] is True


def test_the_next_stage_begins_with_the_average_of_the_best(finished, best):
  host = store.read_host(str(finished / 'checkpoints/after/1'))
  assert host['start'] == f'checkpoints/grpo/{best}'
  folder = str(finished / host['start'])
  like = transformer.shapes(weights.read(folder).model)
  average = weights.load(folder, like, average=True)
  last = weights.load(folder, like)
  assert any(
    (np.asarray(x) != np.asarray(y)).any()
    for x, y in zip(*map(jax.tree.leaves, (average, last)), strict=True)
  )


def test_the_last_line_is_of_the_best_step(lines, best, rows):
  (chosen,) = [row for row in rows if row['step'] == best]
  assert lines[1][0] == lines[1][1]
  assert lines[1][0].items() <= chosen.items() and len(lines[1][0]) > 3


def test_resumed_it_chooses_the_same(finished, tmp_path):
  with pytest.MonkeyPatch.context() as patch:
    toys.stop_at(patch, 8)  # after two evaluations, before the next
    with pytest.raises(preemption.Preempted, match='step 8'):
      launch(tmp_path, alone())
  launch(tmp_path, alone())
  truth, again = (kill_resume.outcome(x) for x in (finished, tmp_path))
  assert any(name.startswith('grpo_best/') for name in truth['arrays'])
  truth['rows'] = [row for row in truth['rows'] if row['stage'] == 'grpo']
  truth['arrays'] = {
    k: x for k, x in truth['arrays'].items() if not k.startswith('after/')
  }
  assert not kill_resume.differences(truth, again)


def test_killed_after_its_first_save_it_goes_on(tmp_path, monkeypatch):
  """The start is saved when it is evaluated, and not evaluated again."""
  folder, run = tmp_path / 'checkpoints/grpo', alone()
  with monkeypatch.context() as patch:
    patch.setattr(job.Job, 'begin', _interrupted)
    with pytest.raises(KeyboardInterrupt):
      launch(tmp_path, run)
  assert [x.name for x in folder.iterdir()] == ['0']
  (stage,) = run.stages.values()
  short = dataclasses.replace(stage, steps=1)
  monkeypatch.setattr(job.Job, 'start', _interrupted)
  launch(tmp_path, dataclasses.replace(run, stages={'grpo': short}))
  rows = writers.read(str(tmp_path / 'metrics.jsonl'))
  assert [row['step'] for row in rows] == [0, 1]
  assert store.best_step(folder / '1') is not None


def _interrupted(self, *args):
  raise KeyboardInterrupt


def test_a_start_that_reaches_the_value_trains_no_step(tmp_path):
  for _ in range(2):  # again, when it is over
    launch(tmp_path, alone(stop_at=0.0))
    rows = writers.read(str(tmp_path / 'metrics.jsonl'))
    assert [row['step'] for row in rows] == [0]
  folder = store.find(str(tmp_path / 'checkpoints/grpo'))
  host = store.read_host(str(folder))
  assert (folder.name, host['finished']) == ('0', True)


def test_a_checkpoint_that_is_played_does_not_select(finished):
  """Also with other environments than the one that the selection is of."""
  folder = str(store.find(str(finished / 'checkpoints/grpo')))
  envs = ('grpo.envs', '{"other": {"env": {"type": "arithmetic"}}}')
  run, name = from_checkpoint.stage_of(folder, overrides=[envs])
  played = from_checkpoint.for_playing(run, name).stages[name]
  assert (played.eval.best, played.eval.patience) == (None, None)
  assert list(played.envs) == ['other'] and played.eval.prompts == 1
  more = [('grpo.eval.prompts', '2')]
  with pytest.warns(UserWarning, match='were chosen by tasks of environment'):
    from_checkpoint.stage_of(folder, overrides=more)


def test_an_adapter_of_averaged_weights_is_read_with_them(finished, tmp_path):
  shutil.copytree(finished, tmp_path / 'run')
  run = run_of()
  after = dataclasses.replace(run.stages['after'], lora=schema.Lora(rank=2))
  stages = {**run.stages, 'adapter': after}
  launch(tmp_path / 'run', dataclasses.replace(run, stages=stages))
  folder = str(tmp_path / 'run/checkpoints/adapter/1')
  like = transformer.shapes(weights.read(folder).model)
  weights.load(folder, like)  # raises if the base weights are others
  start = weights.load_start(folder, like)
  best = weights.load(weights.read(folder).start(), like, average=True)
  assert all(jax.tree.leaves(jax.tree.map(np.array_equal, start, best)))


def test_the_cadence_of_a_stage_that_selects_stays():
  old = config.to_dict(run_of())
  with pytest.raises(ValueError, match=r'config.grpo.eval.every'):
    config.check_resume(old, config.to_dict(run_of(every=2)))
  old['grpo']['steps'] = 3 * old['grpo']['eval']['every']
  longer = {**old, 'grpo': {**old['grpo'], 'steps': old['grpo']['steps'] + 1}}
  config.check_resume(old, longer)
  with pytest.raises(ValueError, match='config.grpo.steps'):
    config.check_resume(longer, old)  # its last evaluation is off the cadence


def test_a_stage_on_pairs_is_selected_by_half_of_those_held_out(tmp_path):
  """And a reward model by nothing else."""
  file = tmp_path / 'pairs.jsonl'
  row = '{{"prompt": "q{0}", "chosen": "yes", "rejected": "no {0}"}}\n'
  file.write_text(''.join(map(row.format, range(12))))
  stage = dataclasses.replace(
    toys.stage(steps=10),
    kind='ranking',
    envs={},
    pairs=schema.PairFile(path=str(file), eval_fraction=0.5),
    eval=schema.Eval(every=3, best='eval/pairs/rewards/accuracies'),
  )
  main.train(toys.run({'rm': stage}), str(tmp_path))
  rows = writers.read(str(tmp_path / 'metrics.jsonl'))
  rows = [x for x in rows if 'select/best_step' in x]
  values = {x['step']: x['select/pairs/rewards/accuracies'] for x in rows}
  assert list(values) == [0, 3, 6, 9, 10]
  best = max(values, key=lambda step: (values[step], -step))
  assert rows[-1]['select/best_step'] == best
  folder = tmp_path / 'checkpoints/rm'
  assert store.find(str(folder)).name == str(best)


@pytest.mark.parametrize(
  ('values', 'patience', 'best', 'is_over'),
  [
    ([0.5, 0.4, 0.5, 0.6, 0.6], None, [0, 0, 0, 3, 3], False),
    ([-1.0, None, math.nan, 0.0], None, [0, 0, 0, 3], False),
    ([0.5, 0.6, 0.6, 0.1], 2, [0, 1, 1, 1], True),
    ([0.5, 0.6, 0.6, 0.7], 2, [0, 1, 1, 3], False),
    ([0.5, None, None], 2, [0, 0, 0], True),
    ([0.5, 0.6, 0.75], 2, [0, 1, 2], True),  # stop_at
  ],
)
def test_the_first_of_equals_is_the_best_within_patience(
  values, patience, best, is_over
):
  cfg = schema.Eval(every=1, best='eval/x/e', patience=patience, stop_at=0.75)
  made, steps = resume.Selection('s', cfg), []
  for step, value in enumerate(values):
    metrics = {} if value is None else {'select/x/e': value}
    steps.append(made.add(step, metrics)['select/best_step'])
    state = json.loads(json.dumps(made.state()))
    made = resume.Selection('s', cfg, **state)
  assert (steps, made.is_over) == (best, is_over)
