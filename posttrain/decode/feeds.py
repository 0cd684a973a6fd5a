"""Prompts and slots as the arrays that prefill and admission take. Numpy only.

Axes: B slots, R scratch rows, T tokens of the longest prompt.
"""

import numpy as np

from posttrain.decode import schedule


def lay(
  entries: list[list[schedule.Seat]], rows: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Lays out what goes into so many scratch rows, an entry in each.

  Returns:
    (tokens i32[R, T], start i32[R], count i32[R], slot i32[R]): the tokens,
    right-padded, T a multiple of `width`; the first one's position; how many;
    and the slot that holds what comes before.
  """
  heads = [entry[0] for entry in entries]
  chunks = -(-max(len(seat.feed) for seat in heads) // width)
  tokens = np.zeros((rows, chunks * width), np.int32)
  start, count, slot = np.zeros((3, rows), np.int32)
  for row, seat in enumerate(heads):
    tokens[row, : len(seat.feed)] = seat.feed
    start[row], count[row], slot[row] = seat.start, len(seat.feed), seat.slot
  return tokens, start, count, slot


def places(
  entries: list[list[schedule.Seat]], slots: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Says which scratch row goes where, for each of so many slots.

  Returns:
    (slot i32[B], row i32[B], length i32[B]): a slot to fill, B = none; the row
    that goes into it; and the tokens that this row then holds.
  """
  slot = np.full(slots, slots, np.int32)
  row, length = np.zeros((2, slots), np.int32)
  filled = [(r, seat) for r, entry in enumerate(entries) for seat in entry]
  for i, (r, seat) in enumerate(filled):
    slot[i], row[i], length[i] = seat.slot, r, seat.prompt_end
  return slot, row, length
