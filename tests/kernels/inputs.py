"""Arrays, intervals and prefix trees for the tests of attention."""

import jax.numpy as jnp
import numpy as np

KINDS = (
  'causal',
  'packed',
  'window',
  'packed window',
  'any',
  'one key',
  'ragged',
  'empty',
)


def draw(seed, *shapes, dtype=jnp.float32):
  """Draws unit normal arrays by numpy, without compilation."""
  rng = np.random.default_rng(seed)
  return tuple(
    jnp.asarray(rng.standard_normal(shape, np.float32).astype(dtype))
    for shape in shapes
  )


def packed(lengths, t):
  """Returns causal intervals of segments in a row of t, i32[t] each."""
  start, end = np.zeros((2, t), np.int32)
  first = 0
  for length in lengths:
    segment = slice(first, first + length)
    start[segment] = first
    end[segment] = np.arange(first, first + length) + 1
    first += length
  return start, end


def intervals(kind, t, s=None):
  """Returns (k_start, k_end), i32[t], for the last t of s >= t keys."""
  s = s or t
  rng = np.random.default_rng(0)
  start, end = packed((t // 4, t // 2 - 1, t // 8), t)  # an eighth is pad
  if kind == 'packed':
    return start, end
  if kind == 'ragged':  # ends within a block of any size
    return packed((2 * t // 3 - 1,), t)
  if kind == 'empty':
    return packed((), t)
  if kind == 'packed window':
    return np.maximum(start, end - 7), end
  if kind == 'any':  # unordered, a third of them empty, some out of range
    start = rng.integers(-3, s + 3, t)
    return start, start + rng.integers(-s // 2, s, t)
  start, end = np.zeros(t, np.int32), np.arange(s - t, s) + 1
  if kind == 'window':
    start = np.maximum(start, end - t // 3)
  if kind == 'one key':
    start = end - 1
  return start, end


def forest(seed, t, levels):
  """Lays random prefix trees of some levels in a row of t, an eighth is pad.

  Returns (positions, ends, mask): i32[t] each, and bool[t, t], whether a key is
  the query itself or one of its ancestors, by following parents.
  """
  rng, parents = np.random.default_rng(seed), []

  def grow(parent, level):
    for _ in range(rng.integers(1, 1 + t // 8)):
      parents.append(parent)
      parent = len(parents) - 1
    for _ in range(rng.integers(2, 4) if level < levels else 0):
      grow(parent, level + 1)

  size = t - t // 8
  while len(parents) < size:
    grow(None, 1)
  mask = np.zeros((t, t), bool)
  for i, parent in enumerate(parents[:size]):
    mask[i] = False if parent is None else mask[parent]
    mask[i, i] = True
  positions = np.maximum(mask.sum(1) - 1, 0)
  ends = (mask * np.arange(1, t + 1)[:, None]).max(0)
  return positions.astype(np.int32), ends.astype(np.int32), mask


def forests(t):
  """Returns rows of 1 to 4 levels: (k_start, k_end, k_until), mask."""
  rows = [forest(levels, t, levels) for levels in (1, 2, 3, 4)]
  positions, ends, mask = (np.stack(x) for x in zip(*rows, strict=True))
  start = np.where(mask.any(2), mask.argmax(2), 0)
  end = np.where(mask.any(2), np.arange(1, t + 1), 0)
  return tuple(jnp.asarray(x, jnp.int32) for x in (start, end, ends)), mask


def every_kind(t, s=None):
  """Returns all kinds as rows of a batch: i32[len(KINDS), t] each."""
  rows = [intervals(kind, t, s) for kind in KINDS]
  return tuple(
    jnp.asarray(np.stack(x), jnp.int32) for x in zip(*rows, strict=True)
  )
