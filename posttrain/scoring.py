"""The one forward pass that turns tokens into logprobs.

The train step, the engine's scoring and frozen references all call `score`,
so their logprobs agree to rounding. Sampling calls `next_logits`: the same
distribution, as logits.

Axes: B rows, T tokens, D model, V vocab.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from posttrain import schema, sharding
from posttrain.data import packing
from posttrain.losses import logprobs
from posttrain.models import transformer
from posttrain.util import watchdog


def score(
  params: Any,
  cfg: schema.Model,
  ids: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  temperatures: jax.Array,
  parents: jax.Array | None = None,
  ends: jax.Array | None = None,
  routes: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
  """Computes the log probability of each token given its segment so far.

  logprobs[t] = log softmax(logits[t - 1] / temperatures[t])[ids[t]]

  In rows with trees: given its path from the root; t - 1 is its parent.

  The temperature is that of the predicted token. The first token of a segment
  has no prediction: it and pads get exactly 0.

  Args:
    params: the model's parameters.
    cfg: model options, with `vocab_size` resolved.
    ids: i32[B, T], packed rows.
    positions: i32[B, T], RoPE index, restarting at 0 in every segment.
    segment_ids: i32[B, T], packed example id; 0 = pad.
    temperatures: f32[B, T], > 0.
    parents, ends: i32[B, T], the trees of rows, see `types.Batch`; None = none.
    routes: as in `transformer.trunk`.

  Returns:
    (logprobs f32[B, T] in nats, entropy f32[B, T] in nats of the distribution
    that predicts each token).
  """
  hidden, _ = transformer.trunk(
    params, cfg, ids, positions, segment_ids, ends=ends, routes=routes
  )
  return score_hidden(
    params, cfg, hidden, ids, positions, segment_ids, temperatures, parents
  )


def score_hidden(
  params: Any,
  cfg: schema.Model,
  hidden: jax.Array,
  ids: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  temperatures: jax.Array,
  parents: jax.Array | None = None,
  reads_top: bool = False,
) -> tuple[jax.Array, ...]:
  """Computes `score` from hidden states [B, T, D] of `transformer.trunk`.

  With `reads_top` also f32[B, T]: 1 for each token that is the most likely one
  in its segment so far; else 0, as for first tokens and pads.
  """
  weight, softcap = transformer.head(params, cfg)
  if cfg.logit_divisor != 1:  # divides logits as a temperature does
    temperatures = temperatures * cfg.logit_divisor
  hidden, ahead = _predicting(hidden, parents)
  outputs = logprobs.linear(
    hidden,
    weight,
    sharding.pieces(jnp.roll(ids, -ahead, axis=1)),
    sharding.pieces(jnp.roll(temperatures, -ahead, axis=1), fill=1),
    softcap=softcap,
    reads_top=reads_top,
  )
  outputs = (sharding.rows(x, ids.shape[1]) for x in outputs)
  predicted = (positions > 0) & (segment_ids != 0)
  return tuple(
    jnp.where(predicted, jnp.roll(x, ahead, axis=1), 0.0) for x in outputs
  )


def _predicting(hidden, parents) -> tuple[jax.Array, int]:
  """Returns hidden states, and how far ahead the token is that each predicts.

  Each predicts the next token, and the last prediction is dropped. In trees
  several tokens may follow one: they have a copy of its state each.
  """
  if parents is None:
    return hidden, 1
  # In float32, so that the gradients of the copies are summed in it.
  copies = hidden.astype(jnp.float32)
  copies = jnp.take_along_axis(copies, parents[..., None], axis=1)
  return copies.astype(hidden.dtype), 0


def values(
  critic: Any,
  hidden: jax.Array,
  positions: jax.Array,
  parents: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Computes a critic's values before and after each token.

  Args:
    critic: parameters of a reward model.
    hidden: float[B, T, D] from `transformer.trunk`.
    positions: as in `score`.
    parents: as in `score`.

  Returns:
    (value of the segment before each token, 0 for its first one; value of the
    segment up to and with each token), f32[B, T] each.
  """
  after = transformer.rewards(critic, hidden)
  after = sharding.rows(after, positions.shape[1])
  if parents is None:
    before = jnp.roll(after, 1, axis=1)
  else:
    before = jnp.take_along_axis(after, parents, axis=1)
  return jnp.where(positions > 0, before, 0.0), after


def next_logits(params: Any, cfg: schema.Model, hidden: jax.Array) -> jax.Array:
  """Computes the logits of the token after each hidden state.

  Args:
    params: the model's parameters.
    cfg: model options, with `vocab_size` resolved.
    hidden: float[..., D] from `transformer.trunk`, in the compute dtype.

  Returns:
    f32[..., V]; `score` reads log_softmax(logits / temperature).
  """
  weight, softcap = transformer.head(params, cfg)
  logits = logprobs.logits(hidden, weight, softcap=softcap)
  return logits if cfg.logit_divisor == 1 else logits / cfg.logit_divisor


# What a `Scorer` computes of each token: f32, nats; f32; f32[2], logprob and
# whether it is the most likely token, see `score_hidden`.
READS = 'logprobs', 'rewards', 'logprobs_and_top'
_FITTED = 2048  # tokens of a row that fits its sequences, at most


# At module level, so that all `Scorer`s of a shape share one program.
@functools.partial(jax.jit, static_argnames=('cfg', 'place', 'reads'))
def _read(params, rows, cfg, place, reads):
  *rows, ends = rows
  with sharding.use(place and place.mesh):
    hidden, _ = transformer.trunk(params, cfg, *rows[:3], ends=ends)
    if reads == 'rewards':
      values = transformer.rewards(params, hidden)
      values = sharding.rows(values, rows[0].shape[1])
    else:
      reads_top = reads == 'logprobs_and_top'
      values, _, *top = score_hidden(
        params, cfg, hidden, *rows, reads_top=reads_top
      )
      if reads_top:
        values = jnp.stack((values, *top), axis=-1)
  if place is None:
    return values
  return jax.lax.with_sharding_constraint(values, place)


class Scorer:
  """Scores of any number of sequences of any length, by one program.

  Sequences are packed first-fit into arrays of one shape, [B, T]; those of a
  large model on a CPU into arrays as wide as a call needs, in few widths. With
  trees, sequences share the tokens that they begin with at equal temperatures,
  in arrays of one joined row per device. An
  accelerator has up to `ahead` arrays of them beside the one that is fetched. A
  CPU gets them one by one: it has no other device to wait for, and programs in
  flight on several CPU devices may block each other.
  """

  def __init__(
    self,
    cfg: schema.Model,
    rows: int,
    row_tokens: int,
    mesh: jax.sharding.Mesh | None = None,
    reads: str = 'logprobs',
    trees: bool = False,
  ):
    """Sets the shape [B, T].

    Args:
      cfg: model options, with `vocab_size` resolved.
      rows: B.
      row_tokens: T, the longest sequence that can be scored.
      mesh: splits the rows over its batch axes; None = one device.
      reads: what to compute, one of `READS`.
      trees: whether sequences share tokens, in one row per device.
    """
    assert reads in READS, reads
    self._reads, self._trees = reads, trees and cfg.serves_trees
    self.ahead = 0 if jax.default_backend() == 'cpu' else 2
    self._place = self._whole = None
    self._cfg, self._rows, self._row_tokens = cfg, rows, row_tokens
    self._most = row_tokens
    self._fits = cfg.is_large and not self.ahead
    if self._fits or self._trees:
      axes = sharding.ROW_AXES
      self._rows = 1 if mesh is None else sharding.batch_ways(mesh, axes)
      joined = rows // self._rows
      # Half, of at least two: little is left of the last array of a call.
      self._most *= max(joined // 2, min(joined, 2), 1)
    if self._fits:
      self._most = max(row_tokens, _FITTED)
    if mesh is not None:
      self._place = NamedSharding(mesh, PartitionSpec(*sharding.BATCH[1:]))
      self._whole = NamedSharding(mesh, PartitionSpec())

  def __call__(
    self,
    params: Any,
    ids: Sequence[np.ndarray],
    temperatures: Sequence[np.ndarray],
  ) -> list[np.ndarray]:
    """Computes what the scorer reads of every token.

    Args:
      params: the model's parameters.
      ids: one i32[n] per sequence.
      temperatures: one f32[n] per sequence, > 0.

    Returns:
      One array per sequence: logprobs f32[n] in nats, 0 at index 0; rewards
      f32[n]; or f32[n, 2], the logprobs beside 0 or 1, see `READS`.

    Raises:
      ValueError: a sequence is longer than a row.
    """
    return self.start(params, ids, temperatures)()

  def start(
    self,
    params: Any,
    ids: Sequence[np.ndarray],
    temperatures: Sequence[np.ndarray],
  ) -> Callable[[], list[np.ndarray]]:
    """Starts the first `ahead` programs of `__call__`.

    The order of programs is that of the calls, of this method and of the
    functions that it returns. It must be the same in all processes.

    Args:
      params: as in `__call__`; must not be deleted before the end.
      ids: as in `__call__`.
      temperatures: as in `__call__`.

    Returns:
      A function, called once, that starts the others and returns the results
      of `__call__`.

    Raises:
      ValueError: a sequence is longer than a row.
    """
    lengths = [len(sequence) for sequence in ids]
    assert lengths == [len(values) for values in temperatures]
    longest = max(lengths, default=0)
    if longest > self._row_tokens:
      raise ValueError(
        f'sequence {lengths.index(longest)} must fit into a row to be scored: '
        f'got {longest} tokens, expected at most {self._row_tokens}; raise '
        'batch.row_tokens'
      )
    order, shared = list(range(len(ids))), [0] * len(ids)
    if self._trees:  # tokens are equal where ids and temperatures are
      keys = [
        np.stack((x, np.float32(y).view(np.int32)), axis=-1)
        for x, y in zip(ids, temperatures, strict=True)
      ]
      order, shared = packing.by_prefix(keys, lengths)
    lengths = [lengths[index] for index in order]
    count, width = self._rows, self._most
    if self._fits:
      width = packing.fitted(lengths, count, width, parts=4, shared=shared)
    bins, _ = packing.first_fit(lengths, width, len(lengths), shared=shared)

    def launch():
      for start in range(0, len(bins), count):
        places = []  # (index of a sequence, (row, its places))
        # [B, T] each.
        tokens, positions, segments, *links = np.zeros(
          (5, count, width), np.int32
        )
        packed_temperatures = np.ones((count, width), np.float32)
        for row, members in enumerate(bins[start : start + count]):
          sizes = packing.row_sizes(members, lengths, shared)
          if self._trees:
            packing.link(sizes, *(x[row] for x in links))
          for i, path in zip(members, packing.paths(sizes), strict=True):
            index, place = order[i], (row, path)
            places.append((index, place))
            tokens[place] = ids[index]
            positions[place] = np.arange(lengths[i])
            segments[place] = len(places)
            packed_temperatures[place] = temperatures[index]
        rows = tokens, positions, segments, packed_temperatures
        rows += tuple(links) if self._trees else (None, None)
        if self._place is not None:
          rows = sharding.put(rows, self._place)
        scored = _read(params, rows, self._cfg, self._whole, self._reads)
        yield places, scored

    launches = launch()
    launched = collections.deque(itertools.islice(launches, self.ahead))

    def finish():
      results: list[Any] = [None] * len(lengths)
      while True:
        launched.extend(itertools.islice(launches, 1))
        if not launched:
          return results
        places, outputs = launched.popleft()
        values = jax.device_get(outputs)
        watchdog.progress()
        for index, place in places:
          results[index] = values[place]

    return finish
