"""Prefill of waiting requests into free slots, on the device.

Axes: B slots, R scratch rows, C tokens of a prefill chunk.
"""

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from posttrain import schema
from posttrain.decode import feeds, loop, schedule


@dataclasses.dataclass(frozen=True)
class Shapes:
  """The sizes, the seed and the sharding of an engine, which are fixed."""

  slots: int
  rows: int  # prompts prefilled at a time
  width: int  # tokens of a prompt per prefill chunk
  seed: int  # of all draws
  sharding: NamedSharding | None  # of the slots


def admit(
  waiting: schedule.Schedule,
  state: loop.State | None,
  options: loop.Slots | None,
  view: Any,
  model: schema.Model,
  capacity: int,
  shapes: Shapes,
) -> tuple[loop.State | None, loop.Slots | None]:
  """Prefills as many waiting requests as fit, and draws a token for each.

  Args:
    waiting: the requests, in their order.
    state: the state of all slots; None = none yet.
    options: the options of the requests in the slots.
    view: `loop.view` of the weights.
    model: model options.
    capacity: tokens of a slot; a smaller state is widened.
    shapes: the engine's shapes.

  Returns:
    The new (state, options).
  """
  if not waiting.num_waiting:
    return state, options
  state = loop.fit(state, model, shapes.slots, capacity, shapes.sharding)
  while groups := waiting.assign_slots(shapes.rows):
    options = _options(waiting, shapes.seed)
    state = _fill(groups, state, options, view, model, shapes)
  return state, options


def _options(waiting: schedule.Schedule, seed: int) -> loop.Slots:
  fields = waiting.slot_options()
  keys = loop.request_keys(seed, fields.pop('high'), fields.pop('low'))
  return loop.Slots(keys=keys, **fields)


def _fill(
  groups: list[list[schedule.RequestState]],
  state: loop.State,
  options: loop.Slots,
  view: Any,
  model: schema.Model,
  shapes: Shapes,
) -> loop.State:
  """Prefills a scratch row per group, and copies it into the group's slots."""
  width = shapes.width
  tokens, start, count, source = feeds.prompts(groups, shapes.rows, width)
  scratch, logits = loop.load(state, model, source)
  for offset in range(0, tokens.shape[1], width):
    scratch, logits = loop.prefill(
      view,
      model,
      scratch,
      logits,
      tokens[:, offset : offset + width],
      start + offset,
      np.clip(count - offset, 0, width),
      shapes.sharding,
    )
  return loop.admit(
    state,
    options,
    scratch,
    logits,
    *feeds.targets(groups, shapes.slots),
    shapes.sharding,
  )
