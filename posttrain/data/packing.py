"""Samples -> a batch of fixed shape.

1. `check` refuses a sample whose streams contradict each other, by name.
2. Samples without a member token (weight != 0) are dropped.
3. First-fit-decreasing by length: the longest first (ties in order of
   arrival), each into the first row that has room. Rows fill up to
   `micro_batches * rows`; what fits nowhere is handed back.
4. Rows are laid out in order: row r is `[r // rows, r % rows]`, so those
   with tokens come first. They are not evened out: every such micro-batch
   costs the same, because its shape is fixed.

Axes: T tokens of a sample, or of a row (`row_tokens`); M micro-batches, B
rows.
"""

from collections.abc import Sequence

import numpy as np

from posttrain import types

_PADS = {'temperatures': 1, 'versions': -1, 'env_ids': -1}  # else 0, but ids
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
  is `weight != 0` for every component. The counts are those of the packed
  samples; leftovers are counted by the batch that takes them. No samples
  give a batch of padding with `num_micro_batches` = 0.

  Args:
    samples: with their streams stamped on.
    row_tokens: T of a row.
    rows: B.
    micro_batches: M.
    envs: names of the stage's environments; `env_ids` are indices into it.
    pad_id: what fills `ids` behind a row's last sample. Nothing attends to
      it and nothing is scored on it: segment 0 says what is padding.

  Returns:
    The batch, and the samples that found no room, in order of arrival.

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
  placed, left = first_fit(
    [len(sample) for sample in kept], row_tokens, rows * micro_batches
  )
  members = [[kept[index] for index in row] for row in placed]
  batch = _batch(members, (micro_batches, rows, row_tokens), envs, pad_id)
  return batch, [kept[index] for index in left]


def check(
  sample: types.Sample, *, row_tokens: int, envs: tuple[str, ...]
) -> None:
  """Refuses a sample that cannot train as it says.

  Raises:
    ValueError: the environment is unknown; the sample is empty or longer
      than a row; fields differ in length; a weight is missing or stands on
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
  for field in set(fields) - set(present):
    _check_absent(sample, field, name)
  _check_temperatures(sample, name)
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
  """All are positive; those of ce members are 1, since ce is always at 1.

  Per token: a rollout sampled at another temperature may have ce members,
  say its observations, where their own temperature is 1. A token that is
  also a member of another component has one temperature for both, so that
  it is refused with the rest.
  """
  temperatures = sample.temperatures
  _require(
    (temperatures > 0).all(),
    name,
    'temperatures',
    'be > 0',
    float(temperatures.min()),
  )
  hot = (_weights(sample, 'ce') != 0) & (temperatures != 1)
  at = int(np.argmax(hot))
  _require(
    not hot.any(),
    name,
    'temperatures',
    'be 1 where ce_weights is not 0',
    f'{temperatures[at]} at token {at}',
    expected=1,
    hint='ce is a loss at temperature 1; set its weight there to 0, or '
    'the temperature to 1',
  )


def _check_absent(sample: types.Sample, field: str, name: str) -> None:
  """Streams may be absent only where no member token reads them."""
  reader = {'advantages': 'rl', 'ref_logprobs': 'ref_kl'}.get(field)
  _require(
    reader is not None and not _weights(sample, reader).any(),
    name,
    field,
    f'be given where {reader} has member tokens' if reader else 'be given',
    None,
    hint='streams.finalize stamps them on',
  )


def _require(
  ok: bool,
  name: str,
  field: str,
  must: str,
  got,
  *,
  expected=None,
  hint: str = '',
) -> None:
  if not ok:
    raise ValueError(
      f'{name} {field} must {must}: got {got!r}'
      + ('' if expected is None else f', expected {expected!r}')
      + (f'; {hint}' if hint else '')
    )


def _first_bad(value: np.ndarray) -> str:
  at = int(np.argmin(np.isfinite(value)))
  return f'{value[at]} at token {at}'


def _weights(sample: types.Sample, component: str) -> np.ndarray:
  """Returns a component's weights: f32[T]; rl's only on the completion."""
  weights = getattr(sample, _WEIGHTS[component])
  if weights is None:
    return np.zeros(len(sample), np.float32)  # refused by `check`
  return np.where(sample.mask, weights, 0) if component == 'rl' else weights


def first_fit(
  lengths: Sequence[int], room: int, limit: int, per_bin: int | None = None
) -> tuple[list[list[int]], list[int]]:
  """First-fit-decreasing: (indices per bin, indices that found no bin).

  Args:
    lengths: of the items.
    room: of a bin.
    limit: bins there may be.
    per_bin: items a bin may hold; None = any number.
  """
  bins, used, left = [], [], []
  for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    length = lengths[index]
    fit = next(
      (
        b
        for b, taken in enumerate(used)
        if taken + length <= room and len(bins[b]) != per_bin
      ),
      len(bins),
    )
    if fit == limit:
      left.append(index)
      continue
    if fit == len(bins):
      bins.append([])
      used.append(0)
    bins[fit].append(index)
    used[fit] += length
  return bins, sorted(left)


def _batch(
  placed: Sequence[Sequence[types.Sample]],
  shape: tuple[int, int, int],
  envs: tuple[str, ...],
  pad_id: int,
) -> types.Batch:
  """Lays samples, given per row, into a batch of a shape [M, B, T]."""
  micro_batches, rows, row_tokens = shape
  arrays = _blank((micro_batches * rows, row_tokens), pad_id)
  for row, members in enumerate(placed):
    start = 0
    for segment, sample in enumerate(members, 1):
      place = (row, slice(start, start + len(sample)))
      _lay(arrays, place, sample, segment, envs)
      start = place[1].stop
  counts = {
    f'{component}_count': np.asarray(
      np.count_nonzero(arrays[weights]), np.float32
    )
    for component, weights in _WEIGHTS.items()
  }
  sequences = sum(
    bool(_weights(sample, 'rl').any()) for row in placed for sample in row
  )
  return types.Batch(
    **{field: array.reshape(shape) for field, array in arrays.items()},
    **counts,
    rl_sequences=np.asarray(sequences, np.float32),
    num_micro_batches=np.asarray(-(-len(placed) // rows), np.int32),
  )


def _blank(shape: tuple[int, int], pad_id: int) -> dict[str, np.ndarray]:
  """Returns padding for every per-token field of a batch."""
  arrays = {
    field: np.full(shape, _PADS.get(field, 0), dtype)
    for field, dtype in types.TOKEN_FIELDS.items()
  }
  for field in ('segment_ids', 'positions', 'env_ids'):
    arrays[field] = np.full(shape, _PADS.get(field, 0), np.int32)
  arrays['ids'][:] = pad_id
  return arrays


def _lay(
  arrays: dict[str, np.ndarray],
  place: tuple,
  sample: types.Sample,
  segment: int,
  envs: tuple[str, ...],
) -> None:
  """Writes one sample into its place (row, slice of tokens)."""
  for field in types.TOKEN_FIELDS:
    value = getattr(sample, field)
    arrays[field][place] = 0 if value is None else value
  arrays['rl_weights'][place] = _weights(sample, 'rl')
  arrays['segment_ids'][place] = segment
  arrays['positions'][place] = np.arange(len(sample))
  arrays['env_ids'][place] = envs.index(sample.env)
