"""Packing of samples into a batch of fixed shape.

1. The tokens of all samples are joined; a sample that is too long is refused.
2. Samples without a member token (weight != 0) are dropped.
3. With trees, samples that begin with the same tokens are neighbours, and those
   that share at least a quarter form a unit; otherwise each is a unit.
4. First-fit-decreasing by size: the largest unit first (ties in order of
   arrival), each into the first row with enough free tokens. There are at most
   `micro_batches * rows` rows; samples that fit into none are returned.
5. `Widths` chooses the rows' length where they fit the samples.
6. Row r is `[r // rows, r % rows]` of the batch, so that rows with tokens come
   first. They are not evened out: every such micro-batch costs the same,
   because its shape is fixed.

A row with trees holds prefix trees in depth-first order: a sample adds the
tokens that it does not share with the sample before it, and its path from the
root is the whole sample. Shared are the tokens that no loss reads: those before
the first one that is in the mask or has a weight, in both samples. Where the
losses are per token, tokens that train are shared as well if all their streams
are equal, as where a policy takes the same first steps in episodes of the same
reward; they count once for each sample that has them, see `Batch.copies`.

Axes: T tokens of a sample, or of a row (`row_tokens`); M micro-batches, B
rows.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from posttrain import types

# Values of padding; others 0.
_PADS = {'temperatures': 1, 'versions': -1, 'env_ids': -1, 'routes': -1}
# The weights of the tokens that need a stream; others may be None.
_READERS = {'advantages': 'rl_weights', 'ref_logprobs': 'ref_kl_weights'}
_PLACES = ('segment_ids', 'positions', 'env_ids')
_FIELDS = (*types.TOKEN_FIELDS, *types.VALUE_FIELDS, 'roles', 'is_content')
# What tokens that train must have in common to be shared, as 32 bits each; the
# first one differs most between samples that begin alike.
_STREAMS = {
  'advantages': np.float32,
  'mask': np.int32,
  'env_ids': np.int32,
  **{
    name: dtype
    for name, dtype in types.TOKEN_FIELDS.items()
    if name not in ('advantages', 'mask', 'ids')
  },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """How the batches of a stage are packed.

  Fields:
    rows: B.
    longest: the most tokens of a sample, `batch.row_tokens`.
    envs: names of the stage's environments; `env_ids` are indices into it.
    pad_id: token id of the padding after a row's last sample. Its segment is
      0, so that nothing attends to it and no loss reads it.
    trees: whether samples that begin with the same tokens share them, up to the
      first token that trains in either.
    trained: whether trees also share tokens that train, where all streams are
      equal.
    critic: whether batches have `types.VALUE_FIELDS`.
  """

  rows: int
  longest: int
  envs: tuple[str, ...]
  pad_id: int = 0
  trees: bool = False
  trained: bool = False
  critic: bool = False


def pack(
  samples: Sequence[types.Sample],
  layout: Layout,
  micro_batches: int,
  row_tokens: 'int | Widths',
) -> tuple[types.Batch, list[types.Sample]]:
  """Packs samples into `[micro_batches, rows, row_tokens]`.

  `rl_weights` are multiplied by the mask, so that from here on membership
  is `weight != 0` for every component. The counts cover the packed samples.
  No samples give a batch of padding with `num_micro_batches` = 0.

  Args:
    samples: samples with their streams.
    layout: the stage's.
    micro_batches: M.
    row_tokens: T of a row, or what chooses it for the samples.

  Returns:
    The batch, and the samples that fit into no row, in order of arrival.

  Raises:
    ValueError: a sample is empty or longer than `layout.longest`.
  """
  for sample in samples:
    if not 0 < len(sample) <= layout.longest:
      raise ValueError(
        f'sample of env {sample.env!r}, row {sample.row!r}: length must be in '
        f'[1, {layout.longest}], batch.row_tokens: got {len(sample)}; raise '
        'it, or drop or truncate the row'
      )
  tokens = _join(samples)
  env_ids = np.array([layout.envs.index(x.env) for x in samples], np.int32)
  tokens.fields['env_ids'] = env_ids[tokens.sample]
  kept, shared = _kept(tokens, layout)
  lengths = [len(samples[index]) for index in kept]
  if not isinstance(row_tokens, int):
    row_tokens = row_tokens(lengths, shared)
  rows = layout.rows
  bins, left = first_fit(
    lengths, row_tokens, rows * micro_batches, shared=shared
  )
  sizes = [row_sizes(members, lengths, shared) for members in bins]
  members = [[kept[i] for i in members] for members in bins]
  segments, is_laid, places = _places(members, sizes, tokens, row_tokens)
  fields = tokens.fields | {
    'segment_ids': segments,
    'positions': tokens.position,
  }
  dtypes = {**types.TOKEN_FIELDS, **dict.fromkeys(_PLACES, np.int32)}
  dtypes |= types.VALUE_FIELDS if layout.critic else {}
  dtypes |= {'routes': np.int16} if 'routes' in fields else {}
  shape = micro_batches, rows, row_tokens
  arrays = {}
  for name, dtype in dtypes.items():
    pad = layout.pad_id if name == 'ids' else _PADS.get(name, 0)
    values = fields[name][is_laid]
    arrays[name] = np.full((*shape, *values.shape[1:]), pad, dtype)
    arrays[name].reshape(-1, *values.shape[1:])[places] = values
  if layout.trees:
    links = np.zeros((3, *shape), np.int32)
    arrays |= zip(('parents', 'ends', 'copies'), links, strict=True)
    for row, row_lengths in enumerate(sizes):
      link(row_lengths, *links[:, *divmod(row, rows)])
  counts = {
    f'{name}_count': np.count_nonzero(fields[f'{name}_weights'][segments > 0])
    for name in (*types.COMPONENTS, *(['value'] if layout.critic else []))
  }
  is_rl = (segments > 0) & (fields['rl_weights'] != 0)
  counts['rl_sequences'] = np.count_nonzero(np.bincount(tokens.sample[is_rl]))
  batch = types.Batch(
    **arrays,
    **{name: np.asarray(x, np.float32) for name, x in counts.items()},
    num_micro_batches=np.asarray(-(-len(bins) // rows), np.int32),
  )
  return batch, [samples[index] for index in sorted(kept[i] for i in left)]


class _Tokens(NamedTuple):
  """The tokens of all samples, joined to one sequence of N."""

  lengths: np.ndarray  # i64[samples]
  sample: np.ndarray  # i64[N], index of a token's sample
  position: np.ndarray  # i64[N], index of a token in its sample
  # [N] each; 0 where a sample has no advantages or ref_logprobs. If a sample
  # has routes, also those, i16[N, L, k].
  fields: dict[str, np.ndarray]
  is_member: np.ndarray  # bool[N], of any component


def _join(samples: Sequence[types.Sample]) -> _Tokens:
  """Joins and checks the tokens of all samples.

  Samples are many and short, and numpy's cost is per call.
  """
  lengths = np.array([len(sample) for sample in samples], np.int64)
  owner = np.repeat(np.arange(len(samples)), lengths)
  position = np.arange(len(owner)) - (np.cumsum(lengths) - lengths)[owner]
  none = np.zeros(max(lengths, default=0), np.float32)
  fields = {}
  for name in _FIELDS:
    parts = [none[:0]] if not samples else []
    for sample, length in zip(samples, lengths, strict=True):
      value = getattr(sample, name)
      if value is None:
        reader = _READERS.get(name)
        assert not (reader and getattr(sample, reader).any()), (
          f'{name}: no stream'
        )
        value = none[:length]
      assert np.shape(value) == (length,), f'{name} must be aligned'
      parts.append(value)
    fields[name] = np.concatenate(parts)
    assert np.isfinite(fields[name]).all(), f'{name} must be finite'
  fields['rl_weights'] = fields['rl_weights'] * fields['mask']
  weights = {name: fields[f'{name}_weights'] for name in types.COMPONENTS}
  for name, values in weights.items():
    assert not values[position == 0].any(), f'{name}: nothing predicts token 0'
  # Per token: in a rollout sampled at another temperature, the observations,
  # say, may be ce members where their own temperature is 1.
  assert (fields['temperatures'][weights['ce'] != 0] == 1).all(), (
    'ce is at T = 1'
  )
  is_member = np.any([values != 0 for values in weights.values()], axis=0)
  recorded = {
    i: x.routes for i, x in enumerate(samples) if x.routes is not None
  }
  if recorded:
    values = np.concatenate([*recorded.values()])
    fields['routes'] = np.full((len(owner), *values.shape[1:]), -1, np.int16)
    fields['routes'][np.isin(owner, [*recorded])] = values
  return _Tokens(lengths, owner, position, fields, is_member)


def _kept(tokens: _Tokens, layout: Layout) -> tuple[list[int], list[int]]:
  """Returns the samples with a member, and the tokens that they share.

  Returns:
    (indices of the samples: in order of arrival or, with trees, that of
    `by_prefix`; the number of tokens that each shares with the one before).
  """
  kept = np.flatnonzero(np.bincount(tokens.sample[tokens.is_member])).tolist()
  if not (layout.trees and kept):
    return kept, [0] * len(kept)
  trains = tokens.is_member | (tokens.fields['mask'] != 0)
  starts = np.cumsum(tokens.lengths) - tokens.lengths
  columns = [tokens.fields['ids']]
  if 'routes' in tokens.fields:  # as one number, the same if they are equal
    routes = tokens.fields['routes'].reshape(len(trains), -1).astype(np.uint32)
    factors = np.random.default_rng(0).integers(1, 2**32, routes.shape[1])
    columns.append((routes @ factors.astype(np.uint32)).view(np.int32))
  if layout.trained:
    for name, dtype in _STREAMS.items():
      values = np.where(trains, tokens.fields[name], 0).astype(dtype)
      columns.append(values.view(np.int32))
    # The last token is the sample's own: each has a segment.
    most = tokens.lengths - 1
  else:  # the tokens before the first that trains, or may
    most = np.where(trains, tokens.position, len(trains))
    most = np.minimum.reduceat(most, starts)
  keys = np.stack(columns, axis=-1)
  order, shared = by_prefix(
    [keys[starts[i] :][: most[i]] for i in kept], tokens.lengths[kept].tolist()
  )
  return [kept[i] for i in order], shared


def _places(
  members: Sequence[Sequence[int]],
  sizes: Sequence[Sequence[tuple[int, int]]],
  tokens: _Tokens,
  row_tokens: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Lays samples one after another, each without the tokens that it shares.

  Args:
    members: the samples in each row.
    sizes: `row_sizes` of each row.
    tokens: the tokens of all samples.
    row_tokens: T.

  Returns:
    (the segment of each token's sample, i32[N], 0 = not in a row; whether it is
    laid: its sample is, and does not share it, bool[N]; places of the laid
    tokens among those of all rows, i64).
  """
  count = len(tokens.lengths)
  # Per sample: the place of its token 0, if all were laid before the first one
  # that is; -1 = not in a row.
  first, segment = np.full(count, -1), np.zeros(count, np.int32)
  shared = np.zeros(count, np.int64)
  for row, (indices, row_lengths) in enumerate(
    zip(members, sizes, strict=True)
  ):
    end = row * row_tokens
    for i, (length, common) in enumerate(row_lengths):
      first[indices[i]] = end - common
      shared[indices[i]], segment[indices[i]] = common, i + 1
      end += length - common
  first = first[tokens.sample]
  is_laid = (first >= 0) & (tokens.position >= shared[tokens.sample])
  places = (first + tokens.position)[is_laid]
  return segment[tokens.sample], is_laid, places


def by_prefix(
  prefixes: Sequence[np.ndarray], lengths: Sequence[int]
) -> tuple[list[int], list[int]]:
  """Orders samples so that those that begin alike are neighbours.

  It is the depth-first order of the prefixes' tree.

  Args:
    prefixes: the tokens of each sample that others may share, int[n, C]; the
      order is by the first two of what tokens must have in common.
    lengths: the samples' lengths.

  Returns:
    (the samples' indices in that order; for each of these the number of tokens
    that it shares with the one before it, 0 where it is less than a quarter of
    the shorter sample).
  """
  order = sorted(
    range(len(prefixes)),
    key=lambda i: prefixes[i][:, :2].astype('>i4').tobytes(),
  )
  shared = [0] * len(order)
  for i, (a, b) in enumerate(itertools.pairwise(order), 1):
    most = min(len(prefixes[a]), len(prefixes[b]))
    differing, *_ = np.nonzero(prefixes[a][:most] != prefixes[b][:most])
    common = int(differing[0]) if len(differing) else most
    if 4 * common >= min(lengths[a], lengths[b]):
      shared[i] = common
  return order, shared


def row_sizes(
  members: Sequence[int], lengths: Sequence[int], shared: Sequence[int]
) -> list[tuple[int, int]]:
  """Returns (length, number of shared tokens) of each sample of a row.

  Args:
    members: a bin of `first_fit`.
    lengths, shared: its arguments.
  """
  return [
    (lengths[i], shared[i] if previous == i - 1 else 0)
    for previous, i in itertools.pairwise((None, *members))
  ]


def paths(sizes: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
  """Yields the places of each sample's tokens in its row, i32[length].

  Args:
    sizes: see `row_sizes`.
  """
  path, end = np.zeros(0, np.int32), 0
  for length, common in sizes:
    start, end = end, end + length - common
    path = np.concatenate(
      (path[:common], np.arange(start, end, dtype=np.int32))
    )
    yield path


def link(
  sizes: Sequence[tuple[int, int]],
  parents: np.ndarray,
  ends: np.ndarray,
  copies: np.ndarray | None = None,
) -> None:
  """Writes the trees of a row, see `types.Batch`.

  Args:
    sizes: see `row_sizes`.
    parents, ends, copies: i32[T], zeros.
  """
  end = 0
  for (length, common), path in zip(sizes, paths(sizes), strict=True):
    end += length - common
    parents[path[1:]] = path[:-1]
    ends[path] = end  # samples that share a token follow one another
    if copies is not None:
      copies[path] += 1


def first_fit(
  lengths: Sequence[int],
  bin_size: int,
  max_bins: int,
  per_bin: int | None = None,
  shared: Sequence[int] | None = None,
) -> tuple[list[list[int]], list[int]]:
  """Packs items into bins, first-fit-decreasing.

  Items that share tokens are a unit, whose size counts these once. A unit that
  fits into no bin fills the emptiest ones in order: each part repeats what it
  shares.

  Args:
    lengths: the items' lengths.
    bin_size: the most length in a bin.
    max_bins: the most bins.
    per_bin: the most items in a bin, if none share; None = any number.
    shared: number of tokens that each item shares with the one before it; None
      = 0.

  Returns:
    The indices in each bin, and the indices that fit into no bin, ascending.
  """
  shared = shared or [0] * len(lengths)
  added = (n - common for n, common in zip(lengths, shared, strict=True))
  before = [0, *itertools.accumulate(added)]
  starts = [i for i, common in enumerate(shared) if not common]

  def size(first, end):
    return shared[first] + before[end] - before[first]

  bins, used, left = [], [], []
  units = itertools.pairwise((*starts, len(lengths)))
  for first, end in sorted(units, key=lambda unit: -size(*unit)):
    while first < end:
      needed, cut = size(first, end), end
      fit = next(
        (
          b
          for b, taken in enumerate(used)
          if taken + needed <= bin_size and len(bins[b]) != per_bin
        ),
        len(bins),
      )
      if fit == len(bins):
        emptiest = min(range(fit), key=used.__getitem__, default=fit)
        if end - first > 1 and used[emptiest:]:
          if used[emptiest] + lengths[first] <= bin_size:
            fit = emptiest
        if fit == max_bins:
          left += range(first, end)
          break
        if fit == len(bins):
          bins.append([])
          used.append(0)
        most = bin_size - used[fit] - shared[first] + before[first]
        cut = min(bisect.bisect_right(before, most) - 1, end)
      bins[fit] += range(first, cut)
      used[fit] += size(first, cut)
      first = cut
  return bins, sorted(left)


# Positions that are computed in vain before another width is compiled, which
# takes a CPU about as long: of a large model, and of a smaller one.
COMPILED, COMPILED_SMALL = 768, 2**17
_SPARE = 1.15  # positions per position of the best width that are not in vain


class Widths:
  """Lengths of rows that fit the samples of a stage's steps.

  Another length is another program, so the first step chooses one with some
  spare tokens, and later ones keep it: a step that needs more takes further
  micro-batches. Once `compiled` positions were computed in vain, a further
  length is added. Depends on the samples and the state alone.
  """

  def __init__(
    self,
    rows: int,
    most: int,
    fit: bool | None = True,
    compiled: int = COMPILED,
    micro_batches: int | None = None,
  ):
    """Starts without a length.

    Args:
      rows: B.
      most: the largest length.
      fit: whether the length is chosen; else it is the largest.
      compiled: positions in vain that cost as much as to compile.
      micro_batches: a length that is kept needs no more, unless every length
        does; None = any number.
    """
    self._rows, self._most, self._fit = rows, most, fit
    self._compiled, self._limit = compiled, micro_batches
    self._known: list[int] = []
    self._in_vain = 0.0

  def __call__(
    self, lengths: Sequence[int], shared: Sequence[int] | None = None
  ) -> int:
    """Returns T for samples, each of which fits into it.

    Args:
      lengths, shared: see `first_fit`.
    """
    if not self._fit:
      return self._most
    rows = self._rows

    @functools.cache
    def count(width: int) -> int:
      return micro_batches(lengths, rows, width, shared)

    def cost(width: int) -> int:
      return rows * width * count(width)

    best = fitted(lengths, rows, self._most, shared=shared)
    limit = max(self._limit or len(lengths), count(best))
    fitting = [
      x
      for x in self._known
      if x >= max(lengths, default=0) and count(x) <= limit
    ]
    if fitting:
      width = min(fitting, key=cost)
      self._in_vain += max(cost(width) - _SPARE * cost(best), 0.0)
      if self._in_vain < self._compiled:
        return width
    self._in_vain = 0.0
    spare = next(ladder(best + 1, self._most, 16))
    # More tokens per row may, rarely, need more rows.
    self._known.append(spare if count(spare) <= limit else best)
    return self._known[-1]

  def get_state(self) -> list[float]:
    """Returns JSON-able state that, with the samples, determines T."""
    return [self._in_vain, *self._known]

  def set_state(self, state: Sequence[Any]) -> None:
    """Continues from a state of `get_state`."""
    self._in_vain, *self._known = state


def fitted(
  lengths: Sequence[int],
  rows: int,
  most: int,
  parts: int = 16,
  shared: Sequence[int] | None = None,
) -> int:
  """Returns the least T that needs no more micro-batches than the largest.

  Args:
    lengths: the samples' lengths.
    rows: B.
    most: the largest T.
    parts: lengths of rows between a power of two and the next.
    shared: see `first_fit`.
  """
  least = max(micro_batches(lengths, rows, most, shared), 1)
  total = sum(lengths) - sum(shared or ())
  needed = max(max(lengths, default=1), total // (least * rows))
  return next(
    width
    for width in ladder(needed, most, parts)
    if micro_batches(lengths, rows, width, shared) <= least
  )


def ladder(first: int, most: int, parts: int) -> Iterator[int]:
  """Yields rounded lengths of rows from `first` on; the last one is `most`.

  Args:
    first, most: bounds of the lengths.
    parts: lengths between a power of two and the next.
  """
  width = 0
  while width < most:
    width += max(16, 2 ** max(width.bit_length() - 1, 0) // parts)
    if width >= min(first, most):
      yield min(width, most)


def micro_batches(
  lengths: Sequence[int],
  rows: int,
  width: int,
  shared: Sequence[int] | None = None,
) -> int:
  """Returns the number of micro-batches of samples; see `fitted`."""
  bins, _ = first_fit(lengths, width, len(lengths), shared=shared)
  return -(-len(bins) // rows)
