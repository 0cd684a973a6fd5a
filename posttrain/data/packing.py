"""Packing of samples into a batch of fixed shape.

1. The tokens of all samples are joined; a sample that is too long is refused.
2. Samples without a member token (weight != 0) are dropped.
3. First-fit-decreasing by length: the longest first (ties in order of
   arrival), each into the first row with enough free tokens. There are at most
   `micro_batches * rows` rows; samples that fit into none are returned.
4. `Widths` chooses the rows' length where they fit the samples.
5. Row r is `[r // rows, r % rows]` of the batch, so that rows with tokens come
   first. They are not evened out: every such micro-batch costs the same,
   because its shape is fixed.

Axes: T tokens of a sample, or of a row (`row_tokens`); M micro-batches, B
rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from posttrain import types

# Values of padding; others 0.
_PADS = {'temperatures': 1, 'versions': -1, 'env_ids': -1}
# The weights of the tokens that need a stream; others may be None.
_READERS = {'advantages': 'rl_weights', 'ref_logprobs': 'ref_kl_weights'}
_PLACES = ('segment_ids', 'positions', 'env_ids')
_FIELDS = (*types.TOKEN_FIELDS, 'roles', 'is_content')


def pack(
  samples: Sequence[types.Sample],
  *,
  row_tokens: int,
  rows: int,
  micro_batches: int,
  envs: tuple[str, ...],
  pad_id: int = 0,
  longest: int | None = None,
  widths: 'Widths | None' = None,
) -> tuple[types.Batch, list[types.Sample]]:
  """Packs samples into `[micro_batches, rows, row_tokens]`.

  `rl_weights` are multiplied by the mask, so that from here on membership
  is `weight != 0` for every component. The counts cover the packed samples.
  No samples give a batch of padding with `num_micro_batches` = 0.

  Args:
    samples: samples with their streams.
    row_tokens: T of a row.
    rows: B.
    micro_batches: M.
    envs: names of the stage's environments; `env_ids` are indices into it.
    pad_id: token id of the padding after a row's last sample. Its segment is
      0, so that nothing attends to it and no loss reads it.
    longest: the most tokens of a sample, `batch.row_tokens`; None = T.
    widths: chooses T for the samples; None = `row_tokens`.

  Returns:
    The batch, and the samples that fit into no row, in order of arrival.

  Raises:
    ValueError: a sample is empty or longer than `longest`.
  """
  longest = longest or row_tokens
  for sample in samples:
    if not 0 < len(sample) <= longest:
      raise ValueError(
        f'sample of env {sample.env!r}, row {sample.row!r}: length must be in '
        f'[1, {longest}], batch.row_tokens: got {len(sample)}; raise it, or '
        'drop or truncate the row'
      )
  # The tokens of all samples as one sequence of N: samples are many and short,
  # and numpy's cost is per call.
  sizes = np.array([len(sample) for sample in samples], np.int64)
  owner = np.repeat(np.arange(len(samples)), sizes)  # index of the sample
  position = np.arange(len(owner)) - (np.cumsum(sizes) - sizes)[owner]
  none = np.zeros(max(sizes, default=0), np.float32)
  fields = {}  # 0 where a sample has no advantages or ref_logprobs
  for name in _FIELDS:
    parts = [none[:0]] if not samples else []
    for sample, length in zip(samples, sizes, strict=True):
      value = getattr(sample, name)
      if value is None:
        assert not getattr(sample, _READERS[name]).any(), f'{name}: no stream'
        value = none[:length]
      assert np.shape(value) == (length,), f'{name} must be aligned'
      parts.append(value)
    fields[name] = np.concatenate(parts)
  fields['rl_weights'] = fields['rl_weights'] * fields['mask']
  weights = {name: fields[f'{name}_weights'] for name in types.COMPONENTS}

  def owners(tokens):
    """Returns whether each sample has one of the tokens, bool[samples]."""
    return np.bincount(owner[tokens], minlength=len(samples)) > 0

  for name, values in fields.items():
    assert np.isfinite(values).all(), f'{name} must be finite'
  for name, values in weights.items():
    assert not values[position == 0].any(), f'{name}: nothing predicts token 0'
  # Per token: in a rollout sampled at another temperature, the observations,
  # say, may be ce members where their own temperature is 1.
  assert (fields['temperatures'][weights['ce'] != 0] == 1).all(), (
    'ce is at T = 1'
  )

  member = np.any([values != 0 for values in weights.values()], axis=0)
  kept = np.flatnonzero(owners(member)).tolist()
  lengths = [len(samples[index]) for index in kept]
  row_tokens = widths(lengths) if widths else row_tokens
  bins, left = first_fit(lengths, row_tokens, rows * micro_batches)
  # The place of each packed sample's first token, and its number in the row.
  first, segment = np.full(len(samples), -1), np.zeros(len(samples), np.int32)
  for row, members in enumerate(bins):
    place = row * row_tokens
    for number, index in enumerate(members, 1):
      first[kept[index]], segment[kept[index]] = place, number
      place += len(samples[kept[index]])
  packed = first[owner] >= 0
  places = (first[owner] + position)[packed]
  env_ids = np.array([envs.index(sample.env) for sample in samples], np.int32)
  fields |= {
    'segment_ids': segment[owner],
    'positions': position,
    'env_ids': env_ids[owner],
  }
  dtypes = {**types.TOKEN_FIELDS, **dict.fromkeys(_PLACES, np.int32)}
  arrays = {}
  for name, dtype in dtypes.items():
    pad = pad_id if name == 'ids' else _PADS.get(name, 0)
    arrays[name] = np.full(micro_batches * rows * row_tokens, pad, dtype)
    arrays[name][places] = fields[name][packed]
  shape = micro_batches, rows, row_tokens
  batch = types.Batch(
    **{name: array.reshape(shape) for name, array in arrays.items()},
    **{
      f'{name}_count': np.asarray(
        np.count_nonzero(arrays[f'{name}_weights']), np.float32
      )
      for name in types.COMPONENTS
    },
    rl_sequences=np.asarray(
      owners(packed & (weights['rl'] != 0)).sum(), np.float32
    ),
    num_micro_batches=np.asarray(-(-len(bins) // rows), np.int32),
  )
  return batch, [samples[kept[index]] for index in left]


def first_fit(
  lengths: Sequence[int],
  bin_size: int,
  max_bins: int,
  per_bin: int | None = None,
) -> tuple[list[list[int]], list[int]]:
  """Packs items into bins, first-fit-decreasing.

  Args:
    lengths: the items' lengths.
    bin_size: the most length in a bin.
    max_bins: the most bins.
    per_bin: the most items in a bin; None = any number.

  Returns:
    The indices in each bin, and the indices that fit into no bin, ascending.
  """
  bins, used, left = [], [], []
  for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    length = lengths[index]
    fit = next(
      (
        b
        for b, taken in enumerate(used)
        if taken + length <= bin_size and len(bins[b]) != per_bin
      ),
      len(bins),
    )
    if fit == max_bins:
      left.append(index)
      continue
    if fit == len(bins):
      bins.append([])
      used.append(0)
    bins[fit].append(index)
    used[fit] += length
  return bins, sorted(left)


# Positions that are computed in vain before another width is compiled, which
# takes a CPU about as long.
_COMPILED = 768
_SPARE = 1.15  # positions per position of the best width that are not in vain


class Widths:
  """Lengths of rows that fit the samples of a stage's steps.

  Another length is another program, so the first step chooses one with some
  spare tokens, and later ones keep it: a step that needs more takes further
  micro-batches. Once `_COMPILED` positions were computed in vain, a further
  length is added. Depends on the samples and the state alone.
  """

  def __init__(self, rows: int, most: int, fit: bool | None = True):
    """Starts without a length.

    Args:
      rows: B.
      most: the largest length.
      fit: whether the length is chosen; else it is the largest.
    """
    self._rows, self._most, self._fit = rows, most, fit
    self._known: list[int] = []
    self._in_vain = 0.0

  def __call__(self, lengths: Sequence[int]) -> int:
    """Returns T for samples of these lengths, each of which fits into it."""
    if not self._fit:
      return self._most

    def cost(width: int) -> int:
      return self._rows * width * _micro_batches(lengths, self._rows, width)

    best = fitted(lengths, self._rows, self._most)
    fitting = [x for x in self._known if x >= max(lengths, default=0)]
    if fitting:
      width = min(fitting, key=cost)
      self._in_vain += max(cost(width) - _SPARE * cost(best), 0.0)
      if self._in_vain < _COMPILED:
        return width
    self._in_vain = 0.0
    self._known.append(next(_ladder(best + 1, self._most, 16)))
    return self._known[-1]

  def get_state(self) -> list[float]:
    """Returns JSON-able state that, with the samples, determines T."""
    return [self._in_vain, *self._known]

  def set_state(self, state: Sequence[Any]) -> None:
    """Continues from a state of `get_state`."""
    self._in_vain, *self._known = state


def fitted(
  lengths: Sequence[int], rows: int, most: int, parts: int = 16
) -> int:
  """Returns the least T that needs no more micro-batches than the largest.

  Args:
    lengths: the samples' lengths.
    rows: B.
    most: the largest T.
    parts: lengths of rows between a power of two and the next.
  """
  least = max(_micro_batches(lengths, rows, most), 1)
  needed = max(max(lengths, default=1), sum(lengths) // (least * rows))
  return next(
    width
    for width in _ladder(needed, most, parts)
    if _micro_batches(lengths, rows, width) <= least
  )


def _ladder(first: int, most: int, parts: int) -> Iterator[int]:
  """Yields rounded lengths of rows from `first` on; the last one is `most`."""
  width = 0
  while width < most:
    width += max(16, 2 ** max(width.bit_length() - 1, 0) // parts)
    if width >= min(first, most):
      yield min(width, most)


def _micro_batches(lengths: Sequence[int], rows: int, width: int) -> int:
  bins, _ = first_fit(lengths, width, len(lengths))
  return -(-len(bins) // rows)
