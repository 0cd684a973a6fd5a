"""The arrays that prefill takes. Numpy only.

Slots and rows are split over devices in equal ranges; an array names them by
their index in the range.

Axes: B slots, R rows, C tokens of a prefill chunk.
"""

import numpy as np

from posttrain.decode import schedule

Rows = list[list[schedule.Group]]  # the groups of each device, a row for each


def chunk(
  rows: Rows, count: int, width: int, slots: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Returns the next tokens of each group, and their places.

  Args:
    rows: the groups, at most `count` per device.
    count: rows per device.
    width: C.
    slots: slots per device.

  Returns:
    (tokens i32[R, C], start i32[R], count i32[R], slot i32[R]): the tokens,
    right-padded; the first one's position; their number; and their slot.
  """
  size = count * len(rows)
  tokens = np.zeros((size, width), np.int32)
  start, number, slot = np.zeros((3, size), np.int32)
  for device, groups in enumerate(rows):
    for row, group in enumerate(groups, device * count):
      new = group.head.feed[group.fed : group.fed + width]
      tokens[row, : len(new)] = new
      start[row], number[row] = group.position, len(new)
      slot[row] = _slot(group.head) % slots
  return tokens, start, number, slot


def copies(groups: Rows, slots: int) -> tuple[np.ndarray, np.ndarray, int]:
  """Returns the slots that groups' prompts are copied to.

  Args:
    groups: the groups of each device.
    slots: slots per device.

  Returns:
    (target i32[B], source i32[B], length): per device the slots to fill, then
    `slots` for none; the slots with their prompts; and the tokens of the
    longest of these.
  """
  length, target = 0, np.full((len(groups), slots), slots, np.int32)
  source = np.zeros((len(groups), slots), np.int32)
  for device, its_groups in enumerate(groups):
    pairs = [(x, g.head) for g in its_groups for x in g.entries[1:]]
    for i, (entry, head) in enumerate(pairs):
      target[device, i] = _slot(entry) % slots
      source[device, i] = _slot(head) % slots
      length = max(length, head.prompt_end)
  return target.reshape(-1), source.reshape(-1), length


def drawing(
  rows: Rows, finished: Rows, slots: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the rows whose logits slots draw their next token from.

  Args:
    rows: the groups of each device, a row for each.
    finished: those of them whose prompt is in the cache.
    slots: slots per device.

  Returns:
    (row i32[B], length i32[B]): the row, -1 = none; and the tokens in the
    slot's cache.
  """
  row = np.full(slots * len(rows), -1, np.int32)
  length = np.zeros_like(row)
  for groups, done in zip(rows, finished, strict=True):
    for i, group in enumerate(groups):
      for entry in group.entries if group in done else ():
        row[_slot(entry)], length[_slot(entry)] = i, entry.prompt_end
  return row, length


def _slot(entry: schedule.RequestState) -> int:
  assert entry.slot is not None
  return entry.slot
