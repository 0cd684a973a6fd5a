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

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain import types

_PADS = {
  'temperatures': 1,
  'versions': -1,
  'env_ids': -1,
}  # others 0; ids: pad_id
_WEIGHTS = {name: f'{name}_weights' for name in types.COMPONENTS}
_FIELDS = (*types.TOKEN_FIELDS, 'roles', 'is_content')


@dataclasses.dataclass(frozen=True)
class _Tokens:
  """The tokens of all samples as one sequence of N.

  Samples are many and short: numpy's cost is per call.

  Attributes:
    samples: the samples.
    sample: i64[N], index of each token's sample.
    position: i64[N], index of each token in its sample.
    fields: name -> [N]; 0 where a sample lacks the field.
  """

  samples: Sequence[types.Sample]
  sample: np.ndarray
  position: np.ndarray
  fields: dict[str, np.ndarray]

  def weights(self, component: str) -> np.ndarray:
    """Returns a component's weights, f32[N]; rl's only on the completion."""
    weights = self.fields[_WEIGHTS[component]]
    return weights * self.fields['mask'] if component == 'rl' else weights

  def of_samples(self, tokens: np.ndarray) -> np.ndarray:
    """Returns whether each sample has one of the tokens, bool[samples]."""
    return np.bincount(self.sample[tokens], minlength=len(self.samples)) > 0


def pack(
  samples: Sequence[types.Sample],
  *,
  row_tokens: int,
  rows: int,
  micro_batches: int,
  envs: tuple[str, ...],
  pad_id: int = 0,
  longest: int | None = None,
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
    longest: the most tokens of a sample, `batch.row_tokens`; None = T.

  Returns:
    The batch, and the samples that fit into no row, in order of arrival.

  Raises:
    ValueError: see `check`.
  """
  tokens = check(samples, longest=longest or row_tokens, envs=envs)
  member = np.any([tokens.weights(name) for name in types.COMPONENTS], axis=0)
  kept = np.flatnonzero(tokens.of_samples(member)).tolist()
  bins, left = first_fit(
    [len(samples[index]) for index in kept], row_tokens, rows * micro_batches
  )
  batch = _batch(
    tokens,
    [[kept[index] for index in row] for row in bins],
    (micro_batches, rows, row_tokens),
    envs,
    pad_id,
  )
  return batch, [samples[kept[index]] for index in left]


def check(
  samples: Sequence[types.Sample], *, longest: int, envs: tuple[str, ...]
) -> _Tokens:
  """Refuses samples whose streams contradict each other; joins the others.

  Raises:
    ValueError: the environment is unknown; the sample is empty or longer
      than `longest`; fields differ in length; a weight is missing or not 0 at
      token 0, which nothing predicts; an rl member has no advantage, or a
      ref_kl member no reference logprob; a number is not finite or a
      temperature not positive; a ce member has a temperature other than 1.
  """
  for sample in samples:
    if sample.env not in envs:
      _refuse(sample, 'env', f'be one of {envs}', sample.env)
    if not 0 < len(sample) <= longest:
      must = (
        f'be in [1, {longest}], batch.row_tokens; raise it, or drop or '
        'truncate the row'
      )
      _refuse(sample, 'length', must, len(sample))
    for name in _FIELDS:
      value = getattr(sample, name)
      if value is None and name not in ('advantages', 'ref_logprobs'):
        _refuse(sample, name, 'be given by streams.finalize', None)
      if value is not None and np.shape(value) != (len(sample),):
        must = f'have one entry per token, {(len(sample),)}'
        _refuse(sample, name, must, np.shape(value))
  tokens = _join(samples)

  def check_tokens(name: str, bad: np.ndarray, must: str) -> None:
    if bad.any():
      index = int(np.argmax(bad))
      got = f'{tokens.fields[name][index]} at token {tokens.position[index]}'
      _refuse(samples[tokens.sample[index]], name, must, got)

  for name in _FIELDS:
    check_tokens(name, ~np.isfinite(tokens.fields[name]), 'be finite')
  for component, name in _WEIGHTS.items():
    bad = (tokens.position == 0) & (tokens.weights(component) != 0)
    check_tokens(name, bad, 'be 0 at token 0, which nothing predicts')
  temperatures = tokens.fields['temperatures']
  check_tokens('temperatures', temperatures <= 0, 'be > 0')
  # Per token: in a rollout sampled at another temperature, the observations,
  # say, may be ce members where their own temperature is 1.
  check_tokens(
    'temperatures',
    (tokens.weights('ce') != 0) & (temperatures != 1),
    'be 1 where ce_weights is not 0',
  )
  for name, reader in ('advantages', 'rl'), ('ref_logprobs', 'ref_kl'):
    read = tokens.of_samples(tokens.weights(reader) != 0)
    for index in np.flatnonzero(read).tolist():
      if getattr(samples[index], name) is None:
        must = f'be given by streams.finalize where {reader} has member tokens'
        _refuse(samples[index], name, must, None)
  return tokens


def _refuse(sample: types.Sample, name: str, must: str, got: Any) -> None:
  raise ValueError(
    f'sample of env {sample.env!r}, row {sample.row!r}: {name} must {must}: '
    f'got {got!s:.200}'
  )


def _join(samples: Sequence[types.Sample]) -> _Tokens:
  lengths = np.array([len(sample) for sample in samples], np.int64)
  starts = np.cumsum(lengths) - lengths
  index = np.repeat(np.arange(len(samples)), lengths)
  none = np.zeros(max(lengths, default=0), np.float32)
  fields = {}
  for name in _FIELDS:
    values = (getattr(sample, name) for sample in samples)
    arrays = [
      none[:length] if value is None else value
      for value, length in zip(values, lengths, strict=True)
    ]
    fields[name] = np.concatenate(arrays or [none])
  return _Tokens(samples, index, np.arange(len(index)) - starts[index], fields)


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
  tokens: _Tokens,
  rows: Sequence[Sequence[int]],
  shape: tuple[int, int, int],
  envs: tuple[str, ...],
  pad_id: int,
) -> types.Batch:
  """Returns a batch of shape [M, B, T] with the samples of each row."""
  micro_batches, per_micro_batch, row_tokens = shape
  size = len(tokens.samples)
  first, segment = np.full(size, -1), np.zeros(size, np.int32)
  for row, members in enumerate(rows):
    place = row * row_tokens
    for number, index in enumerate(members, 1):
      first[index], segment[index] = place, number
      place += len(tokens.samples[index])
  packed = first[tokens.sample] >= 0
  index, position = tokens.sample[packed], tokens.position[packed]
  env_ids = np.array([envs.index(x.env) for x in tokens.samples], np.int32)
  values = {name: tokens.fields[name][packed] for name in types.TOKEN_FIELDS}
  values |= {
    'rl_weights': tokens.weights('rl')[packed],
    'segment_ids': segment[index],
    'positions': position,
    'env_ids': env_ids[index],
  }
  arrays = _padding(micro_batches * per_micro_batch * row_tokens, pad_id)
  for name, array in arrays.items():
    array[first[index] + position] = values[name]
  counts = {
    f'{component}_count': np.asarray(
      np.count_nonzero(arrays[weights]), np.float32
    )
    for component, weights in _WEIGHTS.items()
  }
  sequences = tokens.of_samples(packed & (tokens.weights('rl') != 0)).sum()
  live = -(-len(rows) // per_micro_batch)
  return types.Batch(
    **{field: array.reshape(shape) for field, array in arrays.items()},
    **counts,
    rl_sequences=np.asarray(sequences, np.float32),
    num_micro_batches=np.asarray(live, np.int32),
  )


def _padding(size: int, pad_id: int) -> dict[str, np.ndarray]:
  """Returns `size` tokens of padding for every field of a batch."""
  arrays = {
    field: np.full(size, _PADS.get(field, 0), dtype)
    for field, dtype in types.TOKEN_FIELDS.items()
  }
  for field in ('segment_ids', 'positions', 'env_ids'):
    arrays[field] = np.full(size, _PADS.get(field, 0), np.int32)
  arrays['ids'][:] = pad_id
  return arrays
