"""Products of sorted rows with the matrix of their group: experts.

    out[i] = x[i] w[g],   the rows of group g are consecutive

1. On a TPU it is `jax.lax.ragged_dot`, which XLA there computes in proportion
   to the rows, except the gradient of the matrices, for which it multiplies all
   rows for each group: that is the kernel of jax's `megablox`.
2. On a CPU or GPU XLA's `ragged_dot` multiplies all rows with all matrices, and
   on a GPU holds all products. There a loop over the groups that have rows
   reads a matrix once, and an inner loop multiplies it with tiles of its rows.
   The last tile of a group reaches into the next one, which then overwrites it.
   So groups of c rows or more compute at most 1.3 times the products of their
   rows, see `tile`; groups without rows cost nothing.

Axes: M rows, G groups, D inputs, F outputs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from posttrain.ops import dispatch, quantized

MAX_TILE = 64  # larger ones are not faster on a CPU
_ROWS = 128  # of a tile of `megablox`


def grouped_matmul(x: jax.Array, w: Any, sizes: jax.Array) -> jax.Array:
  """Multiplies each row with the matrix of its group.

  Args:
    x: float[M, D], sorted by group.
    w: float[G, D, F], or a `Quantized` one, which has no gradient.
    sizes: i32[G], rows of each group; their sum is at most M.

  Returns:
    float[M, F] in x's dtype; rows after the last group are 0, and so are their
    gradients.
  """
  if dispatch.platform() == 'tpu':
    return _ragged(x, w.astype(x.dtype), sizes)
  return _tiled(x, quantized.rounded(w, x.dtype), sizes)


@jax.custom_vjp
def _ragged(x, w, sizes):
  return lax.ragged_dot(x, w, sizes)


def _ragged_backward(saved, g):
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

  x, w, sizes = saved
  d_x = lax.ragged_dot(g, w.mT, sizes)
  pad = ((0, -len(x) % _ROWS), (0, 0))
  x, g = jnp.pad(x, pad), jnp.pad(g, pad)
  tiles = _ROWS, *(min(size, 4 * _ROWS) for size in w.shape[1:])
  interpret = dispatch.platform() != 'tpu'  # in tests

  d_w = tgmm(x.T, g, sizes, w.dtype, tiles, interpret=interpret)
  return d_x, d_w, None


_ragged.defvjp(lambda *args: (_ragged(*args), args), _ragged_backward)


def tile(rows: int, groups: int) -> int:
  """Returns the rows of a tile: a power of 2.

  With c = rows / groups it is at most 1 + 0.3 c, so that tiles which are not
  full compute at most 0.3 c rows too many per group.
  """
  most = 1 + 3 * rows // (10 * groups)
  return min(MAX_TILE, 1 << most.bit_length() - 1)


def _loop(sizes: jax.Array, rows: int, out: jax.Array, visit: Callable):
  """Visits the groups that have rows.

  Args:
    sizes: i32[G].
    rows: of a tile.
    out: the result, which each visit updates.
    visit: called with (group, tiles, out), where `tiles(out, body)` calls
      `body(start, valid, out)` with the first row of each tile and bool[rows,
      1], the rows that are the group's.
  """
  ends, groups = jnp.cumsum(sizes), jnp.argsort(sizes == 0, stable=True)

  def group(i, out):
    g = groups[i]
    end, size = ends[g], sizes[g]

    def tiles(out, body):
      def one(t, out):
        start = end - size + t * rows
        valid = start + jnp.arange(rows)[:, None] < end
        return body(start, valid, out)

      return lax.fori_loop(0, -(-size // rows), one, out)

    return visit(g, tiles, out)

  return lax.fori_loop(0, jnp.sum(sizes > 0), group, out)


def _rows(x, start, valid):
  part = lax.dynamic_slice_in_dim(x, start, len(valid))
  return jnp.where(valid, part, 0)


def _times(x, w, sizes, rows, transposed):
  """Returns x w or x w^T of each group."""
  width = w.shape[1 if transposed else 2]
  padded = jnp.pad(x, ((0, rows), (0, 0)))

  def visit(g, tiles, out):
    own = jax.tree.map(
      lambda w: lax.dynamic_index_in_dim(w, g, keepdims=False), w
    ).astype(x.dtype)

    def body(start, valid, out):
      part = _rows(padded, start, valid)
      y = part @ (own.T if transposed else own)
      return lax.dynamic_update_slice_in_dim(out, y, start, 0)

    return tiles(out, body)

  out = jnp.zeros((len(padded), width), x.dtype)
  return _loop(sizes, rows, out, visit)[: len(x)]


@jax.custom_vjp
def _tiled(x, w, sizes):
  return _times(x, w, sizes, tile(len(x), w.shape[0]), False)


def _backward(saved, g):
  x, w, sizes = saved
  rows = tile(len(x), w.shape[0])
  d_x = _times(g, w, sizes, rows, True)
  if isinstance(w, quantized.Quantized):
    return d_x, None, None
  x_padded, g_padded = (jnp.pad(y, ((0, rows), (0, 0))) for y in (x, g))

  def visit(group, tiles, out):
    def body(start, valid, total):
      left = lax.dynamic_slice_in_dim(x_padded, start, rows)
      y = left.T @ _rows(g_padded, start, valid)
      return total + y.astype(jnp.float32)

    total = tiles(jnp.zeros(w.shape[1:], jnp.float32), body)
    return lax.dynamic_update_index_in_dim(out, total.astype(w.dtype), group, 0)

  d_w = _loop(sizes, rows, jnp.zeros_like(w), visit)
  return d_x, d_w, None


_tiled.defvjp(lambda *args: (_tiled(*args), args), _backward)
