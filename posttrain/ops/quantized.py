"""Arrays of int8 or int4 with scales, which stand for float ones.

    int8:  W ~ scale v,  one scale per column, |v| <= 127
    int4:  W ~ scale v,  one per column of each 32 rows, |v| <= 7

    v = round(W / scale),  scale = max |W| / 127 or / 7.5, over the scale's rows

A cache of keys or values [B, K, S, H] has int8 and a scale per token and head,
f32[B, K, S, 1].

Two int4 are one byte: rows i and i + 16 of a block are the low and the high
half of byte i, so that a block is unpacked where it lies. (A CPU stores an
array of dtype int4 in a byte each.) A scale of a block is bfloat16, 4.5 bits a
weight in all.

Why not qwix, whose `quantize` has the same errors: it imports flax.nnx and its
interception of modules, its products dequantize like ours where only the
weights are quantized, and it has no packed int4.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

BLOCK = 32  # rows of a scale of int4
_MOST = {'int8': 127.0, 'int4': 7.5}  # 7.5 is rounded to 7


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
  """An array, of which only `astype` has the numbers."""

  values: jax.Array  # int8[..., in, out], or uint8[..., in / 2, out]
  scale: jax.Array  # f32[..., 1, out], or bf16[..., in / 32, out]

  @property
  def kind(self) -> str:
    """'int8' or 'int4'."""
    return 'int4' if self.values.dtype == jnp.uint8 else 'int8'

  @property
  def shape(self) -> tuple[int, ...]:
    *lead, rows, columns = self.values.shape
    return *lead, rows * (2 if self.kind == 'int4' else 1), columns

  @property
  def dtype(self) -> Any:
    """That of the numbers, before they are rounded to another."""
    return jnp.dtype('float32')

  @property
  def ndim(self) -> int:
    return self.values.ndim

  @property
  def sharding(self) -> Any:
    return self.values.sharding

  def astype(self, dtype: Any) -> jax.Array:
    """Returns the numbers; the product is rounded once, to `dtype`."""
    values, scale = self.values, self.scale.astype(jnp.float32)
    if self.kind == 'int4':
      values = _blocks(values, BLOCK // 2).astype(jnp.int8)
      # Shifts of signed numbers repeat the sign.
      halves = jnp.left_shift(values, 4), values
      values = jnp.concatenate([x >> 4 for x in halves], axis=-2)
      scale = scale[..., None, :]
    return (values * scale).astype(dtype).reshape(self.shape)


def _blocks(x: jax.Array, rows: int) -> jax.Array:
  return x.reshape(*x.shape[:-2], -1, rows, x.shape[-1])


@functools.partial(jax.jit, static_argnums=(1, 2))
def quantize(x: jax.Array, kind: str, axis: int = -2) -> Quantized:
  """Quantizes a float matrix [..., in, out].

  Args:
    x: numbers; with 'int4' in is a multiple of 32.
    kind: 'int8' or 'int4'.
    axis: that which has a scale in common; -2 with 'int4'.
  """
  x, most = x.astype(jnp.float32), _MOST[kind]
  shape = x.shape
  if kind == 'int4':
    x = _blocks(x, BLOCK)
  # A factor, as divisions are not rounded alike everywhere.
  scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) * (1 / most)
  if kind == 'int4':
    scale = scale.astype(jnp.bfloat16)
  step = scale.astype(jnp.float32)
  values = jnp.round(x / jnp.where(step > 0, step, 1))
  values = jnp.clip(values, -int(most), int(most)).astype(jnp.int8)
  if kind == 'int8':
    return Quantized(values, scale)
  low, high = jnp.split(values, 2, axis=-2)
  packed = ((high << 4) | (low & 15)).astype(jnp.uint8)
  packed = packed.reshape(*shape[:-2], shape[-2] // 2, shape[-1])
  return Quantized(packed, scale[..., 0, :])


def rounded(x: Any, dtype: Any) -> Any:
  """Returns a matrix in a dtype, or a quantized one as it is."""
  return x if isinstance(x, Quantized) else x.astype(dtype)


def cast(x: Any, like: Any) -> Any:
  """Returns a matrix in the dtype, or the quantization, of another."""
  if isinstance(like, Quantized):
    return x if isinstance(x, Quantized) else quantize(x, like.kind)
  return x.astype(like.dtype)
