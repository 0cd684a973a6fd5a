"""Sizes of a stage that follow from its devices where they are not set."""

import dataclasses

from posttrain import schema

# Tokens of a micro-batch, and the most slots, per device of data x fsdp.
_TOKENS = 2048
_SLOTS = 256


def resolve(stage: schema.Stage, devices: int) -> schema.Stage:
  """Returns a stage's options with every size set.

  `batch.micro_batch_tokens`: as many rows per device of data x fsdp as 2,048
  tokens hold, at least one. `rollout.slots`: as many as a step has samples, at
  most 256 per device of data x fsdp.

  Args:
    stage: the options.
    devices: number of devices that share rows and slots, `sharding.batch_ways`.
  """
  batch, rollout = stage.batch, stage.rollout
  if batch.micro_batch_tokens is None:
    rows = devices * max(1, _TOKENS // batch.packed_tokens)
    tokens = rows * batch.packed_tokens
    batch = dataclasses.replace(batch, micro_batch_tokens=tokens)
  if rollout.slots is None:
    sizes = (x.group_size for x in stage.envs.values() if x.ratio)
    group_size = max(sizes, default=1)
    each = -(-batch.prompts_per_step * group_size // devices)
    rollout = dataclasses.replace(rollout, slots=devices * min(each, _SLOTS))
  return dataclasses.replace(stage, batch=batch, rollout=rollout)
