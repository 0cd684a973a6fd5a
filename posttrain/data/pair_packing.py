"""Packing of pairs into a batch of fixed shape, a pair whole in its row.

First-fit-decreasing, as in `packing`. The pairs that train come first; the
mismatched ones follow in micro-batches of their own.

Axes: M micro-batches, B rows, T tokens of a row, K pairs that a row may hold.
"""

import math
from collections.abc import Sequence

import numpy as np

from posttrain import types
from posttrain.data import packing


def length(pair: types.Pair) -> int:
  """Returns the tokens of a pair: both answers, each with its prompt."""
  return sum(len(answer) for answer in _answers(pair) if answer is not None)


def pack(
  pairs: Sequence[types.Pair],
  mismatched: Sequence[types.Pair | None] = (),
  *,
  rows: int,
  row_tokens: int,
  per_row: int,
  longest_pairs: int = 1,
  pad_id: int = 0,
) -> types.PairBatch:
  """Packs pairs into `[M, rows, row_tokens]`.

  M is computed for the pairs that surely fit into a row, even if fewer rows
  suffice, so that batches of equally many pairs have the same shape.

  Args:
    pairs: the pairs that train.
    mismatched: the pairs that KTO compares with, each with one answer, as
      `chosen`; None = there is none for that pair.
    rows: B.
    row_tokens: T.
    per_row: K, the most pairs in a row.
    longest_pairs: the number of the longest pairs that fit into a row.
    pad_id: token id of the padding.

  Raises:
    ValueError: a pair is longer than a row; names the data row.
  """
  bins = [
    _assign_rows([p for p in x if p is not None], row_tokens, per_row)
    for x in (pairs, mismatched)
  ]
  max_micro_batches = sum(
    math.ceil(len(x) / (rows * longest_pairs)) for x in (pairs, mismatched)
  )
  num_micro_batches, num_mismatched = (math.ceil(len(x) / rows) for x in bins)
  arrays = _padding((max_micro_batches * rows, row_tokens), per_row, pad_id)
  for first_row, members in zip(
    (0, num_micro_batches * rows), bins, strict=True
  ):
    for row, row_pairs in enumerate(members, first_row):
      _write_row(arrays, row, row_pairs)
  present = arrays['present'][: num_micro_batches * rows]
  return types.PairBatch(
    **{
      name: x.reshape(max_micro_batches, rows, *x.shape[1:])
      for name, x in arrays.items()
    },
    pairs=np.float32(present.all(-1).sum()),
    answers=np.float32(present.sum()),
    num_micro_batches=np.int32(num_micro_batches),
    scored=np.int32(num_micro_batches + num_mismatched),
    baseline=np.float32(0),
  )


def _padding(
  shape: tuple[int, int], per_row: int, pad_id: int
) -> dict[str, np.ndarray]:
  """Returns the arrays of a batch without pairs, of shape [rows, ...]."""
  rows = shape[0]
  return {
    'ids': np.full(shape, pad_id, np.int32),
    'mask': np.zeros(shape, bool),
    'segment_ids': np.zeros(shape, np.int32),
    'positions': np.zeros(shape, np.int32),
    'present': np.zeros((rows, per_row, 2), bool),
    'ref_logprobs': np.zeros((rows, per_row, 2), np.float32),
    'margins': np.zeros((rows, per_row), np.float32),
  }


def _answers(pair: types.Pair) -> tuple[types.Sample | None, ...]:
  return pair.chosen, pair.rejected


def _assign_rows(
  pairs: Sequence[types.Pair], row_tokens: int, per_row: int
) -> list[list[types.Pair]]:
  """Returns the pairs of each row."""
  for pair in pairs:
    if length(pair) > row_tokens:
      name = next(x.row for x in _answers(pair) if x is not None)
      raise ValueError(
        f'row {name}: both answers, with the prompt before each, must fit '
        f'into batch.row_tokens={row_tokens}: got {length(pair)} tokens; '
        "raise row_tokens, or set pairs.too_long to 'drop'"
      )
  bins, _ = packing.first_fit(
    [length(pair) for pair in pairs], row_tokens, len(pairs), per_row
  )
  return [[pairs[index] for index in members] for members in bins]


def _write_row(
  arrays: dict[str, np.ndarray], row: int, pairs: Sequence[types.Pair]
) -> None:
  """Writes the pairs of one row into the arrays."""
  start = 0
  for k, pair in enumerate(pairs):
    arrays['margins'][row, k] = pair.margin
    for a, sample in enumerate(_answers(pair)):
      if sample is None:
        continue
      place = (row, slice(start, start + len(sample)))
      arrays['ids'][place] = sample.ids
      arrays['mask'][place] = sample.mask
      arrays['segment_ids'][place] = 2 * k + a + 1
      arrays['positions'][place] = np.arange(len(sample))
      arrays['present'][row, k, a] = True
      arrays['ref_logprobs'][row, k, a] = pair.ref_logprobs[a]
      start += len(sample)
