"""The arrays that prefill and admission take. Numpy only.

Axes: B slots, R scratch rows, T tokens of the longest prompt.
"""

import numpy as np

from posttrain.decode import schedule


def prompts(
  groups: list[list[schedule.RequestState]], rows: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Returns the tokens of scratch rows, one group of equal prompts per row.

  Args:
    groups: requests per row, at most `rows` lists.
    rows: R.
    width: tokens of a prefill chunk.

  Returns:
    (tokens i32[R, T], start i32[R], count i32[R], slot i32[R]): the tokens,
    right-padded, T a multiple of `width`; the first one's position; their
    number; and the slot with the tokens before them.
  """
  heads = [group[0] for group in groups]
  chunks = -(-max(len(entry.feed) for entry in heads) // width)
  tokens = np.zeros((rows, chunks * width), np.int32)
  start, count, slot = np.zeros((3, rows), np.int32)
  for row, entry in enumerate(heads):
    assert entry.slot is not None
    tokens[row, : len(entry.feed)] = entry.feed
    start[row], count[row], slot[row] = entry.start, len(entry.feed), entry.slot
  return tokens, start, count, slot


def targets(
  groups: list[list[schedule.RequestState]], slots: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the slots that scratch rows are copied into.

  Returns:
    (slot i32[B], row i32[B], length i32[B]): a slot to fill, B = none; the row
    that is copied into it; and the tokens that this row then holds.
  """
  slot = np.full(slots, slots, np.int32)
  row, length = np.zeros((2, slots), np.int32)
  entries = [(r, entry) for r, group in enumerate(groups) for entry in group]
  for i, (r, entry) in enumerate(entries):
    assert entry.slot is not None
    slot[i], row[i], length[i] = entry.slot, r, entry.prompt_end
  return slot, row, length
