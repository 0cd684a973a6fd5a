"""Tokens that differ between two runs, and how close their draws were.

Runs whose logits round differently draw the same random numbers. So they draw
another token only where the number is, within that rounding, at the edge of the
token's interval of the cumulative probabilities; what follows differs then.

1. `pairs` matches the exported sequences of a step.
2. `margin` takes the first token that differs in a pair: with the parameters
   that drew it in the first run, how far is the random number from the interval
   of the token that the second run drew? That is 0 to 1, of all probability.

Axes: T tokens, V vocab.
"""

import collections
import functools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posttrain import scoring
from posttrain.checkpoints import reading, weight_folders, weights
from posttrain.decode import loop
from posttrain.models import transformer

# A number is taken to be a request's if it lies in the intervals of all of its
# tokens, widened by so much.
_EDGE = 1e-3
Row = dict[str, Any]  # a sequence of an export


def read(path: pathlib.Path) -> list[Row]:
  """Returns the sequences of an export."""
  return [json.loads(line) for line in path.read_text().splitlines()]


def prompt(row: Row) -> tuple[int, ...]:
  """Returns the ids before the first completion token."""
  mask = row['mask']
  return tuple(row['ids'][: mask.index(True) if any(mask) else len(mask)])


def pairs(
  first: Sequence[Row], second: Sequence[Row]
) -> Iterator[tuple[Row, Row]]:
  """Yields the sequences of two runs that differ, matched by their prefixes."""
  left, right = (collections.defaultdict(list) for _ in range(2))
  for rows, groups in ((first, left), (second, right)):
    for row in rows:
      groups[prompt(row)].append(row)
  for key, group in left.items():
    others = list(right[key])
    for row in list(group):  # equal ones go in pairs
      equal = [x for x in others if x['ids'] == row['ids']]
      if equal:
        others.remove(equal[0])
        group.remove(row)
    for row in group:
      best = max(others, key=lambda x, row=row: _common(row['ids'], x['ids']))
      others.remove(best)
      yield row, best


def _common(a: Sequence[int], b: Sequence[int]) -> int:
  """Returns the length of the common prefix."""
  same = [x == y for x, y in zip(a, b, strict=False)]
  return same.index(False) if False in same else len(same)


class Draws:
  """The draws of a step of a run."""

  def __init__(self, stage_folder: pathlib.Path, step: int):
    """Loads the parameters that drew the step's tokens.

    Args:
      stage_folder: the stage's checkpoints, all of them.
      step: the step, above 1.
    """
    before, after = (str(stage_folder / str(x)) for x in (step - 1, step))
    self._model = weight_folders.model(before)
    like = transformer.shapes(self._model)
    self._params = weights.load(before, like)
    host = reading.read_host(before)
    self._seed = host['config']['seed']
    end = reading.read_host(after)['pipeline']['uid']
    self._uids = np.arange(host['pipeline']['uid'], end, dtype=np.int64)

  def margin(self, row: Row, other: Row) -> float:
    """Returns the distance of the draw from the other token's interval."""
    at = _common(row['ids'], other['ids'])
    drawn = np.flatnonzero(row['mask'][: at + 1])
    assert drawn[-1] == at, 'the first difference is a drawn token'
    ends = self._ends(row)[drawn - 1]  # [n, V], of the tokens at `drawn`
    uniforms = self._uniforms(drawn)  # [uids, n]
    tokens = np.array(row['ids'])[drawn]
    distance = _distance(ends, tokens, uniforms).max(axis=1)
    assert distance.min() < _EDGE, 'some number of the step drew the tokens'
    number = uniforms[distance.argmin(), -1]
    edge = _distance(
      ends[-1:], np.array([other['ids'][at]]), number[None, None]
    )
    return float(edge[0, 0])

  def _ends(self, row: Row) -> np.ndarray:
    """Returns the cumulative probabilities of the next token, f64[T, V]."""
    ids = jnp.asarray(row['ids'], jnp.int32)[None]
    logits = _logits(self._params, self._model, ids)[0]
    z = np.asarray(logits, np.float64)
    z /= np.append(row['temperatures'][1:], 1.0)[:, None]
    mass = np.exp(z - z.max(axis=-1, keepdims=True))
    return np.cumsum(mass, axis=-1) / mass.sum(axis=-1, keepdims=True)

  def _uniforms(self, positions: np.ndarray) -> np.ndarray:
    """Returns the random numbers of all requests of the step."""
    high, low = (self._uids >> 32, self._uids & 0xFFFFFFFF)
    keys = loop.request_keys(
      self._seed, high.astype(np.uint32), low.astype(np.uint32)
    )
    columns = [
      loop.uniforms(keys, jnp.full(len(keys), p, jnp.int32)) for p in positions
    ]
    return np.asarray(jnp.stack(columns, axis=1), np.float64)


def _distance(
  ends: np.ndarray, tokens: np.ndarray, uniforms: np.ndarray
) -> np.ndarray:
  """Returns how far numbers are from the intervals of tokens.

  Args:
    ends: f64[n, V], the ends of the tokens' intervals.
    tokens: i32[n].
    uniforms: f64[..., n].
  """
  index = np.arange(len(tokens))
  high = ends[index, tokens]
  low = np.where(tokens > 0, ends[index, tokens - 1], 0.0)
  return np.maximum(np.maximum(low - uniforms, uniforms - high), 0.0)


@functools.partial(jax.jit, static_argnums=1)
def _logits(params, model, ids):
  index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
  hidden, _ = transformer.trunk(params, model, ids, index, jnp.ones_like(ids))
  return scoring.next_logits(params, model, hidden)
