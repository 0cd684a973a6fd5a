"""Log probabilities of target tokens, straight from hidden states.

The output matrix and the log-softmax are one operation with its own
derivative: logits are computed, used and dropped chunk by chunk, and computed
again in the backward pass. A small problem is a single chunk, whose logits are
kept for the backward pass.

With z = softcap(h W) / tau, tau the temperature:

    lse     = log sum_v exp(z_v)            logprob = z_y - lse
    mean    = sum_v p_v z_v                 entropy = lse - mean
    d logprob / d z_v = [v = y] - p_v
    d entropy / d z_v = -p_v (z_v - mean)

Axes: T tokens (all leading dimensions, flattened), D model, V vocab.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

BLOCK_BYTES = 64 * 2**20  # bytes of logits; above, they are chunked
_MIN_CHUNK = 2048  # columns; below, the tokens are chunked as well


class _Plan(NamedTuple):
  """Static arguments: the cap on the logits and the chunk sizes."""

  softcap: float | None
  columns: int
  row_chunks: int


def linear(
  hidden: jax.Array,
  weight: jax.Array,
  targets: jax.Array,
  temperature: jax.Array | float = 1.0,
  *,
  softcap: float | None = None,
  vocab_chunk: int | None = None,
  row_chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the log probability of each target, and the entropy.

  log softmax(softcap(h W) / tau)[target],  softcap(x) = c tanh(x / c)

  Both outputs are differentiable in `hidden` and `weight`; `temperature` and
  `targets` get no gradient. First-order reverse mode only.

  Args:
    hidden: float[..., D].
    weight: f32[D, V], cast to hidden's dtype for the product, whose result
      (and gradient) is accumulated in float32.
    targets: i32[...], in [0, V).
    temperature: f32 scalar or f32[...], > 0.
    softcap: bound c on the logits' magnitude; None = none.
    vocab_chunk: columns of logits at a time; None = all if the logits fit in
      64 MiB or `row_chunk` is given, else as many as fit (at least 2048).
    row_chunk: tokens at a time; None = all, unless even 2048 columns of all
      tokens exceed 64 MiB (8192 tokens, counted over all devices) and
      `vocab_chunk` is None: then as many as fit.

  Returns:
    (logprobs f32[...], entropy f32[...]), both in nats and of the
    distribution at `temperature`.
  """
  shape, (depth, vocab) = targets.shape, weight.shape
  chex.assert_shape(hidden, (*shape, depth))
  count = targets.size
  if vocab_chunk is None and row_chunk is None:
    vocab_chunk, row_chunk = _default_chunks(count, vocab)
  row_chunks = -(-count // (row_chunk or count))
  plan = _Plan(softcap, min(vocab_chunk or vocab, vocab), row_chunks)
  temperature = jnp.asarray(temperature, jnp.float32)
  temperature = jnp.broadcast_to(temperature, shape).reshape(count)
  extra = -count % row_chunks  # rows of zeros, dropped from the result
  hidden, targets, temperature = (
    jnp.pad(x, ((0, extra), *[(0, 0)] * (x.ndim - 1)), constant_values=fill)
    for x, fill in (
      (hidden.reshape(count, depth), 0),
      (targets.reshape(count), 0),
      (jax.lax.stop_gradient(temperature), 1),
    )
  )
  logprobs, entropy = _linear_vjp(plan, hidden, weight, targets, temperature)
  return logprobs[:count].reshape(shape), entropy[:count].reshape(shape)


def logits(
  hidden: jax.Array, weight: jax.Array, *, softcap: float | None = None
) -> jax.Array:
  """Returns the logits of `linear`, at temperature 1.

  Args:
    hidden: float[..., D].
    weight: f32[D, V], cast and accumulated as in `linear`.
    softcap: as in `linear`.

  Returns:
    f32[..., V].
  """
  rows = hidden.reshape(-1, hidden.shape[-1])
  z = _tempered(softcap, rows, weight, jnp.ones(len(rows), jnp.float32))
  return z.reshape(*hidden.shape[:-1], weight.shape[1])


def _default_chunks(count, vocab):
  """Returns (columns, rows) of a block of at most `BLOCK_BYTES` of logits."""
  size = BLOCK_BYTES // 4
  columns = min(max(size // count, _MIN_CHUNK), vocab)
  # Tokens are chunked only if a block of `_MIN_CHUNK` columns is too large.
  return columns, count if count * columns <= size else size // columns


def _linear(
  plan, hidden, weight, targets, temperature
) -> tuple[jax.Array, jax.Array]:
  return _forward(plan, hidden, weight, targets, temperature)[0]


def _forward(plan, hidden, weight, targets, temperature):
  inputs = (hidden, weight, targets, temperature)
  if (plan.row_chunks, plan.columns) == (1, weight.shape[1]):
    z = _tempered(plan.softcap, hidden, weight, temperature)
    top = jnp.max(z, axis=-1)
    e = jnp.exp(z - top[:, None])
    total, weighted = jnp.sum(e, axis=-1), jnp.sum(e * z, axis=-1)
    target = jnp.take_along_axis(z, targets[:, None], axis=1)[:, 0]
  else:
    z = None
    top, total, weighted, target = _chunked_sums(plan, *inputs)
  lse, mean = top + jnp.log(total), weighted / total
  return (target - lse, lse - mean), (inputs, z, lse, mean)


def _backward(plan, residuals, cotangents):
  inputs, z, lse, mean = residuals
  hidden, weight, targets, temperature = inputs
  if z is not None:
    dz = _logit_gradient(
      plan.softcap, z, targets, temperature, lse, mean, *cotangents
    ).astype(hidden.dtype)
    d_hidden, d_weight = _products(hidden, weight, dz)
  else:
    d_hidden, d_weight = _chunked_gradients(
      plan, inputs, (lse, mean, *cotangents)
    )
  return (
    d_hidden.astype(hidden.dtype),
    d_weight.astype(weight.dtype),
    None,
    None,
  )


_linear_vjp = jax.custom_vjp(_linear, nondiff_argnums=(0,))
_linear_vjp.defvjp(_forward, _backward)


def _tempered(softcap, hidden, weight, temperature):
  """Returns z, f32[T, V]."""
  z = jnp.dot(
    hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32
  )
  if softcap is not None:
    z = softcap * jnp.tanh(z / softcap)
  return z / temperature[:, None]


def _logit_gradient(
  softcap, z, targets, temperature, lse, mean, d_logprob, d_entropy
):
  """Returns the gradient of the raw logits h W, f32[T, V]."""
  column = functools.partial(jnp.expand_dims, axis=1)
  p = jnp.exp(z - column(lse))
  dz = -p * (column(d_logprob) + column(d_entropy) * (z - column(mean)))
  hit = column(targets) == jnp.arange(z.shape[1])[None]
  dz = jnp.where(hit, dz + column(d_logprob), dz) / column(temperature)
  if softcap is not None:  # d tanh = 1 - tanh^2
    dz *= 1.0 - jnp.square(z * column(temperature) / softcap)
  return dz


def _products(hidden, weight, dz):
  """Returns (dz W^T, h^T dz), accumulated in float32."""
  weight = weight.astype(hidden.dtype)
  dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
  return dot(dz, weight.T), dot(hidden.T, dz)


def _chunks(size, chunk):
  """Returns the number of chunks, and a function index -> (start, new).

  The last chunk is shifted left to end at `size`, so no input is padded;
  `new` is False at the columns that it shares with the chunk before.
  """

  def place(i):
    start = jnp.minimum(i * chunk, size - chunk)
    return start, start + jnp.arange(chunk) >= i * chunk

  return -(-size // chunk), place


def _chunked_sums(plan, hidden, weight, targets, temperature):
  """Returns (max z, sum e^(z - max), sum z e^(z - max), z_y), each f32[T]."""
  count, size = len(hidden), len(hidden) // plan.row_chunks
  chunks, place = _chunks(weight.shape[1], plan.columns)

  def one_block(i, sums, rows):
    hidden, targets, temperature = rows
    top, total, weighted, target = sums
    start, new = place(i)
    part = jax.lax.dynamic_slice_in_dim(weight, start, plan.columns, 1)
    z = _tempered(plan.softcap, hidden, part, temperature)
    higher = jnp.maximum(top, jnp.max(z, axis=-1))
    e = jnp.where(new[None], jnp.exp(z - higher[:, None]), 0.0)
    shrink = jnp.exp(top - higher)
    local = targets - start
    inside = (local >= 0) & (local < plan.columns)
    local = jnp.clip(local, 0, plan.columns - 1)
    hit = jnp.take_along_axis(z, local[:, None], axis=1)[:, 0]
    return (
      higher,
      total * shrink + jnp.sum(e, axis=-1),
      weighted * shrink + jnp.sum(e * z, axis=-1),
      jnp.where(inside, hit, target),
    )

  def one_row_chunk(r, out):
    rows = _rows(r, plan.row_chunks, hidden, targets, temperature)
    zeros = jnp.zeros(size, jnp.float32)
    # -inf would make top - higher NaN only if z were -inf as well.
    init = (jnp.full(size, -jnp.inf), zeros, zeros, zeros)
    sums = jax.lax.fori_loop(
      0, chunks, functools.partial(one_block, rows=rows), init
    )
    return tuple(
      jax.lax.dynamic_update_index_in_dim(x, part, r, 1)
      for x, part in zip(out, sums, strict=True)
    )

  empty = (jnp.zeros((size, plan.row_chunks), jnp.float32),) * 4
  out = jax.lax.fori_loop(0, plan.row_chunks, one_row_chunk, empty)
  return tuple(x.reshape(count) for x in out)


def _chunked_gradients(plan, inputs, per_row):
  """Returns the gradients of hidden and weight, f32.

  Args:
    plan: the chunk sizes.
    inputs: hidden, weight, targets, temperature.
    per_row: lse, mean and the cotangents, f32[T] each.
  """
  hidden, weight, targets, temperature = inputs
  chunks, place = _chunks(weight.shape[1], plan.columns)

  def one_block(step, carry):
    d_hidden, d_weight = carry
    r = step // chunks
    start, new = place(step % chunks)
    h, y, t, *rest = _rows(
      r, plan.row_chunks, hidden, targets, temperature, *per_row
    )
    part = jax.lax.dynamic_slice_in_dim(weight, start, plan.columns, 1)
    z = _tempered(plan.softcap, h, part, t)
    dz = _logit_gradient(plan.softcap, z, y - start, t, *rest)
    dz = jnp.where(new[None], dz, 0.0).astype(h.dtype)
    more_hidden, more_weight = _products(h, part, dz)
    return (
      _add(d_hidden, more_hidden[:, None], (0, r, 0)),
      _add(d_weight, more_weight, (0, start)),
    )

  strided = (-1, plan.row_chunks, hidden.shape[1])
  init = (
    jnp.zeros(hidden.shape, jnp.float32).reshape(strided),
    jnp.zeros(weight.shape, jnp.float32),
  )
  d_hidden, d_weight = jax.lax.fori_loop(
    0, plan.row_chunks * chunks, one_block, init
  )
  return d_hidden.reshape(hidden.shape), d_weight


def _rows(r, chunks, *arrays):
  """Returns rows r, r + chunks, r + 2 chunks, ... of each array.

  Tokens may be sharded in contiguous blocks: a strided chunk takes equally many
  from each device, so nothing is gathered.
  """
  return tuple(
    jax.lax.dynamic_index_in_dim(
      x.reshape(-1, chunks, *x.shape[1:]), r, 1, keepdims=False
    )
    for x in arrays
  )


def _add(array, part, start):
  old = jax.lax.dynamic_slice(array, start, part.shape)
  return jax.lax.dynamic_update_slice(array, old + part, start)
