"""Prefill of waiting requests into free slots, on the device.

Rows of a prefill call have one of two numbers, so that few waiting requests do
not pay for many; the tokens that they attend to have few lengths.
"""

import dataclasses
from typing import Any

from jax.sharding import NamedSharding

from posttrain import schema
from posttrain.decode import feeds, loop, schedule

# A call of so many tokens is cheap: a program of fewer rows costs more to
# compile than it saves.
_FEW_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Shapes:
  """The sizes, the seed and the sharding of an engine, which are fixed."""

  slots: int
  rows: int  # prompts prefilled at a time
  width: int  # tokens of a prompt per prefill chunk
  seed: int  # of all draws
  sharding: NamedSharding | None  # of the slots
  ways: int = 1  # devices that slots and rows are split over

  @property
  def device_slots(self) -> int:
    """The number of slots per device."""
    return self.slots // self.ways

  @property
  def row_counts(self) -> tuple[int, ...]:
    """The numbers of rows per device, in ascending order."""
    most = -(-self.rows // self.ways)
    few = max(most // 8, 1) if most * self.width > _FEW_TOKENS else most
    return tuple(sorted({few, most}))

  def row_count(self, waiting: int) -> int:
    """Returns the rows per device of a call for so many waiting groups.

    Up to half of the most, several calls of few rows cost no more.
    """
    few, most = self.row_counts[0], self.row_counts[-1]
    return few if 2 * waiting <= most else most


def admit(
  waiting: schedule.Schedule,
  state: loop.State | None,
  options: loop.Slots | None,
  view: Any,
  model: schema.Model,
  capacity: int,
  shapes: Shapes,
) -> tuple[loop.State | None, loop.Slots | None]:
  """Prefills waiting requests, and draws a token for each.

  Until none waits or no slot is free; next to active slots, which must not wait
  long, at most a chunk of all rows.

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
  left = shapes.row_counts[-1] if waiting.any_active else None
  while True:
    waiting.assign_slots()
    rows = waiting.next_rows(shapes.row_counts[-1])
    most = max(map(len, rows))
    count = shapes.row_count(most)
    if not most or (left is not None and count > left):
      return state, options
    left = None if left is None else left - count
    rows = [groups[:count] for groups in rows]
    state, options = _feed(
      waiting, rows, state, options, view, model, count, shapes
    )


def _options(waiting: schedule.Schedule, seed: int) -> loop.Slots:
  fields = waiting.slot_options()
  keys = loop.request_keys(seed, fields.pop('high'), fields.pop('low'))
  return loop.Slots(keys=keys, **fields)


def _feed(
  waiting: schedule.Schedule,
  rows: feeds.Rows,
  state: loop.State,
  options: loop.Slots | None,
  view: Any,
  model: schema.Model,
  count: int,
  shapes: Shapes,
) -> tuple[loop.State, loop.Slots | None]:
  """Feeds a chunk to each row; those that are complete draw a token."""
  slots, place = shapes.device_slots, shapes.sharding
  chunk = feeds.chunk(rows, count, shapes.width, slots)
  _, start, number, _ = chunk
  length = schedule.prefix_length(int(max(start + number)), state.ids.shape[1])
  most = shapes.row_counts[-1]
  sizes = length, most, place
  state, logits = loop.prefill(view, model, state, *chunk, *sizes)
  finished = [
    [x for x in groups if waiting.feed(x, min(x.left, shapes.width))]
    for groups in rows
  ]
  if not any(finished):
    return state, options
  if any(len(x.entries) > 1 for groups in finished for x in groups):
    pairs = feeds.copies(finished, slots)
    state = loop.share(state, *pairs, *sizes)
  options = _options(waiting, shapes.seed)
  drawing = feeds.drawing(rows, finished, slots)
  return loop.first(state, options, logits, *drawing, place), options
