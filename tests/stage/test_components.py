"""A stage's components: keys in errors and warnings, sizes on a mesh."""

import math

import pytest

from posttrain import schema
from posttrain.stage import components


def make(env, **stage):
  entry = schema.EnvEntry(env=env)
  return components.make(
    schema.Run(
      model=schema.PRESETS['tiny'],
      stages={'sft': schema.Stage(envs={'a': entry}, **stage)},
    ),
    'sft',
  )


def test_errors_of_environments_begin_with_the_stage():
  env = schema.Gsm8k(path='nowhere.jsonl')
  with pytest.raises(
    ValueError, match=r'^config\.sft\.envs\.a\.env\.path must'
  ):
    make(env)


def test_errors_of_evaluation_splits_begin_with_the_stage(tmp_path):
  path = tmp_path / 'rows.jsonl'
  path.write_text('{"prompt": "a", "completion": "b"}\n')
  env = schema.Rows(path=str(path), eval_path='nowhere.jsonl')
  with pytest.raises(
    ValueError, match=r'^config\.sft\.envs\.a\.env\.eval_path'
  ):
    make(env)


def test_an_evaluation_without_tasks_is_named(tmp_path, caplog):
  path = tmp_path / 'rows.jsonl'
  path.write_text('{"prompt": "a", "completion": "b"}\n')
  env = schema.Rows(path=str(path))
  make(env)
  assert not caplog.text
  make(env, eval=schema.Eval(every=5))
  assert (
    'config.sft.eval.every=5 needs tasks to evaluate: the evaluation split of '
    'each environment is empty (config.sft.envs.a), and so is eval.suite; '
    'set eval.every=None to evaluate nothing'
  ) in caplog.text
  caplog.clear()
  make(env, eval=schema.Eval(every=5, suite=('Hello',)))
  assert not caplog.text
  pairs = {'kind': 'preference', 'eval': schema.Eval(every=5)}
  make(env, **pairs)
  assert not caplog.text
  make(env, **pairs, pairs=schema.MadePairs(eval_fraction=0.0))
  assert 'config.sft.eval.every=5 needs tasks to evaluate' in caplog.text


@pytest.mark.parametrize(
  'mesh, row_tokens, joined_rows, micro_batch_tokens, rows',
  [
    # As many rows per device as 2,048 tokens hold, at least one.
    ({}, 256, 1, None, 8),
    ({}, 256, 2, None, 4),
    ({}, 900, 1, None, 2),
    ({}, 4096, 1, None, 1),
    ({'data': 4, 'fsdp': 2}, 1024, 1, None, 16),
    ({'fsdp': 2, 'tensor': 4}, 1024, 1, None, 4),
    ({'data': 4, 'fsdp': 2}, 64, 1, 1024, 16),
  ],
)
def test_the_size_of_a_micro_batch_follows_the_devices(
  mesh, row_tokens, joined_rows, micro_batch_tokens, rows
):
  batch = schema.Batch(
    row_tokens=row_tokens,
    joined_rows=joined_rows,
    micro_batch_tokens=micro_batch_tokens,
  )
  entry = schema.EnvEntry(env=schema.Arithmetic(eval_tasks=4))
  run = schema.Run(
    model=schema.PRESETS['tiny'],
    mesh=schema.Mesh(**{'data': 1, **mesh}),
    stages={'sft': schema.Stage(envs={'a': entry}, batch=batch)},
  )
  count = math.prod(mesh.values())
  found = components.preflight(run, ('gpu', count, 1))['sft']
  assert found.plan.rows_per_micro_batch == rows
  assert found.plan.micro_batch_tokens == rows * row_tokens * joined_rows
  micro_batches, *shape = found.data.shape
  assert shape == [rows, row_tokens * joined_rows]
  assert micro_batches == math.ceil(64 / (rows * joined_rows))
  # What is stored does not depend on the devices: a run may change them.
  assert found.cfg == run


@pytest.mark.parametrize(
  'mesh, slots, group_size, expected',
  [
    # As many as a step has samples, 64 x group_size, at most 256 per device.
    ({}, None, 2, 128),
    ({}, None, 8, 256),
    ({'data': 4, 'fsdp': 2}, None, 8, 512),
    ({'data': 3, 'fsdp': 1, 'tensor': 2}, None, 1, 66),
    ({}, 100, 8, 100),
  ],
)
def test_the_number_of_slots_follows_the_samples(
  mesh, slots, group_size, expected
):
  entry = schema.EnvEntry(
    env=schema.Arithmetic(eval_tasks=4),
    algorithm=schema.Reward(),
    sampler=schema.Policy(),
    group_size=group_size,
  )
  run = schema.Run(
    model=schema.PRESETS['tiny'],
    mesh=schema.Mesh(**{'data': 1, **mesh}),
    stages={
      'a': schema.Stage(envs={'a': entry}, rollout=schema.Rollout(slots=slots))
    },
  )
  count = math.prod(mesh.values())
  found = components.preflight(run, ('gpu', count, 1))['a']
  assert found.stage.rollout.slots == found.plan.slots == expected
  assert found.cfg == run
