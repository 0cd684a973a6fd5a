"""Logprobs of given tokens, with their ranks and the likeliest alternatives.

Plain logprobs are computed by `scoring.Scorer`. Ranks and alternatives need the
logits, so they have a forward of their own over the same distribution. Shapes
are buckets, so that few programs are compiled: lengths of `schedule.bucket`,
one row or `ROWS`, 0, 1 or `MAX_ALTERNATIVES` alternatives.

Axes: B rows, T tokens, K tokens of a block, D model, V vocab, A alternatives.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posttrain import schema, scoring
from posttrain.decode import schedule
from posttrain.models import transformer

ROWS = 8  # sequences scored at a time, if there are several
MAX_ALTERNATIVES = 5  # per token
_LOGITS = 2**24  # the most f32 logits of a block


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
  """Logprobs of a sequence's tokens; entry 0 has no meaning."""

  logprobs: np.ndarray  # f32[T], in nats
  # i32[T], 1 = no token is likelier; None if only logprobs were requested.
  ranks: np.ndarray | None = None
  top_ids: np.ndarray | None = None  # i32[T, A], the likeliest first
  top_logprobs: np.ndarray | None = None  # f32[T, A]


def score(
  params: Any,
  cfg: schema.Model,
  sequences: Sequence[np.ndarray],
  temperatures: Sequence[float],
  alternatives: int | None,
) -> list[TokenLogprobs]:
  """Scores sequences.

  Args:
    params: the model's parameters.
    cfg: model options.
    sequences: i32[T] each.
    temperatures: > 0, one per sequence.
    alternatives: the number of likeliest tokens to return per token, at most
      `MAX_ALTERNATIVES`. None = the logprobs alone.
  """
  rows = 1 if len(sequences) == 1 else ROWS
  width = schedule.bucket(max(map(len, sequences)))
  if alternatives is None:
    scorer = scoring.Scorer(cfg, rows, width)
    per_token = [
      np.full(len(ids), temperature, np.float32)
      for ids, temperature in zip(sequences, temperatures, strict=True)
    ]
    return list(map(TokenLogprobs, scorer(params, sequences, per_token)))
  count = min(
    cfg.vocab_size, alternatives if alternatives < 2 else MAX_ALTERNATIVES
  )
  scored = []
  for start in range(0, len(sequences), rows):
    some = slice(start, start + rows)
    scored += _score_rows(
      params, cfg, sequences[some], temperatures[some], (rows, width), count
    )
  return scored


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
