"""Prefill of waiting requests into free slots, on the device.

Rows of a prefill call have one of two numbers, so that few waiting requests do
not pay for many; the tokens that they attend to have few lengths.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding

from posttrain import schema
from posttrain.decode import feeds, loop, schedule

# A call of so many tokens is cheap: a program of fewer rows costs more to
# compile than it saves.
_FEW_TOKENS = 128
# Calls that read longer prefixes have few rows, which bounds their memory.
_LONG_PREFIX = 1024


@dataclasses.dataclass(frozen=True)
class Shapes:
  """The sizes, the seed and the sharding of an engine, which are fixed."""

  slots: int
  rows: int  # prompts prefilled at a time
  width: int  # tokens of a prompt per prefill chunk
  seed: int = 0  # of all draws
  sharding: NamedSharding | None = None  # of the slots
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

  def calls(self, capacity: int) -> list[tuple[int, int]]:
    """Returns (rows per device, tokens of a slot read) of all prefill calls.

    Args:
      capacity: tokens of a slot.
    """
    few, lengths = self.row_counts[0], [0]
    while lengths[-1] < capacity:
      lengths.append(schedule.prefix_length(lengths[-1] + 1, capacity))
    return [
      (count, length)
      for length in lengths[1:]
      for count in self.row_counts
      if count == few or length <= _LONG_PREFIX
    ]


@dataclasses.dataclass(frozen=True)
class Call:
  """A call of `loop.prefill`."""

  rows: feeds.Rows
  count: int  # rows per device, those without a group included
  length: int  # tokens of a slot that are read


def admit(
  waiting: schedule.Schedule,
  state: loop.State,
  options: loop.Slots | None,
  view: Any,
  model: schema.Model,
  shapes: Shapes,
) -> tuple[loop.State, loop.Slots | None]:
  """Prefills waiting requests, and draws a token for each.

  Until none waits or no slot is free; next to active slots, which must not wait
  long, at most a chunk of all rows.

  Args:
    waiting: the requests, in their order.
    state: the state of all slots.
    options: the options of the requests in the slots; None = no request yet.
    view: `loop.view` of the weights.
    model: model options.
    shapes: the engine's shapes.

  Returns:
    The new (state, options).
  """
  left = shapes.row_counts[-1] if waiting.num_active else None
  while True:
    waiting.assign_slots()
    call = _next_call(waiting, shapes, state.ids.shape[1])
    if call is None or (left is not None and call.count > left):
      return state, options
    left = None if left is None else left - call.count
    state, options = _run(waiting, call, state, options, view, model, shapes)


def warm_up(
  state: loop.State, view: Any, model: schema.Model, shapes: Shapes
) -> loop.State:
  """Compiles `loop.prefill` for all shapes, by calls that feed no token.

  Args:
    state: the state of all slots.
    view: `loop.view` of the weights.
    model: model options.
    shapes: the engine's shapes.
  """
  for count, length in shapes.calls(state.ids.shape[1]):
    call = Call([[] for _ in range(shapes.ways)], count, length)
    state, _ = _prefill(call, state, view, model, shapes)
  return state


def _next_call(
  waiting: schedule.Schedule, shapes: Shapes, capacity: int
) -> Call | None:
  """Returns the next call of `loop.prefill`; None if no group is being fed."""
  few, most = shapes.row_counts[0], shapes.row_counts[-1]
  rows = waiting.next_rows(most)
  num = max(map(len, rows))
  if not num:
    return None
  # Up to half of the rows, several calls of few cost no more than one of most.
  for count in (few,) if 2 * num <= most else (most, few):
    rows = [groups[:count] for groups in rows]
    ends = [
      group.position + min(group.left, shapes.width)
      for groups in rows
      for group in groups
    ]
    length = schedule.prefix_length(max(ends), capacity)
    if length <= _LONG_PREFIX:
      break
  return Call(rows, count, length)


def _options(waiting: schedule.Schedule, seed: int) -> loop.Slots:
  fields = waiting.slot_options()
  keys = loop.request_keys(seed, fields.pop('high'), fields.pop('low'))
  return loop.Slots(keys=keys, **fields)


def _run(
  waiting: schedule.Schedule,
  call: Call,
  state: loop.State,
  options: loop.Slots | None,
  view: Any,
  model: schema.Model,
  shapes: Shapes,
) -> tuple[loop.State, loop.Slots | None]:
  """Feeds a chunk to each row; slots with complete prompts draw a token."""
  state, logits = _prefill(call, state, view, model, shapes)
  finished = [
    [x for x in groups if waiting.feed(x, min(x.left, shapes.width))]
    for groups in call.rows
  ]
  if not any(finished):
    return state, options
  slots, place = shapes.device_slots, shapes.sharding
  if any(len(x.entries) > 1 for groups in finished for x in groups):
    tokens = shapes.row_counts[-1] * shapes.width
    pairs = feeds.copies(finished, slots)
    state = loop.share(state, *pairs, tokens, place)
  options = _options(waiting, shapes.seed)
  drawing = feeds.drawing(call.rows, finished, slots)
  return loop.first(state, options, logits, *drawing, place), options


def _prefill(
  call: Call, state: loop.State, view: Any, model: schema.Model, shapes: Shapes
) -> tuple[loop.State, jax.Array]:
  """Returns the state and the logits of `loop.prefill`."""
  return loop.prefill(
    view,
    model,
    state,
    *feeds.chunk(call.rows, call.count, shapes.width, shapes.device_slots),
    call.length,
    shapes.row_counts[-1],
    shapes.sharding,
  )
