"""Tokens that a work computes, tokens that it needs, and their FLOPs.

computed    positions that pass through the model: of prefill calls, of slots
            in each step of decoding, of micro-batches and of scored rows,
            whether or not they hold a token
needed      tokens of distinct prefixes: what several sequences begin with
            counts once. The last token of a rollout is not fed

Axes: B rows, T tokens.
"""

import collections
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

computed: collections.Counter[str] = collections.Counter()  # by phase


@functools.cache  # once
def watch() -> None:
  """Counts the engine's and the scorers' positions from now on."""
  from posttrain import scoring
  from posttrain.decode import loop

  prefill, decode, read = loop.prefill, loop.decode, scoring._read

  def counting_prefill(view, cfg, state, chunk, *args):
    computed['rollout'] += chunk[0].size
    return prefill(view, cfg, state, chunk, *args)

  def counting_decode(view, cfg, state, *args):
    before = np.asarray(state.length)
    state = decode(view, cfg, state, *args)
    # The slot that stops last has decoded in every step.
    steps = int((np.asarray(state.length) - before).max())
    computed['rollout'] += steps * len(before)
    return state

  def counting_read(params, rows, *args):
    computed['scoring'] += rows[0].size
    return read(params, rows, *args)

  loop.prefill, loop.decode = counting_prefill, counting_decode
  scoring._read = counting_read


def positions(batch: Any) -> int:
  """Returns the positions of a batch that an update computes."""
  return int(batch.num_micro_batches) * batch.ids[0].size


def needed(sequences: Sequence[Sequence[int]]) -> int:
  """Returns the number of distinct prefixes of sequences, () left out."""
  total, before = 0, ()
  for sequence in sorted(map(tuple, sequences)):
    pairs = itertools.takewhile(
      lambda pair: pair[0] == pair[1], zip(before, sequence, strict=False)
    )
    total, before = total + len(sequence) - sum(1 for _ in pairs), sequence
  return total


def sequences(batch: Any) -> Iterator[list[int]]:
  """Yields the sequences of a batch's live rows.

  Of a row with trees those that end at a leaf, each from its root.
  """
  live = int(batch.num_micro_batches)
  shape = -1, batch.ids.shape[-1]
  segments = batch.segment_ids[:live].reshape(shape)
  parents = getattr(batch, 'parents', None)
  if parents is None:  # the token before
    parents = np.broadcast_to(np.arange(shape[1]) - 1, segments.shape)
  else:
    parents = parents[:live].reshape(shape)
  arrays = (
    x[:live].reshape(shape).tolist() for x in (batch.ids, batch.positions)
  )
  for *row, segment, parent in zip(*arrays, segments, parents, strict=True):
    ids, depth = row
    tokens = np.flatnonzero(segment)
    inner = {int(parent[t]) for t in tokens if depth[t]}
    for t in set(tokens.tolist()) - inner:
      path = [ids[t]]
      while depth[t]:
        t = int(parent[t])
        path.append(ids[t])
      yield path[::-1]


def flops(cfg: Any, tokens: int, length: int, trains: bool = False) -> float:
  """Returns the FLOPs of a model on tokens of sequences of a length.

  Two per weight and token, lookups of the embedding aside, and those of causal
  attention; three times as many with the backward pass.

  Args:
    cfg: the model's options, of no mixture of experts.
    tokens: their number.
    length: tokens of a sequence.
    trains: whether there is a backward pass.
  """
  from posttrain.models import transformer

  weights = transformer.num_params(cfg)
  if not cfg.tied_head:
    weights -= cfg.vocab_size * cfg.embed_dim
  attention = cfg.layers * cfg.heads * cfg.head_dim * length
  return (3 if trains else 1) * 2 * tokens * (weights + attention)
