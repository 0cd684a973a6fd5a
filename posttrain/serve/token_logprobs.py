"""Logprobs of given tokens, with their ranks and the likeliest alternatives.

A forward like `scoring.score`'s, over the same distribution; ranks and
alternatives need the logits. Shapes are buckets, and one program serves all
requests of a shape, so that few are compiled: powers of two as lengths, one row
or `ROWS`, always `MAX_ALTERNATIVES` alternatives.

Axes: B rows, T tokens, K tokens of a block, D model, V vocab, A alternatives.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posttrain import schema, scoring, sharding
from posttrain.models import transformer

ROWS = 8  # sequences scored at a time, if there are several
MAX_ALTERNATIVES = 20  # per token, as in OpenAI's API
_LOGITS = 2**24  # the most f32 logits of a block


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
  """Logprobs of a sequence's tokens; entry 0 has no meaning."""

  logprobs: np.ndarray  # f32[T], in nats
  ranks: np.ndarray  # i32[T], 1 = no token is likelier
  # i32[T, A], the likeliest first; A = MAX_ALTERNATIVES or the vocabulary.
  top_ids: np.ndarray
  top_logprobs: np.ndarray  # f32[T, A]


def score(
  params: Any,
  cfg: schema.Model,
  sequences: Sequence[np.ndarray],
  temperatures: Sequence[float],
) -> list[TokenLogprobs]:
  """Scores sequences.

  Args:
    params: the model's parameters.
    cfg: model options.
    sequences: i32[T] each.
    temperatures: > 0, one per sequence.
  """
  rows = 1 if len(sequences) == 1 else ROWS
  width = _width(max(map(len, sequences)))
  count = min(cfg.vocab_size, MAX_ALTERNATIVES)
  scored = []
  for start in range(0, len(sequences), rows):
    some = slice(start, start + rows)
    scored += _score_rows(
      params, cfg, sequences[some], temperatures[some], (rows, width), count
    )
  return scored


def _width(tokens: int) -> int:
  """Returns the smallest power of two, at least 32, that is no less."""
  return max(32, 1 << (tokens - 1).bit_length())


def _score_rows(params, cfg, sequences, temperatures, shape, count):
  """Scores at most B sequences; `shape`: (B, T)."""
  ids, valid = np.zeros((2, *shape), np.int32)
  row_temperatures = np.ones(shape[0], np.float32)
  for row, (sequence, temperature) in enumerate(
    zip(sequences, temperatures, strict=True)
  ):
    ids[row, : len(sequence)], valid[row, : len(sequence)] = sequence, 1
    row_temperatures[row] = temperature
  arrays = jax.device_get(
    _forward(params, ids, valid, row_temperatures, cfg, count)
  )
  return [
    TokenLogprobs(*(x[row, : len(sequence)].copy() for x in arrays))
    for row, sequence in enumerate(sequences)
  ]


@functools.partial(jax.jit, static_argnames=('cfg', 'count'))
def _forward(params, ids, valid, temperatures, cfg, count):
  """Returns logprobs f32[B, T], ranks i32[B, T], alternatives [B, T, A]."""
  with sharding.use(sharding.one_device()):
    return _scored(params, ids, valid, temperatures, cfg, count)


def _scored(params, ids, valid, temperatures, cfg, count):
  """Computes `_forward`."""
  rows, width = ids.shape
  positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), ids.shape)
  hidden, _ = transformer.trunk(params, cfg, ids, positions, valid)
  tokens = rows * width
  block = max(
    k
    for k in range(1, tokens + 1)
    if tokens % k == 0 and (k == 1 or k * cfg.vocab_size <= _LOGITS)
  )

  def score_block(inputs):
    hidden, target, temperatures = inputs  # [K, D], [K] next tokens, [K]
    logits = scoring.next_logits(params, cfg, hidden)
    logprobs = jax.nn.log_softmax(logits / temperatures[:, None])
    own = jnp.take_along_axis(logprobs, target[:, None], axis=1)
    rank = 1 + jnp.sum(logprobs > own, axis=1, dtype=jnp.int32)
    top, top_ids = jax.lax.top_k(logprobs, count)
    return own[:, 0], rank, top_ids.astype(jnp.int32), top

  # Each place predicts its right neighbour; the last prediction wraps around
  # to entry 0, which has no meaning.
  inputs = (hidden, jnp.roll(ids, -1, axis=1), jnp.repeat(temperatures, width))
  outputs = jax.lax.map(
    score_block,
    jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[2:]), inputs),
  )
  return jax.tree.map(
    lambda x: jnp.roll(x.reshape(rows, width, *x.shape[2:]), 1, axis=1), outputs
  )
