"""Sizes that follow from the devices, in plans and in what is stored."""

import dataclasses
import math

import pytest

from posttrain import config, schema
from posttrain.stage import models, preflight
from tests import toys


def plan(mesh, stage, sampler=None):
  """Returns the components of a stage on planned devices."""
  run = schema.Run(
    model=schema.PRESETS['tiny'],
    mesh=schema.Mesh(**{'data': 1, **mesh, **(sampler or {})}),
    stages={'a': stage},
  )
  own = run.mesh.sampler
  count = math.prod(mesh.values()) + (own.data if own else 0)
  planned = preflight.check(preflight.resolve(run, ('gpu', count, 1)))
  # What is stored does not depend on the devices: a run may change them.
  assert planned['a'].outside.options == config.to_dict(run)
  return planned['a']


def entry(group_size=1, ratio=1.0):
  return schema.EnvEntry(
    env=schema.Arithmetic(eval_tasks=4),
    algorithm=schema.Reward(),
    sampler=schema.Policy(),
    group_size=group_size,
    ratio=ratio,
  )


@pytest.mark.parametrize(
  'mesh, row_tokens, joined, micro_batch_tokens, trees, rows',
  [
    # As many rows as 2,048 tokens hold, at least one; x data x fsdp.
    ({}, 4096, 2, None, False, 1),
    ({'data': 4, 'tensor': 2}, 1024, 1, None, False, 8),
    ({'data': 4, 'fsdp': 2}, 64, 1, 1024, False, 16),
    # Joined to one per device.
    ({'data': 4, 'tensor': 2}, 1024, 2, None, True, 4),
    ({'data': 4, 'fsdp': 2}, 64, 2, 1024, None, 8),
    # Pieces of rows are no trees, and share the rows.
    ({'data': 2, 'sequence': 4}, 4096, 1, None, None, 2),
  ],
)
def test_rows_of_a_micro_batch(
  mesh, row_tokens, joined, micro_batch_tokens, trees, rows
):
  batch = schema.Batch(
    row_tokens=row_tokens,
    joined_rows=joined,
    micro_batch_tokens=micro_batch_tokens,
    trees=trees,
  )
  parts = plan(mesh, schema.Stage(envs={'a': entry(2)}, batch=batch))
  assert parts.plan.cfg.batch.packed_rows == rows
  assert parts.data.shape == (
    math.ceil(2 * 64 / (rows * joined)),
    rows,
    row_tokens * joined,
  )


def test_rows_in_pieces_are_no_trees_and_their_gradients_add_up_at_once():
  for key, value in {'trees': True, 'reduce_gradients': 'update'}.items():
    stage = schema.Stage(
      envs={'a': entry(2)}, batch=schema.Batch(**{key: value})
    )
    with pytest.raises(ValueError, match=f'batch.{key} must be .*sequence'):
      plan({'sequence': 2}, stage)


def test_cudnn_gets_rows_of_whole_samples_and_the_plan_says_so():
  model = dataclasses.replace(
    schema.PRESETS['tiny'], attention='cudnn', dtype='bfloat16'
  )
  parts = plan({}, schema.Stage(envs={'a': entry(2)}, model=model))
  assert parts.stage.batch.trees is False
  (line,) = (x for x in parts.plan.lines() if x.split()[0] == 'trees')
  assert 'whole samples' in line
  # References score in such rows as well, with the attention of the policy.
  other = dataclasses.replace(model, layers=3, attention='auto')
  assert preflight._computing_as(other, parts.model).attention == 'cudnn'


@pytest.mark.parametrize(
  'mesh, slots, expected',
  [
    # As many as a step has samples, at most 256 x data x fsdp.
    ({}, None, 256),
    ({'data': 4, 'fsdp': 2}, None, 512),
    ({}, 100, 100),
  ],
)
def test_slots(mesh, slots, expected):
  envs = {'a': entry(8), 'only_evaluated': entry(100, ratio=0.0)}
  parts = plan(
    mesh, schema.Stage(envs=envs, rollout=schema.Rollout(slots=slots))
  )
  assert parts.stage.rollout.slots == parts.plan.slots == expected


def test_a_sampler_has_its_own_slots_and_rows_that_are_scored():
  sampler = {'sampler': schema.SamplerMesh(data=2)}
  stage = schema.Stage(
    envs={'a': entry(8)},
    batch=schema.Batch(micro_batch_tokens=1024, row_tokens=64),
    rollout=schema.Rollout(slots=None),
  )
  parts = plan({'data': 4}, stage, sampler)
  assert parts.stage.rollout.slots == 512
  assert (parts.stage.batch.rows, parts.score_rows) == (16, 8)


def test_a_sampler_is_refused_where_it_does_not_fit():
  run = schema.Run(
    mesh=schema.Mesh(sampler=schema.SamplerMesh(tensor=3)),
    model=schema.PRESETS['tiny'],
    stages={'a': schema.Stage(envs={'a': entry()})},
  )
  with pytest.raises(ValueError, match=r'over config.mesh.sampler.tensor=3'):
    preflight.check(preflight.resolve(run, ('gpu', 4, 1)))
  for hosts, samplers, error in [
    (2, None, 'mesh.sampler must be None with several processes, here 2'),
    (1, object(), 'mesh.sampler must be None with --samplers'),
  ]:
    with pytest.raises(ValueError, match=error):
      preflight.resolve(run, ('gpu', 4, hosts), samplers)


@pytest.mark.parametrize(
  'platform, model, batch, expected',
  [
    # Large models on a CPU: rows that fit, float32, a bounded evaluation.
    ('cpu', 'qwen3_0p6b', {}, (True, 1, 2, 'float32', 16)),
    ('cpu', 'tiny', {}, (False, 2, 1, 'bfloat16', 500)),
    ('gpu', 'qwen3_0p6b', {}, (False, 2, 1, 'bfloat16', 500)),
    # What is given is kept.
    (
      'cpu',
      'qwen3_0p6b',
      {'micro_batch_tokens': 4096},
      (False, 4, 1, 'float32', 16),
    ),
    ('cpu', 'tiny', {'fit': True}, (True, 1, 2, 'bfloat16', 500)),
  ],
)
def test_sizes_follow_from_the_model_and_the_platform(
  platform, model, batch, expected
):
  model = dataclasses.replace(schema.PRESETS[model], dtype='auto')
  run = schema.Run(
    model=model,
    stages={
      'a': schema.Stage(
        envs={'a': entry()},
        batch=schema.Batch(row_tokens=1024, **batch),
        eval=schema.Eval(samples=1, max_tokens=64),
      )
    },
  )
  stage = preflight.resolve(run, (platform, 1, 1)).cfg.stages['a']
  batch = stage.batch
  assert (
    batch.fit,
    batch.packed_rows,
    batch.joined_rows,
    stage.model.dtype,
    stage.eval.prompts,
  ) == expected


LONG = schema.Batch(row_tokens=1024)


def shared(entries, prefill_tokens=32, **stage):
  """Returns the components of a stage with `rollout.shared_prompts`."""
  rollout = schema.Rollout(shared_prompts=True, prefill_tokens=prefill_tokens)
  stage = {'batch': LONG, 'eval': schema.Eval(max_tokens=80), **stage}
  return plan({}, schema.Stage(envs=entries, rollout=rollout, **stage))


def test_slots_hold_what_follows_a_stored_prompt():
  parts = shared({'a': entry(4), 'b': entry(2)})
  options = models._engine_options(parts)
  assert (options.group_size, options.capacity) == (4, 1024)
  # All but 80 tokens of an answer and 32 of a prompt.
  assert options.prompt_tokens == 1024 - (80 + 32)


@pytest.mark.parametrize(
  'options',
  [
    {'entries': {'a': entry(1)}},
    {'entries': {'a': entry(4)}, 'prefill_tokens': 1024},
    # Pairs are answers of other lengths.
    {
      'entries': {'a': schema.EnvEntry(env=schema.Arithmetic(eval_tasks=4))},
      'kind': 'preference',
      'pairs': schema.MadePairs(max_tokens=512),
    },
  ],
)
def test_the_plan_says_that_no_prompt_is_stored_once(options):
  parts = shared(**options)
  assert models._engine_options(parts).prompt_tokens == 0
  (line,) = (x for x in parts.plan.lines() if 'stored once' in x)
  assert 'none: only groups' in line


def test_turns_after_a_stored_prompt_need_a_bound(monkeypatch):
  class Turns(toys.Letters):
    max_turns = 2

  toys.install(monkeypatch, Turns)
  with pytest.raises(ValueError, match=r'max_episode_tokens must be set'):
    shared({'a': entry(4)})
  bounded = dataclasses.replace(
    entry(4), sampler=schema.Policy(max_episode_tokens=200)
  )
  evaluation = schema.Eval(max_tokens=80, max_episode_tokens=300)
  parts = shared({'a': bounded}, eval=evaluation)
  assert parts.plan.load.prompt_tokens == 1024 - 336


@pytest.mark.parametrize('key', ['prefix_cache', 'in_flight'])
def test_prompts_are_stored_once_without(key):
  with pytest.raises(ValueError, match=f'shared_prompts must be .*{key}'):
    schema.Rollout(shared_prompts=True, **{key: True})
