"""Fills free slots with what waits, on the device.

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
  """What stays as it is while an engine lives."""

  slots: int
  rows: int  # prompts prefilled at a time
  width: int  # tokens of a prompt that go in at a time
  seed: int  # of every draw
  place: NamedSharding | None  # of the slots


def admit(
  seats: schedule.Schedule,
  state: loop.State | None,
  asked: loop.Slots | None,
  view: Any,
  model: schema.Model,
  capacity: int,
  shapes: Shapes,
) -> tuple[loop.State | None, loop.Slots | None]:
  """Seats as many as there is room for, prefills them, draws a token each.

  Args:
    seats: who waits, and in which order.
    state: of all slots; None = none yet.
    asked: what the requests in the slots ask for.
    view: `loop.view` of the weights.
    model: its options.
    capacity: tokens of a slot; the state is made wider where it has fewer.
    shapes: of the engine.

  Returns:
    (state, asked), as they are then.
  """
  if not seats.waiting:
    return state, asked
  state = loop.fit(state, model, shapes.slots, capacity, shapes.place)
  while entries := seats.seat_next(shapes.rows):
    asked = _ask(seats, shapes.seed)
    state = _fill(entries, state, asked, view, model, shapes)
  return state, asked


def _ask(seats: schedule.Schedule, seed: int) -> loop.Slots:
  """What the slots' requests ask for, as arrays."""
  fields = seats.asks()
  keys = loop.request_keys(seed, fields.pop('high'), fields.pop('low'))
  return loop.Slots(keys=keys, **fields)


def _fill(entries, state, asked, view, model, shapes: Shapes) -> loop.State:
  """Prefills a scratch row per entry, and puts it into the entry's slots."""
  width = shapes.width
  tokens, start, count, source = feeds.lay(entries, shapes.rows, width)
  scratch, logits = loop.load(state, model, source)
  for at in range(0, tokens.shape[1], width):
    scratch, logits = loop.prefill(
      view,
      model,
      scratch,
      logits,
      tokens[:, at : at + width],
      start + at,
      np.clip(count - at, 0, width),
    )
  return loop.admit(
    state,
    asked,
    scratch,
    logits,
    *feeds.places(entries, shapes.slots),
    shapes.place,
  )
