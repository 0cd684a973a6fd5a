"""Choices -> a batch of fixed shape; both answers of one lie in the same row.

First-fit-decreasing, as `packing` does it with samples. Choices that train
come first; those of `others` have micro-batches of their own behind them.

Axes: M micro-batches, B rows, T tokens of a row, K choices that a row may
hold.
"""

import math
from collections.abc import Sequence

import numpy as np

from posttrain import types
from posttrain.data import packing


def length(choice: types.Pair) -> int:
  """Tokens that a choice takes of a row: of both prompts and both answers."""
  return sum(len(answer) for answer in _answers(choice) if answer is not None)


def pack(
  choices: Sequence[types.Pair],
  others: Sequence[types.Pair | None] = (),
  *,
  rows: int,
  row_tokens: int,
  per_row: int,
  pad_id: int = 0,
) -> types.PairBatch:
  """Packs choices into `[M, rows, row_tokens]`.

  M is that of one choice per row, however few rows are needed, so that batches
  of as many choices have the same shape.

  Args:
    choices: that train.
    others: that KTO compares with, of one answer each, as `chosen`; None = it
      has none for that choice.
    rows: B.
    row_tokens: T.
    per_row: K; rows with room for more stay as they are.
    pad_id: what fills `ids` elsewhere.

  Raises:
    ValueError: a choice is longer than a row; names the data row.
  """
  placed = [
    _place([c for c in x if c is not None], row_tokens, per_row)
    for x in (choices, others)
  ]
  room = [math.ceil(len(x) / rows) for x in (choices, others)]
  num_micro_batches, behind = (math.ceil(len(x) / rows) for x in placed)
  shape = (sum(room) * rows, row_tokens)
  arrays = {
    'ids': np.full(shape, pad_id, np.int32),
    'mask': np.zeros(shape, bool),
    'segment_ids': np.zeros(shape, np.int32),
    'positions': np.zeros(shape, np.int32),
    'present': np.zeros((shape[0], per_row, 2), bool),
    'ref_logprobs': np.zeros((shape[0], per_row, 2), np.float32),
    'margins': np.zeros((shape[0], per_row), np.float32),
  }
  for first, members in ((0, placed[0]), (num_micro_batches * rows, placed[1])):
    for row, inside in enumerate(members, first):
      _lay(arrays, row, inside)
  present = arrays['present'][: num_micro_batches * rows]
  return types.PairBatch(
    **{
      name: x.reshape(sum(room), rows, *x.shape[1:])
      for name, x in arrays.items()
    },
    pairs=np.float32(present.all(-1).sum()),
    answers=np.float32(present.sum()),
    num_micro_batches=np.int32(num_micro_batches),
    scored=np.int32(num_micro_batches + behind),
    baseline=np.float32(0),
  )


def _answers(choice: types.Pair) -> tuple[types.Sample | None, ...]:
  return choice.chosen, choice.rejected


def _place(
  choices: Sequence[types.Pair], row_tokens: int, per_row: int
) -> list[list[types.Pair]]:
  """The choices of each row."""
  for choice in choices:
    if length(choice) > row_tokens:
      name = next(x.row for x in _answers(choice) if x is not None)
      raise ValueError(
        f'row {name}: both answers, with the prompt before each, must fit '
        f'into batch.row_tokens={row_tokens}: got {length(choice)} tokens; '
        "raise row_tokens, or set pairs.too_long to 'drop'"
      )
  bins, _ = packing.first_fit(
    [length(choice) for choice in choices], row_tokens, len(choices), per_row
  )
  return [[choices[index] for index in members] for members in bins]


def _lay(arrays, row: int, choices: Sequence[types.Pair]) -> None:
  """Writes the choices of one row."""
  start = 0
  for k, choice in enumerate(choices):
    arrays['margins'][row, k] = choice.margin
    for a, sample in enumerate(_answers(choice)):
      if sample is None:
        continue
      place = (row, slice(start, start + len(sample)))
      arrays['ids'][place] = sample.ids
      arrays['mask'][place] = sample.mask
      arrays['segment_ids'][place] = 2 * k + a + 1
      arrays['positions'][place] = np.arange(len(sample))
      arrays['present'][row, k, a] = True
      arrays['ref_logprobs'][row, k, a] = choice.ref_logprobs[a]
      start += len(sample)
