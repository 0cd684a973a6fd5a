"""How likely given tokens are, which rank they have, and what was likelier.

Where the logprobs are all that is asked for, it is `scoring.Scorer` that says
them; ranks and alternatives need the logits, so they come from a forward of
their own over the same law. Shapes are buckets, so that few programs are
compiled: lengths of `schedule.bucket`, one row or `ROWS`, 0, 1 or `MOST`
alternatives.

Axes: B rows, T tokens, D model, V vocab, A alternatives.
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

ROWS = 8  # sequences that are scored at a time, where several are to be
MOST = 5  # alternatives of a token
_LOGITS = 2**24  # of a block, f32


@dataclasses.dataclass(frozen=True)
class Law:
  """What a model thinks of the tokens of a sequence; entry 0 says nothing."""

  logprobs: np.ndarray  # f32[T], in nats
  # i32[T], 1 = none is likelier; None where only the logprobs were asked for.
  ranks: np.ndarray | None = None
  top_ids: np.ndarray | None = None  # i32[T, A], the likeliest first
  top_logprobs: np.ndarray | None = None  # f32[T, A]


def read(
  params: Any,
  cfg: schema.Model,
  sequences: Sequence[np.ndarray],
  temperatures: Sequence[float],
  alternatives: int | None,
) -> list[Law]:
  """Scores sequences.

  Args:
    params: the model's parameters.
    cfg: model options.
    sequences: i32[T] each.
    temperatures: > 0, one per sequence.
    alternatives: the likeliest tokens that are told beside each; at most
      `MOST`. None = the logprobs alone.
  """
  rows = 1 if len(sequences) == 1 else ROWS
  width = schedule.bucket(max(map(len, sequences)))
  if alternatives is None:
    scorer = scoring.Scorer(cfg, rows, width)
    heat = [
      np.full(len(ids), temperature, np.float32)
      for ids, temperature in zip(sequences, temperatures, strict=True)
    ]
    return list(map(Law, scorer(params, sequences, heat)))
  count = min(cfg.vocab_size, alternatives if alternatives < 2 else MOST)
  told = []
  for start in range(0, len(sequences), rows):
    some = slice(start, start + rows)
    told += _read_rows(
      params, cfg, sequences[some], temperatures[some], (rows, width), count
    )
  return told


def _read_rows(params, cfg, sequences, temperatures, shape, count):
  """Scores at most so many sequences as the shape, (B, T), has rows."""
  ids, live = np.zeros((2, *shape), np.int32)
  heat = np.ones(shape[0], np.float32)
  for row, (sequence, temperature) in enumerate(
    zip(sequences, temperatures, strict=True)
  ):
    ids[row, : len(sequence)], live[row, : len(sequence)] = sequence, 1
    heat[row] = temperature
  found = jax.device_get(_laws(params, ids, live, heat, cfg, count))
  return [
    Law(*(x[row, : len(sequence)].copy() for x in found))
    for row, sequence in enumerate(sequences)
  ]


@functools.partial(jax.jit, static_argnames=('cfg', 'count'))
def _laws(params, ids, live, heat, cfg, count):
  """(logprobs f32[B, T], ranks i32[B, T], and alternatives [B, T, A])."""
  rows, width = ids.shape
  positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), ids.shape)
  hidden, _ = transformer.trunk(params, cfg, ids, positions, live)
  tokens = rows * width
  block = max(
    k
    for k in range(1, tokens + 1)
    if tokens % k == 0 and (k == 1 or k * cfg.vocab_size <= _LOGITS)
  )

  def look(inputs):
    hidden, target, heat = inputs  # of K tokens, and of those behind them
    logits = scoring.next_logits(params, cfg, hidden)
    law = jax.nn.log_softmax(logits / heat[:, None])
    logprob = jnp.take_along_axis(law, target[:, None], axis=1)
    rank = 1 + jnp.sum(law > logprob, axis=1, dtype=jnp.int32)
    top, at = jax.lax.top_k(law, count)
    return logprob[:, 0], rank, at.astype(jnp.int32), top

  # Each place predicts its right neighbour; what is behind the last is cut off.
  inputs = (hidden, jnp.roll(ids, -1, axis=1), jnp.repeat(heat, width))
  told = jax.lax.map(
    look, jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[2:]), inputs)
  )
  return jax.tree.map(
    lambda x: jnp.roll(x.reshape(rows, width, *x.shape[2:]), 1, axis=1), told
  )
