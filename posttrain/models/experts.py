"""A mixture of experts: each token visits the best k of E gated MLPs.

    p = softmax(x W_r),   y = sum over the k largest p_e of  weight_e mlp_e(x)

1. The router computes p in float32; the weights are p, or p divided by the sum
   of the k.
2. The choices of all tokens are sorted by expert, so that an expert's rows are
   consecutive; pads, and on a mesh the other devices' experts, come last and
   are not computed. No token is dropped.
3. `ops.grouped_matmul` multiplies the rows; they return to their tokens, which
   add them up.

On a mesh, the axis `expert` splits the experts, and the batch like `data`: its
devices gather their tokens, compute their own experts for all of them, and add
up the results while each takes its tokens back. Or they send a token to the
devices of its experts alone: see `exchange`.

Axes: B rows, T tokens of a row, N tokens, E experts, k choices of a token, M =
N k, D model, F an expert's width.

References: Shazeer et al., arXiv 1701.06538; Fedus et al., Switch Transformers,
arXiv 2101.03961.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from posttrain import sharding
from posttrain.models import lora
from posttrain.ops import dispatch, grouped_matmul, quantized

NAMES = ('gate', 'up', 'down')

Stats = dict[str, jax.Array]


def weigh(logits: jax.Array, index: jax.Array, normalize: bool) -> jax.Array:
  """Returns the weights f32[..., k] of each token's experts.

  Args:
    logits: f32[..., E].
    index: i32[..., k], the experts.
    normalize: whether a token's weights sum to 1, which is a softmax over the
      chosen logits.
  """
  chosen = jnp.take_along_axis(logits, index, axis=-1)
  if normalize:
    return jax.nn.softmax(chosen)
  return jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def flips(index: jax.Array, routes: jax.Array) -> Stats:
  """Counts the tokens of which other experts were recorded.

  Args:
    index: i32[..., k], the choices.
    routes: i32[..., k], the recorded ones; -1 = none, as for pads.

  Returns:
    recorded f32[], the tokens with recorded choices; flipped f32[], those of
    them whose sets differ.
  """
  recorded = routes[..., 0] >= 0
  differs = jnp.any(jnp.sort(index) != jnp.sort(routes), axis=-1)
  return {
    'recorded': jnp.sum(recorded, dtype=jnp.float32),
    'flipped': jnp.sum(recorded & differs, dtype=jnp.float32),
  }


def statistics(logits: jax.Array, index: jax.Array) -> Stats:
  """Returns sums over tokens, from which `metrics` and `balance` are computed.

  Args:
    logits: f32[..., E].
    index: i32[..., k], the choices; those of a pad are E.

  Returns:
    load f32[E], choices of each expert; probs f32[E], sums of p; entropy f32[],
    the sum of the entropies of p, nats; tokens f32[].
  """
  chosen = jax.nn.one_hot(index, logits.shape[-1])
  valid = (index[..., :1] < logits.shape[-1]).astype(jnp.float32)
  log_p = jax.nn.log_softmax(logits)
  p = jnp.exp(log_p) * valid
  tokens = tuple(range(index.ndim - 1))
  return {
    'load': jnp.sum(chosen, axis=(*tokens, -2)),
    'probs': jnp.sum(p, axis=tokens),
    'entropy': -jnp.sum(p * log_p),
    'tokens': jnp.sum(valid),
  }


def balance(stats: Stats) -> jax.Array:
  """Computes the balancing loss of each layer: f32[...].

      E sum_e f_e P_e,   f the share of choices, P the mean of p

  1 if all experts are chosen alike, E if one is. Only P has a gradient. f and P
  are over the tokens of `stats`. Without tokens it is 0.
  """
  load, probs = stats['load'], stats['probs']
  choices = jnp.sum(load, axis=-1, keepdims=True)
  share = jax.lax.stop_gradient(load / jnp.maximum(choices, 1))
  mean = probs / jnp.maximum(stats['tokens'], 1)[..., None]
  return load.shape[-1] * jnp.sum(share * mean, axis=-1)


def metrics(stats: Stats) -> dict[str, tuple[jax.Array, jax.Array]]:
  """Returns metrics of stacked layers, as (sum, count) pairs.

  `router/entropy` of p in nats, mean over tokens; means over micro-batches and
  layers of `router/balance` and of `router/max_load`, the largest load of an
  expert by the mean load. With recorded choices also `router/flipped`, see
  `flips`, over tokens and layers.
  """
  stats = jax.lax.stop_gradient(stats)
  mean = jnp.mean(stats['load'], axis=-1)
  layers = jnp.sum(mean > 0).astype(jnp.float32)
  peak = jnp.max(stats['load'], axis=-1) / jnp.where(mean > 0, mean, 1)
  pairs = {
    'router/entropy': (jnp.sum(stats['entropy']), jnp.sum(stats['tokens'])),
    'router/balance': (jnp.sum(balance(stats)), layers),
    'router/max_load': (jnp.sum(peak), layers),
  }
  if 'recorded' in stats:
    flipped = jnp.sum(stats['flipped']), jnp.sum(stats['recorded'])
    pairs['router/flipped'] = flipped
  return pairs


class Order(NamedTuple):
  """The choices of N tokens, sorted by expert."""

  rows: jax.Array  # i32[M], the choice, n k + j, at each place
  places: jax.Array  # i32[M], the place of each choice
  sizes: jax.Array  # i32[E], choices of each expert


def sort(index: jax.Array, experts: int) -> Order:
  """Sorts choices by expert; those of no expert, `experts` or more, are last.

  Args:
    index: i32[N, k], the experts.
    experts: E.
  """
  flat = index.reshape(-1)
  rows = jnp.argsort(flat, stable=True)
  places = jnp.zeros_like(rows).at[rows].set(jnp.arange(len(rows)))
  ends = jnp.searchsorted(flat[rows], jnp.arange(experts), side='right')
  return Order(rows, places, jnp.diff(ends, prepend=0))


# Each other's gradients. A gradient that jax derives adds up rows one by one.
@jax.custom_vjp
def spread(x: jax.Array, rows: jax.Array, places: jax.Array) -> jax.Array:
  """Returns each choice's token, [M, D] in order, from tokens [N, D]."""
  return x[rows // (len(rows) // len(x))]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def collect(
  y: jax.Array, rows: jax.Array, places: jax.Array, tokens: int
) -> jax.Array:
  """Returns the sum of each token's choices, [N, D], from y [M, D]."""
  return jnp.sum(y[places].reshape(tokens, -1, y.shape[1]), axis=1)


spread.defvjp(
  lambda x, rows, places: (spread(x, rows, places), (rows, places, len(x))),
  lambda saved, g: (collect(g, *saved), None, None),
)
collect.defvjp(
  lambda y, rows, places, n: (collect(y, rows, places, n), (rows, places)),
  lambda n, saved, g: (spread(g, *saved), None, None),
)


def product(x: jax.Array, kernel: Any, sizes: jax.Array) -> jax.Array:
  """Multiplies sorted rows with the kernels of their experts.

  Args:
    x: float[M, in].
    kernel: float[E, in, out], which may be quantized, or `lora.Adapted`.
    sizes: i32[E].
  """

  def times(x, w):
    return grouped_matmul.grouped_matmul(x, w, sizes)

  if isinstance(kernel, lora.Adapted):
    low = kernel.scale * times(x, kernel.a)
    return times(x, kernel.kernel) + times(low, kernel.b)
  return times(x, kernel)


ALPHA = 1.702  # of the bounded gate


def apply(
  params: Any,
  x: jax.Array,
  index: jax.Array,
  weights: jax.Array,
  clamp: float | None = None,
) -> jax.Array:
  """Computes the experts of tokens, and adds up their results.

  Args:
    params: `kernel` of `gate`, `up` and `down`, see `product`; and `bias`,
      float[E, out], where they have one.
    x: float[..., D].
    index: i32[..., k]; outside [0, E) = no expert.
    weights: f32[..., k].
    clamp: see `schema.Experts`.

  Returns:
    float[..., D], 0 for a token without expert.
  """
  shape = x.shape
  x, index, weights = (y.reshape(-1, y.shape[-1]) for y in (x, index, weights))
  kernel = params['gate']['kernel']
  experts = jax.tree.leaves(kernel)[0].shape[0]
  index = jnp.where((index >= 0) & (index < experts), index, experts)
  order = sort(index, experts)

  def times(y, name):
    z = product(y, params[name]['kernel'], order.sizes)
    if 'bias' in params[name]:
      # As a product its gradient is one, too.
      owners = index.reshape(-1)[order.rows]
      bias = params[name]['bias'].astype(z.dtype)
      z += jax.nn.one_hot(owners, experts, dtype=z.dtype) @ bias
    return z

  rows = spread(x, order.rows, order.places)
  # Named for `transformer.REMAT`.
  gate = checkpoint_name(times(rows, 'gate'), 'kept')
  up = checkpoint_name(times(rows, 'up'), 'kept')
  if clamp is None:
    hidden = nn.silu(gate) * up
  else:
    gate = jnp.minimum(gate, clamp)
    hidden = gate * nn.sigmoid(ALPHA * gate)
    hidden *= 1 + jnp.clip(up, -clamp, clamp)
  y = checkpoint_name(times(hidden, 'down'), 'kept')  # 0 without an expert
  y *= weights.astype(x.dtype).reshape(-1)[order.rows, None]
  return collect(y, order.rows, order.places, len(x)).reshape(shape)


def axes(name: str, whole: bool = False) -> tuple[str | None, ...]:
  """Returns the mesh axes of a kernel [E, in, out] of `NAMES`.

  Args:
    name: the kernel's name.
    whole: whether `fsdp` does not split it, as in a decode view.
  """
  split = sharding.ROWS if name == 'down' else sharding.COLUMNS
  return sharding.EXPERT, *(
    None if whole and axis == sharding.FSDP else axis for axis in split
  )


def exchange(
  x: jax.Array, index: jax.Array, weights: jax.Array, own: int, ragged: bool
) -> tuple[tuple[jax.Array, ...], Callable[[jax.Array], jax.Array]]:
  """Brings tokens to the devices of `expert`, on each of these.

  All tokens to all devices, or, if `ragged`, each token once to every device
  that has experts of it. A device has a block for the tokens of each other one,
  so that no token is dropped; where all visit one device, its blocks are full.

  Args:
    x: float[B, T, D], the device's tokens.
    index: i32[B, T, k]; E = a pad.
    weights: f32[B, T, k].
    own: experts of a device.
    ragged: see `schema.Model`.

  Returns:
    (x, index and weights of P B T tokens on P devices, index -1 where none
    arrives; a function from their results to the sums of these over the
    devices, [B, T, D], of the device's own tokens).
  """
  axis, shape = sharding.EXPERT, x.shape
  if not ragged:
    send = functools.partial(lax.all_gather, axis_name=axis, tiled=True)
    back = functools.partial(lax.psum_scatter, axis_name=axis, tiled=True)
    return (send(x), send(index), send(weights)), back
  x, index, weights = (y.reshape(-1, y.shape[-1]) for y in (x, index, weights))
  ways = lax.axis_size(axis)
  devices = jnp.arange(ways)
  visited = jax.nn.one_hot(index // own, ways).any(axis=1)
  order = sort(jnp.where(visited, devices[None], ways), ways)
  sizes, blocks = order.sizes, len(x) * devices
  starts = jnp.cumsum(sizes) - sizes
  arriving, to_starts, to_blocks = (
    lax.all_to_all(y, axis, 0, 0) for y in (sizes, starts, blocks)
  )
  move = functools.partial(lax.ragged_all_to_all, axis_name=axis)

  def send(y):
    y = spread(y, order.rows, order.places)
    return move(y, jnp.full_like(y, -1), starts, sizes, to_blocks, arriving)

  def back(y):
    y = move(y, jnp.zeros_like(y), blocks, arriving, to_starts, sizes)
    return collect(y, order.rows, order.places, len(x)).reshape(shape)

  return (send(x), send(index), send(weights)), back


def mix(
  params: Any,
  x: jax.Array,
  index: jax.Array,
  weights: jax.Array,
  whole: bool = False,
  clamp: float | None = None,
  ragged: bool = False,
) -> jax.Array:
  """Computes `apply` of rows, on the devices of the current mesh.

  Args:
    params: as of `apply`.
    x: float[B, T, D].
    index: i32[B, T, k]; E = a pad.
    weights: f32[B, T, k].
    whole: see `axes`.
    clamp: as of `apply`.
    ragged: see `schema.Model`.
  """
  if sharding.current() is None:
    return apply(params, x, index, weights, clamp)

  def place(kernel, split):
    if not isinstance(kernel, lora.Adapted):
      return jax.tree.map(
        # A scale that a dimension has in common is whole.
        lambda w: PartitionSpec(
          *(a if n > 1 else None for n, a in zip(w.shape, split, strict=True))
        ),
        kernel,
      )
    return dataclasses.replace(
      kernel,
      kernel=place(kernel.kernel, split),
      a=PartitionSpec(*split[:2]),
      b=PartitionSpec(split[0], None, split[2]),
    )

  places = {}
  for name in NAMES:
    split = axes(name, whole)
    places[name] = {'kernel': place(params[name]['kernel'], split)}
    if 'bias' in params[name]:
      columns = None if name == 'down' else sharding.TENSOR
      places[name]['bias'] = PartitionSpec(split[0], columns)
  rows = sharding.fitting(x.shape[:1], (sharding.BATCH_AXES,))
  ragged = ragged and dispatch.platform() != 'cpu'

  def gather(w, place):
    for i, axis in enumerate(place):
      if axis == sharding.FSDP:
        w = lax.all_gather(w, axis, axis=i, tiled=True)
    return w

  def local(params, *tokens):
    params = jax.tree.map(
      lambda w: quantized.rounded(w, tokens[0].dtype),
      params,
      is_leaf=lambda w: isinstance(w, quantized.Quantized),
    )
    params = jax.tree.map(gather, params, places)
    if 'bias' in (down := params['down']):  # is added once
      is_first = lax.axis_index(sharding.TENSOR) == 0
      down['bias'] = jnp.where(is_first, down['bias'], 0)
    own = jax.tree.leaves(params['gate'])[0].shape[0]
    sums, back = (sharding.EXPERT, sharding.TENSOR), lambda y: y
    if rows[0]:
      sums, (tokens, back) = sharding.TENSOR, exchange(*tokens, own, ragged)
    x, index, weights = tokens
    first = lax.axis_index(sharding.EXPERT) * own
    return lax.psum(back(apply(params, x, index - first, weights, clamp)), sums)

  return sharding.split(local, (places, rows, rows, rows), rows)(
    params, x, index, weights
  )
