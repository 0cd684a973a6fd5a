"""Replaying a run from its exports: the same batches, the same losses."""

import contextlib
import dataclasses
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.examples import replay
from posttrain import main, schema, train, types
from posttrain.checkpoints import weight_folders, weights
from posttrain.config import checks
from posttrain.metrics import writers
from posttrain.pipeline import tokens as token_pipeline
from posttrain.stage import build, components, job
from posttrain.training import token_export
from posttrain.util import preemption
from tests import fixtures, toys

STEPS = 3


def _run(first):
  """Returns a run of two stages; the second starts with the first's weights."""
  first = dataclasses.replace(
    first, steps=STEPS, optim=schema.Optim(lr=1e-2, schedule='constant')
  )
  more = dataclasses.replace(first, init='stage:first')
  return schema.Run(
    compilation_cache=None,
    model=schema.PRESETS['tiny'],
    metrics=schema.Metrics(progress=False, export_tokens=1),
    stages={'first': first, 'more': more},
  )


RUN = _run(fixtures.stage())


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """A run of the first stage, on batches with tokens of every component.

  Demonstrations stand in for samples: no engine decodes, nothing is evaluated.
  """
  workdir = tmp_path_factory.mktemp('replay')
  advance = token_pipeline.TokenPipeline.__next__

  def sampled(self):
    item = advance(self)
    batch = fixtures.sampled(item.batch, seed=int(item.batch.ids.sum()))
    return dataclasses.replace(item, batch=batch)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(token_pipeline.TokenPipeline, '__next__', sampled)
    patch.setattr(job.Job, 'evaluate', lambda *args: {})
    stop = preemption.Signal()
    stage = components.make(RUN, 'first')
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
  truth = [row for row in truth if row['stage'] == 'first' and row['step']]
  assert [row['step'] for row in rows] == [row['step'] for row in truth]
  assert len({row['loss/total'] for row in rows} - {0}) == STEPS
  for row, true in zip(rows, truth, strict=True):
    names = {key for key in row if not key.startswith('time/')}
    assert {
      'loss/rl',
      'loss/ref_kl',
      'loss/total',
      'optim/grad_norm',
      'mismatch/max',
      'entropy',
      'batch/tokens',
    } <= names
    assert {k: row[k] for k in names} == {k: true[k] for k in names}


def test_a_replay_equals_the_run_bitwise(finished, tmp_path):
  last = replay.replay(_flags(finished, tmp_path), RUN)
  _check_equal(finished, tmp_path)
  assert 'loss/ce' in last and last['step'] == STEPS


def test_a_stage_starts_with_the_parameters_of_another(finished, tmp_path):
  flags = _flags(finished, tmp_path, stage='more')
  initial = replay.build(flags, RUN)[0].state.params
  final = weights.load(weight_folders.find(str(finished)), initial)
  for a, b in zip(*map(jax.tree.leaves, (initial, final)), strict=True):
    np.testing.assert_array_equal(a, b)


def test_files_are_read_in_order_of_steps(tmp_path):
  for name in ('a_000002', 'a_1000000', 'a_000010', 'aa_000004', 'a_b'):
    (tmp_path / f'{name}.jsonl').touch()
  (tmp_path / 'a_000003.jsonl.tmp').touch()
  paths = replay.files(str(tmp_path), 'a')
  assert list(paths) == [2, 10, 1000000]
  assert paths[10] == str(tmp_path / 'a_000010.jsonl')


@pytest.mark.slow
def test_a_replay_of_grpo_equals_the_run(tmp_path, monkeypatch):
  """The run samples, exports and trains; the replay trains again."""
  entry = toys.entry(group_size=4, max_tokens=4, kl_beta=0.1)
  run = _run(toys.stage(envs={'toy': entry}))
  run = dataclasses.replace(run, stages={'first': run.stages['first']})
  checks.check(run)
  toys.install(monkeypatch)
  main.launch(run, str(tmp_path / 'run'), dry_run=False)
  replay.replay(_flags(tmp_path / 'run', tmp_path / 'again'), run)
  _check_equal(tmp_path / 'run', tmp_path / 'again')
  for step in (1, STEPS):
    path = tmp_path / 'run' / 'token_exports' / f'first_{step:06d}.jsonl'
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    # Before the update: on-policy tokens have a ratio of 1, up to rounding.
    ratios = [x for line in lines for x in line['ratio'] if x is not None]
    assert len(ratios) > 10
    np.testing.assert_allclose(ratios, 1, atol=1e-4)
    assert {v for line in lines for v in line['versions']} == {-1, step - 1}


def _sample(env, length, rng):
  mask = np.arange(length) >= 1
  floats = {
    name: rng.normal(size=length).astype(np.float32)
    for name, dtype in types.TOKEN_FIELDS.items()
    if dtype == np.float32
  }
  for name in ('rl_weights', 'ref_kl_weights'):
    floats[name] *= mask
  return types.Sample(
    env=env,
    row='',
    ids=rng.integers(0, 200, length).astype(np.int32),
    mask=mask,
    roles=np.zeros(length, np.int8),
    is_content=np.zeros(length, bool),
    versions=rng.integers(-1, 9, length).astype(np.int32),
    **{
      **floats,
      'temperatures': np.ones(length, np.float32),
      'ce_weights': floats['ce_weights'] * mask,
    },
  )


@given(st.lists(st.integers(2, 32), max_size=40), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_packing_exported_sequences_again_changes_nothing(lengths, seed):
  """Through JSON, with two environments, and more samples than rows."""
  rng = np.random.default_rng(seed)
  stage = toys.stage(envs={'a': toys.entry(), 'b': toys.entry()})
  samples = [_sample('ab'[n % 2], n, rng) for n in lengths]
  batch = token_pipeline.Packer(stage, 257)(samples)
  blank = np.zeros(batch.ids.shape[1:], np.float32)
  exported = [
    replay.sample(json.loads(json.dumps({'schema_version': 1, **record})), '')
    for micro in range(int(batch.num_micro_batches))
    for record in token_export.records(batch, micro, blank, blank, ('a', 'b'))
  ]
  repacked = token_pipeline.Packer(stage, 257)(exported)
  for name, value in vars(batch).items():
    np.testing.assert_array_equal(getattr(repacked, name), value, name)


@pytest.mark.parametrize(
  'argv, message',
  [
    (['--steps=0'], '--steps must be at least 1: got 0'),
    (['--steps'], "got '--steps'"),
    (['--config='], "--config must not be empty: got ''"),
    ([], '--config=FILE must be given'),
    (
      ['--config=a.py', '--exports=b', '--workdir=c'],
      '--stage=NAME must be given',
    ),
  ],
)
def test_a_wrong_command_is_one_line(capsys, argv, message):
  assert replay.main(argv) == 2
  error = capsys.readouterr().err
  assert message in error and error.count('\n') == 1


def test_parser_reads_all_flags():
  flags = replay.PARSER.parse(
    [
      '--config=a.py:tiny',
      '--config.grpo.optim.lr=1e-4',
      '--exports=e',
      '--stage=grpo',
      '--workdir=w',
      '--steps=5',
    ]
  )
  assert flags == replay.Flags(
    'a.py:tiny', 'e', 'grpo', 'w', 5, [('grpo.optim.lr', '1e-4')]
  )


@pytest.mark.parametrize(
  'change, message',
  [
    ({'stage': 'x'}, r"--stage must be one of \('first', 'more'\): got 'x'"),
    ({'exports': '/no/such'}, r'--exports must be a folder with files first_'),
  ],
)
def test_a_missing_stage_or_folder_is_named(tmp_path, change, message):
  flags = dataclasses.replace(_flags(tmp_path, tmp_path / 'new'), **change)
  with pytest.raises(ValueError, match=message):
    replay.replay(flags, RUN)


def test_a_used_workdir_is_refused(finished):
  before = (finished / 'metrics.jsonl').read_bytes()
  with pytest.raises(ValueError, match='--workdir must be new'):
    replay.replay(_flags(finished, finished), RUN)
  assert (finished / 'metrics.jsonl').read_bytes() == before


def test_another_schema_version_is_refused():
  with pytest.raises(ValueError, match='f:3: schema_version must be 1: got 2'):
    replay.sample({'schema_version': 2}, 'f:3')
