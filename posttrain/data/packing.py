"""Packing of samples into a batch of fixed shape.

1. `check` refuses a sample whose streams contradict each other, by name.
2. Samples without a member token (weight != 0) are dropped.
3. First-fit-decreasing by length: the longest first (ties in order of
   arrival), each into the first row with enough free tokens. There are at most
   `micro_batches * rows` rows; samples that fit into none are returned.
4. Row r is `[r // rows, r % rows]` of the batch, so that rows with tokens come
   first. They are not evened out: every such micro-batch costs the same,
   because its shape is fixed.

Axes: T tokens of a sample, or of a row (`row_tokens`); M micro-batches, B
rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain import types
from posttrain.util import foreign

_PADS = {
  'temperatures': 1,
  'versions': -1,
  'env_ids': -1,
}  # others 0; ids: pad_id
_WEIGHTS = {name: f'{name}_weights' for name in types.COMPONENTS}


def pack(
  samples: Sequence[types.Sample],
  *,
  row_tokens: int,
  rows: int,
  micro_batches: int,
  envs: tuple[str, ...],
  pad_id: int = 0,
) -> tuple[types.Batch, list[types.Sample]]:
  """Packs samples into `[micro_batches, rows, row_tokens]`.

  `rl_weights` are multiplied by the mask, so that from here on membership
  is `weight != 0` for every component. The counts cover the packed samples;
  leftovers count in the batch that takes them. No samples give a batch of
  padding with `num_micro_batches` = 0.

  Args:
    samples: samples with their streams.
    row_tokens: T of a row.
    rows: B.
    micro_batches: M.
    envs: names of the stage's environments; `env_ids` are indices into it.
    pad_id: token id of the padding after a row's last sample. Its segment is
      0, so that nothing attends to it and no loss reads it.

  Returns:
    The batch, and the samples that fit into no row, in order of arrival.

  Raises:
    ValueError: see `check`.
  """
  for sample in samples:
    check(sample, row_tokens=row_tokens, envs=envs)
  kept = [
    sample
    for sample in samples
    if any(_weights(sample, component).any() for component in types.COMPONENTS)
  ]
  bins, left = first_fit(
    [len(sample) for sample in kept], row_tokens, rows * micro_batches
  )
  members = [[kept[index] for index in row] for row in bins]
  batch = _batch(members, (micro_batches, rows, row_tokens), envs, pad_id)
  return batch, [kept[index] for index in left]


def check(
  sample: types.Sample, *, row_tokens: int, envs: tuple[str, ...]
) -> None:
  """Refuses a sample whose streams contradict each other.

  Raises:
    ValueError: the environment is unknown; the sample is empty or longer
      than a row; fields differ in length; a weight is missing or not 0 at
      token 0, which nothing predicts; an rl member has no advantage, or a
      ref_kl member no reference logprob; a number is not finite or a
      temperature not positive; a ce member has a temperature other than 1.
  """
  name = f'sample of env {sample.env!r}, row {sample.row!r}:'
  _require(
    sample.env in envs,
    name,
    'env',
    'be an environment of the stage',
    sample.env,
    expected=envs,
  )
  _require(
    0 < len(sample) <= row_tokens,
    name,
    'length',
    'be in [1, batch.row_tokens]',
    len(sample),
    expected=row_tokens,
    hint='raise batch.row_tokens, or drop or truncate the row',
  )
  fields = (*types.TOKEN_FIELDS, 'roles', 'is_content')
  present = [field for field in fields if getattr(sample, field) is not None]
  for field in present:
    _check_values(sample, field, name)
  for field in set(fields) - set(present):
    _check_absent(sample, field, name)
  _check_temperatures(sample, name)
  _check_first_weights(sample, name)


def _check_values(sample: types.Sample, field: str, name: str) -> None:
  """Checks that a field has one finite value per token."""
  value = getattr(sample, field)
  _require(
    np.shape(value) == (len(sample),),
    name,
    field,
    'have one entry per token',
    np.shape(value),
    expected=(len(sample),),
  )
  finite = bool(np.isfinite(value).all())
  _require(
    finite, name, field, 'be finite', None if finite else _first_bad(value)
  )


def _check_first_weights(sample: types.Sample, name: str) -> None:
  """Checks that token 0, which nothing predicts, has no weight."""
  for component, field in _WEIGHTS.items():
    first = _weights(sample, component)[0]
    _require(
      first == 0,
      name,
      f'{field}[0]',
      'be 0 (nothing predicts token 0)',
      float(first),
    )


def _check_temperatures(sample: types.Sample, name: str) -> None:
  """Checks that all are positive, and 1 for ce members.

  The check is per token: in a rollout sampled at another temperature, the
  observations, say, may be ce members where their own temperature is 1. A token
  that is also a member of another component has one temperature for both, and
  is refused like the rest.
  """
  temperatures = sample.temperatures
  _require(
    (temperatures > 0).all(),
    name,
    'temperatures',
    'be > 0',
    float(temperatures.min()),
  )
  bad = (_weights(sample, 'ce') != 0) & (temperatures != 1)
  index = int(np.argmax(bad))
  _require(
    not bad.any(),
    name,
    'temperatures',
    'be 1 where ce_weights is not 0',
    f'{temperatures[index]} at token {index}',
    expected=1,
    hint='ce is a loss at temperature 1; set its weight there to 0, or '
    'the temperature to 1',
  )


def _check_absent(sample: types.Sample, field: str, name: str) -> None:
  """Refuses an absent stream that a member token reads."""
  reader = {'advantages': 'rl', 'ref_logprobs': 'ref_kl'}.get(field)
  _require(
    reader is not None and not _weights(sample, reader).any(),
    name,
    field,
    f'be given where {reader} has member tokens' if reader else 'be given',
    None,
    hint='streams.finalize sets them',
  )


def _require(
  ok: bool,
  name: str,
  field: str,
  must: str,
  got: Any,
  *,
  expected: Any = None,
  hint: str = '',
) -> None:
  if not ok:
    raise ValueError(
      f'{name} {field} must {must}: got {foreign.quote(got)}'
      + ('' if expected is None else f', expected {expected!r}')
      + (f'; {hint}' if hint else '')
    )


def _first_bad(value: np.ndarray) -> str:
  index = int(np.argmin(np.isfinite(value)))
  return f'{value[index]} at token {index}'


def _weights(sample: types.Sample, component: str) -> np.ndarray:
  """Returns a component's weights: f32[T]; rl's only on the completion."""
  weights = getattr(sample, _WEIGHTS[component])
  if weights is None:
    return np.zeros(len(sample), np.float32)  # refused by `check`
  return np.where(sample.mask, weights, 0) if component == 'rl' else weights


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


def _batch(
  samples_by_row: Sequence[Sequence[types.Sample]],
  shape: tuple[int, int, int],
  envs: tuple[str, ...],
  pad_id: int,
) -> types.Batch:
  """Returns a batch of shape [M, B, T] with the samples of each row."""
  micro_batches, rows, row_tokens = shape
  arrays = _padding((micro_batches * rows, row_tokens), pad_id)
  for row, members in enumerate(samples_by_row):
    start = 0
    for segment, sample in enumerate(members, 1):
      place = (row, slice(start, start + len(sample)))
      _write_sample(arrays, place, sample, segment, envs)
      start = place[1].stop
  counts = {
    f'{component}_count': np.asarray(
      np.count_nonzero(arrays[weights]), np.float32
    )
    for component, weights in _WEIGHTS.items()
  }
  sequences = sum(
    bool(_weights(sample, 'rl').any())
    for row in samples_by_row
    for sample in row
  )
  return types.Batch(
    **{field: array.reshape(shape) for field, array in arrays.items()},
    **counts,
    rl_sequences=np.asarray(sequences, np.float32),
    num_micro_batches=np.asarray(-(-len(samples_by_row) // rows), np.int32),
  )


def _padding(shape: tuple[int, int], pad_id: int) -> dict[str, np.ndarray]:
  """Returns padding for every per-token field of a batch."""
  arrays = {
    field: np.full(shape, _PADS.get(field, 0), dtype)
    for field, dtype in types.TOKEN_FIELDS.items()
  }
  for field in ('segment_ids', 'positions', 'env_ids'):
    arrays[field] = np.full(shape, _PADS.get(field, 0), np.int32)
  arrays['ids'][:] = pad_id
  return arrays


def _write_sample(
  arrays: dict[str, np.ndarray],
  place: tuple,
  sample: types.Sample,
  segment: int,
  envs: tuple[str, ...],
) -> None:
  """Writes a sample into the arrays at place = (row, slice of tokens)."""
  for field in types.TOKEN_FIELDS:
    value = getattr(sample, field)
    arrays[field][place] = 0 if value is None else value
  arrays['rl_weights'][place] = _weights(sample, 'rl')
  arrays['segment_ids'][place] = segment
  arrays['positions'][place] = np.arange(len(sample))
  arrays['env_ids'][place] = envs.index(sample.env)
