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
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from posttrain import sharding

BLOCK_BYTES = 64 * 2**20  # bytes of logits; above, they are chunked
_MIN_CHUNK = 2048  # columns; below, the tokens are chunked as well


class _Plan(NamedTuple):
  """Static arguments: the cap on the logits, chunk sizes, mesh axes.

  The axes are those of the current mesh that split tokens, model dimension and
  vocabulary; none on one device.
  """

  softcap: float | None
  vocab_chunk: int | None
  row_chunk: int | None
  tokens: tuple[str, ...] = ()
  model: str | None = None
  vocab: str | None = None


def linear(
  hidden: jax.Array,
  weight: jax.Array,
  targets: jax.Array,
  temperature: jax.Array | float = 1.0,
  *,
  softcap: float | None = None,
  vocab_chunk: int | None = None,
  row_chunk: int | None = None,
  reads_top: bool = False,
) -> tuple[jax.Array, ...]:
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
      tokens exceed 64 MiB (8192 tokens) and `vocab_chunk` is None: then as
      many as fit.
    reads_top: whether to return as well which targets are the most likely.

  Chunks are of one device. On the current mesh (`sharding.use`) the batch axes
  split the first dimension of the tokens, if they divide it, and `tensor` the
  vocabulary; each device gathers its columns of the weight over `fsdp` once,
  in hidden's dtype, and the gradient of the weight is summed on each device
  and reduce-scattered once, in float32.

  Returns:
    (logprobs f32[...], entropy f32[...]), both in nats and of the
    distribution at `temperature`; with `reads_top` also f32[...], 1 where no
    token has a larger logit than the target, else 0, without gradient.
  """
  shape, (depth, vocab) = targets.shape, weight.shape
  chex.assert_shape(hidden, (*shape, depth))
  temperature = jnp.asarray(temperature, jnp.float32)
  temperature = jnp.broadcast_to(temperature, shape)
  plan = _Plan(softcap, vocab_chunk, row_chunk)
  if sharding.current() is not None:
    axes = (sharding.BATCH_AXES, sharding.FSDP, sharding.TENSOR)
    first = shape[0] if shape else 1
    tokens, *others = sharding.fitting((first, depth, vocab), axes)
    plan = _Plan(*plan[:3], tokens or (), *others)
  outputs: Any = _linear(
    plan, hidden, weight, targets, jax.lax.stop_gradient(temperature)
  )
  return outputs if reads_top else outputs[:2]


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
  z = z.reshape(*hidden.shape[:-1], weight.shape[1])
  middle = (None,) * (z.ndim - 2)
  return sharding.pin(z, sharding.BATCH_AXES, *middle, sharding.TENSOR)


def _default_chunks(count, vocab):
  """Returns (columns, rows) of a block of at most `BLOCK_BYTES` of logits."""
  size = BLOCK_BYTES // 4
  columns = min(max(size // count, _MIN_CHUNK), vocab)
  # Tokens are chunked only if a block of `_MIN_CHUNK` columns is too large.
  return columns, count if count * columns <= size else size // columns


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(
  plan, hidden, weight, targets, temperature
) -> tuple[jax.Array, jax.Array, jax.Array]:
  return _forward(plan, hidden, weight, targets, temperature)[0]


def _specs(plan):
  """Returns the specs of tokens, of the weight, and of kept logits."""
  return (
    PartitionSpec(plan.tokens or None),
    PartitionSpec(plan.model, plan.vocab),
    PartitionSpec(plan.tokens or None, plan.vocab),
  )


def _forward(plan, *inputs):
  def local(hidden, weight, targets, temperature):
    """Returns the outputs in targets' shape, z or None, (lse, mean)."""
    shape, weight = targets.shape, _gathered(plan, hidden, weight)
    chunks = _chunk_sizes(plan, targets.size, weight.shape[1])
    first = _first_column(plan, weight)
    inputs = _flat(chunks, hidden, targets - first, temperature)
    if chunks == (weight.shape[1], 1):
      hidden, targets, temperature = inputs
      z = _tempered(plan.softcap, hidden, weight, temperature)
      top = jnp.max(z, axis=-1)
      e = jnp.exp(z - top[:, None])
      total, weighted = jnp.sum(e, axis=-1), jnp.sum(e * z, axis=-1)
      inside, target = _pick(z, targets)
      target = jnp.where(inside, target, 0.0)
    else:
      z = None
      top, total, weighted, target = _chunked_sums(
        plan, chunks, weight, *inputs
      )
    if plan.vocab:
      highest = jax.lax.pmax(top, plan.vocab)
      shrink = jnp.exp(top - highest)
      total, weighted, target = jax.lax.psum(
        jnp.stack((total * shrink, weighted * shrink, target)), plan.vocab
      )
      top = highest
    lse, mean = top + jnp.log(total), weighted / total
    outputs = target - lse, lse - mean, (target >= top).astype(jnp.float32)
    outputs = tuple(x[: math.prod(shape)].reshape(shape) for x in outputs)
    return outputs, z, (lse, mean)

  tokens, weight, logits = _specs(plan)
  in_specs = tokens, weight, tokens, tokens
  split = sharding.split(local, in_specs, (tokens, logits, tokens))
  outputs, z, sums = split(*inputs)
  return outputs, (inputs, z, sums)


def _backward(plan, residuals, cotangents):
  def local(inputs, z, sums, cotangents):
    """Returns the gradients of hidden and weight."""
    hidden, weight, targets, temperature = inputs
    part, weight = weight, _gathered(plan, hidden, weight)
    chunks = _chunk_sizes(plan, targets.size, weight.shape[1])
    first = _first_column(plan, weight)
    rows, *per_row = _flat(
      chunks, hidden, targets - first, temperature, *cotangents
    )
    per_row = *per_row[:2], *sums, *per_row[2:]
    if z is not None:
      dz = _logit_gradient(plan.softcap, z, *per_row).astype(hidden.dtype)
      d_hidden, d_weight = _products(rows, weight, dz)
    else:
      d_hidden, d_weight = _chunked_gradients(
        plan, chunks, rows, weight, per_row
      )
    if plan.vocab:
      d_hidden = jax.lax.psum(d_hidden, plan.vocab)
    d_hidden = d_hidden[: targets.size].reshape(hidden.shape)
    return (
      d_hidden.astype(hidden.dtype),
      _reduced(plan, d_weight).astype(part.dtype),
    )

  inputs, z, sums = residuals
  tokens, weight, logits = _specs(plan)
  in_specs = (tokens, weight, tokens, tokens), logits, tokens, tokens
  split = sharding.split(local, in_specs, (tokens, weight))
  return *split(inputs, z, sums, cotangents[:2]), None, None


def _gathered(plan, hidden, weight):
  """Returns the device's columns of the weight, whole in D."""
  if plan.model is None:
    return weight
  weight = weight.astype(hidden.dtype)
  return jax.lax.all_gather(weight, plan.model, axis=0, tiled=True)


def _reduced(plan, d_weight):
  """Returns the device's part of the weight's gradient, over all tokens."""
  others = tuple(axis for axis in plan.tokens if axis != plan.model)
  if plan.model in plan.tokens:
    d_weight = jax.lax.psum_scatter(
      d_weight, plan.model, scatter_dimension=0, tiled=True
    )
  elif plan.model:  # every device has all tokens
    size = d_weight.shape[0] // jax.lax.axis_size(plan.model)
    start = jax.lax.axis_index(plan.model) * size
    d_weight = jax.lax.dynamic_slice_in_dim(d_weight, start, size)
  return jax.lax.psum(d_weight, others) if others else d_weight


def _first_column(plan, weight):
  """Returns the index in the vocabulary of the device's first column."""
  if not plan.vocab:
    return 0
  return jax.lax.axis_index(plan.vocab) * weight.shape[1]


def _chunk_sizes(plan, count, vocab):
  """Returns (columns, number of row chunks) of tokens and columns."""
  columns, rows = plan.vocab_chunk, plan.row_chunk
  if columns is None and rows is None:
    columns, rows = _default_chunks(count, vocab)
  return min(columns or vocab, vocab), -(-count // (rows or count))


def _flat(chunks, hidden, targets, temperature, *cotangents):
  """Flattens tokens, and pads them with zeros to whole chunks of rows."""
  _, row_chunks = chunks
  extra = -targets.size % row_chunks

  def flat(x, fill=0, tail=()):
    x = x.reshape(-1, *tail)
    pads = ((0, extra), *((0, 0) for _ in tail))
    return jnp.pad(x, pads, constant_values=fill)

  return (
    flat(hidden, tail=hidden.shape[-1:]),
    flat(targets),
    flat(temperature, fill=1),
    *(flat(x) for x in cotangents),
  )


_linear.defvjp(_forward, _backward)


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


def _pick(z, index):
  """Returns (whether an index is a column of z, its logit), [T] each."""
  inside = (index >= 0) & (index < z.shape[1])
  index = jnp.clip(index, 0, z.shape[1] - 1)
  return inside, jnp.take_along_axis(z, index[:, None], axis=1)[:, 0]


def _products(hidden, weight, dz):
  """Returns (dz W^T, h^T dz), accumulated in float32."""
  weight = weight.astype(hidden.dtype)
  dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
  return dot(dz, weight.T), dot(hidden.T, dz)


def _blocks(size, chunk):
  """Returns the number of blocks, and a function index -> (start, new).

  The last block is shifted left to end at `size`, so no input is padded;
  `new` is False at the columns that it shares with the block before.
  """

  def place(i):
    start = jnp.minimum(i * chunk, size - chunk)
    return start, start + jnp.arange(chunk) >= i * chunk

  return -(-size // chunk), place


def _chunked_sums(plan, chunks, weight, hidden, targets, temperature):
  """Returns (max z, sum e^(z - max), sum z e^(z - max), z_y), each f32[T]."""
  count, (columns, row_chunks) = len(hidden), chunks
  size = count // row_chunks
  blocks, place = _blocks(weight.shape[1], columns)

  def one_block(i, sums, rows):
    hidden, targets, temperature = rows
    top, total, weighted, target = sums
    start, new = place(i)
    part = jax.lax.dynamic_slice_in_dim(weight, start, columns, 1)
    z = _tempered(plan.softcap, hidden, part, temperature)
    higher = jnp.maximum(top, jnp.max(z, axis=-1))
    e = jnp.where(new[None], jnp.exp(z - higher[:, None]), 0.0)
    shrink = jnp.exp(top - higher)
    inside, hit = _pick(z, targets - start)
    return (
      higher,
      total * shrink + jnp.sum(e, axis=-1),
      weighted * shrink + jnp.sum(e * z, axis=-1),
      jnp.where(inside, hit, target),
    )

  def one_row_chunk(rows):
    zeros = jnp.zeros(size, jnp.float32)
    # -inf would make top - higher NaN only if z were -inf as well.
    init = (jnp.full(size, -jnp.inf), zeros, zeros, zeros)
    return jax.lax.fori_loop(
      0, blocks, functools.partial(one_block, rows=rows), init
    )

  rows = tuple(
    x.reshape(row_chunks, size, *x.shape[1:])
    for x in (hidden, targets, temperature)
  )
  return tuple(x.reshape(count) for x in jax.lax.map(one_row_chunk, rows))


def _chunked_gradients(plan, chunks, hidden, weight, per_row):
  """Returns the gradients of hidden and weight, f32.

  Args:
    plan: the options.
    chunks: the chunk sizes.
    hidden: float[T, D].
    weight: float[D, V].
    per_row: targets, temperature, lse, mean and the cotangents, [T] each.
  """
  columns, row_chunks = chunks
  blocks, place = _blocks(weight.shape[1], columns)

  def one_block(i, carry, rows):
    d_hidden, d_weight = carry
    h, y, *rest = rows
    start, new = place(i)
    part = jax.lax.dynamic_slice_in_dim(weight, start, columns, 1)
    z = _tempered(plan.softcap, h, part, rest[0])
    dz = _logit_gradient(plan.softcap, z, y - start, *rest)
    dz = jnp.where(new[None], dz, 0.0).astype(h.dtype)
    more_hidden, more_weight = _products(h, part, dz)
    old = jax.lax.dynamic_slice_in_dim(d_weight, start, columns, 1)
    return d_hidden + more_hidden, jax.lax.dynamic_update_slice_in_dim(
      d_weight, old + more_weight, start, 1
    )

  def one_row_chunk(d_weight, rows):
    d_hidden, d_weight = jax.lax.fori_loop(
      0,
      blocks,
      functools.partial(one_block, rows=rows),
      (jnp.zeros(rows[0].shape, jnp.float32), d_weight),
    )
    return d_weight, d_hidden

  rows = tuple(
    x.reshape(row_chunks, -1, *x.shape[1:]) for x in (hidden, *per_row)
  )
  zeros = jnp.zeros(weight.shape, jnp.float32)
  d_weight, d_hidden = jax.lax.scan(one_row_chunk, zeros, rows)
  return d_hidden.reshape(hidden.shape), d_weight
