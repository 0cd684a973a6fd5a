"""Gated DeltaNet: the functions of a layer's recurrence, without parameters.

The state of a value head is a matrix S [K, V] that maps keys to values. Token t
lets it decay, corrects what it returns for the token's key, and reads it:

    S_t = exp(g_t) S_(t-1) + k_t (x) beta_t (v_t - exp(g_t) k_t S_(t-1))
    out_t = q_t S_t

1. `convolve` mixes each channel of q, k and v with its last inputs.
2. `normalize` and `gates` compute q, k, g and beta.
3. `recurrent` takes one token, `chunked` takes all tokens of rows: the same
   function, whose state goes in and comes out.
4. `gated_norm` is applied to what has been read.

The first token of a sequence (position 0) has g = -inf: it drops the state, so
packed segments do not mix, and a slot's old state needs no clearing. A pad has
g = beta = 0, which leaves the state as it is.

Of a row in `sharding.pieces`, `convolve` brings the last inputs of the piece
before, and `chunked` the state after it.

Axes: B rows, T tokens, E channels, W width of the convolution, J key heads, N
value heads (a multiple of J), K and V sizes of their heads, I chunks, C tokens
of a chunk, R value heads of a key head.

References: Yang et al., Gated Delta Networks, arXiv 2412.06464; Yang et al.,
Parallelizing Linear Transformers with the Delta Rule, arXiv 2406.06484.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from posttrain import sharding

CHUNK = 64  # tokens
_EPS = 1e-6  # of the norms of queries and keys
_BLOCK = 8  # rows of a block that `_inverse` inverts by powers


def convolve(
  x: jax.Array,
  weight: jax.Array,
  positions: jax.Array,
  valid: jax.Array,
  buffer: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Convolves each channel with its last W inputs, and applies silu.

      y_t = silu(sum_w weight_w x_(t - W + 1 + w)),  over x of t's sequence

  Args:
    x: float[B, T, E].
    weight: float[W, E], rounded to x's dtype.
    positions: i32[B, T], of the tokens in their sequences.
    valid: bool[B, T], whether it is a token; with a buffer, the first ones are.
    buffer: of x's dtype [B, E, W - 1], the inputs before x; None = zeros, or
      those of the piece before.

  Returns:
    (y of x's dtype, the last W - 1 inputs that are tokens: the next buffer).
  """
  width, tokens = len(weight), x.shape[1]
  weight = weight.astype(x.dtype).astype(jnp.float32)
  pieces = sharding.ways(sharding.SEQUENCE)
  if buffer is not None:
    before = buffer.mT
  elif pieces == 1:
    before = jnp.zeros((len(x), width - 1, x.shape[2]), x.dtype)
  else:
    axes = sharding.BATCH_AXES, None, sharding.TENSOR
    place = sharding.fitting(x.shape, axes)
    steps = [(i, i + 1) for i in range(pieces - 1)]
    before = sharding.split(
      lambda x: lax.ppermute(x[:, 1 - width :], sharding.SEQUENCE, steps),
      (place,),
      place,
    )(x)
  inputs = jnp.concatenate([before, x], axis=1)
  y = jnp.zeros(x.shape, jnp.float32)
  for lag in range(width):
    start = width - 1 - lag
    shifted = inputs[:, start : start + tokens]
    shifted = jnp.where((positions >= lag)[..., None], shifted, 0)
    y += shifted.astype(jnp.float32) * weight[None, start, None]
  last = jnp.sum(valid, axis=1)[:, None] + jnp.arange(width - 1)[None]
  buffer = jnp.take_along_axis(inputs, last[..., None], axis=1)
  return jax.nn.silu(y).astype(x.dtype), buffer.mT


def normalize(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns q / (|q| sqrt(K)) and k / |k| in float32, of [..., K]."""

  def unit(x):
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)

  return unit(q) * q.shape[-1] ** -0.5, unit(k)


def gates(
  a: jax.Array,
  b: jax.Array,
  log_scale: jax.Array,
  bias: jax.Array,
  positions: jax.Array,
  valid: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Computes a token's log decay and its rate of correction.

      g = -exp(log_scale) softplus(a + bias),  beta = sigmoid(b)

  Args:
    a: float[B, T, N].
    b: float[B, T, N].
    log_scale: f32[N].
    bias: f32[N].
    positions: i32[B, T]; 0 has g = -inf.
    valid: bool[B, T], whether it is a token; a pad has g = beta = 0.

  Returns:
    (g, beta), f32[B, T, N] each.
  """
  a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  log_scale, bias = log_scale[None, None], bias[None, None]
  g = -jnp.exp(log_scale) * jax.nn.softplus(a + bias)
  g = jnp.where((positions == 0)[..., None], -jnp.inf, g)
  valid = valid[..., None]
  return jnp.where(valid, g, 0.0), jnp.where(valid, jax.nn.sigmoid(b), 0.0)


def gated_norm(
  x: jax.Array, z: jax.Array, scale: jax.Array, eps: float
) -> jax.Array:
  """Returns x / rms(x) * scale * silu(z) in z's dtype, of [B, T, N, V]."""
  y = x.astype(jnp.float32)
  y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
  y *= scale[None, None, None] * jax.nn.silu(z.astype(jnp.float32))
  return y.astype(z.dtype)


def recurrent(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array,
  beta: jax.Array,
  state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Takes one token per row.

  Args:
    q: f32[B, J, K], from `normalize`.
    k: f32[B, J, K].
    v: float[B, N, V].
    g: f32[B, N], from `gates`.
    beta: f32[B, N].
    state: f32[B, N, K, V].

  Returns:
    (out f32[B, N, V], state).
  """
  rows, heads = g.shape
  count = heads // k.shape[1]
  q, k = (jnp.repeat(x, count, axis=1) for x in (q, k))
  decay = jnp.exp(g)[..., None]
  # S is read once for both: q S_t = q exp(g) S + (q k) correction.
  both = jnp.stack([k, q], axis=2)
  read = jnp.einsum('bnck,bnkv->bncv', both, state) * decay[..., None]
  correction = beta[..., None] * (v.astype(jnp.float32) - read[:, :, 0])
  out = read[:, :, 1] + jnp.sum(q * k, -1, keepdims=True) * correction
  update = k[..., None] * correction[:, :, None]
  return out, decay[..., None] * state + update


def chunked(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  g: jax.Array,
  beta: jax.Array,
  state: jax.Array | None = None,
  chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
  """Takes all tokens of rows, a chunk at a time, by matrix products.

  With D_ij = exp(sum of g over j < l <= i), 0 above the diagonal, the
  corrections of a chunk that starts in state S solve a triangular system:

      (I + tril(beta_i k_i k_j D_ij, -1)) x = beta (v - exp(sum_(l <= i) g) k S)

  It is solved for all chunks at once, as x = u - w S; a scan over the chunks
  then passes S along. Each D_ij is a sum of its own g: a difference of sums
  from the chunk's start would round more, and be NaN after a first token.

  Args:
    q: f32[B, T, J, K], from `normalize`.
    k: f32[B, T, J, K].
    v: float[B, T, N, V].
    g: f32[B, T, N], from `gates`.
    beta: f32[B, T, N].
    state: f32[B, N, K, V], before the first token; None = zeros, or that after
      the piece before.
    chunk: tokens of a chunk, a power of 2.

  Returns:
    (out f32[B, T, N, V], the state after the last token).
  """
  fn, args = functools.partial(_chunked, chunk), (q, k, v, g, beta)
  if state is not None or sharding.ways(sharding.SEQUENCE) == 1:
    return fn(*args, state)
  (heads,) = sharding.fitting(k.shape[2:3], (sharding.TENSOR,))
  place = PartitionSpec(sharding.BATCH_AXES, None, heads)
  out_specs = place, PartitionSpec(sharding.BATCH_AXES, heads)
  fn = functools.partial(fn, state=None, in_pieces=True)
  return sharding.split(fn, (place,) * 5, out_specs)(*args)


def _chunked(chunk, q, k, v, g, beta, state, in_pieces=False):
  rows, tokens, keys, _ = k.shape
  while chunk >= 2 * tokens:
    chunk //= 2

  def split(x):
    """Returns f32[I, B, J, R or 1, C, ...] of [B, T, J * (R or 1), ...]."""
    x = jnp.pad(x, ((0, 0), (0, -tokens % chunk), (0, 0), (0, 0)))
    x = x.reshape(rows, -1, chunk, keys, x.shape[2] // keys, x.shape[3])
    return x.transpose(1, 0, 3, 4, 2, 5).astype(jnp.float32)

  q, k, v, g, beta = map(split, (q, k, v, g[..., None], beta[..., None]))
  later = jnp.tril(jnp.broadcast_to(g, (*g.shape[:-1], chunk)), -1)
  decay = jnp.tril(jnp.exp(jnp.cumsum(later, axis=-2)))
  start = jnp.exp(jnp.cumsum(g, axis=-2))
  system = jnp.tril(beta * (k @ k.mT) * decay, -1)
  solution = _inverse(system) @ (beta * jnp.concatenate([v, start * k], -1))
  u, w = jnp.split(solution, [v.shape[-1]], axis=-1)
  # Factors of a chunk: those of S and x in its outputs, and in the next S.
  reads = start * q, (q @ k.mT) * decay
  adds = start[..., -1:, :], decay[..., -1, :, None] * k

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def step(state, chunk):
    u, w, adds, reads = chunk
    after, x = _add(state, u, w, *adds)
    q, weights = reads
    return after, q @ state + weights @ x

  shape = (*u.shape[1:4], k.shape[-1], v.shape[-1])
  if in_pieces:
    state = _before(u, w, adds)
  state = jnp.zeros(shape) if state is None else state.reshape(shape)
  state, out = lax.scan(step, state, (u, w, adds, reads))
  heads, width = g.shape[-4] * g.shape[-3], v.shape[-1]
  out = out.transpose(1, 0, 4, 2, 3, 5).reshape(rows, -1, heads, width)
  return out[:, :tokens], state.reshape(rows, heads, -1, width)


def _add(state, u, w, decay, k):
  """Returns the state after a chunk, and the chunk's corrections."""
  x = u - w @ state
  return decay * state + k.mT @ x, x


def _before(u, w, adds):
  """Returns the state before a piece, within `sharding.split`.

  The chunks of a piece turn [0, I] into [B, A], which says what they make of
  any state; the devices exchange these, and start again from their own.
  """
  size, width = w.shape[-1], u.shape[-1]
  pads = ((0, 0),) * (u.ndim - 2) + ((0, size),)

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def step(state, chunk):
    u, w, adds = chunk
    return _add(state, jnp.pad(u, pads), w, *adds)[0], None

  start = jnp.eye(size, width + size, width)
  start = jnp.broadcast_to(start, (*u.shape[1:4], *start.shape))
  own, _ = lax.scan(step, start, (u, w, adds))
  state, states = jnp.zeros_like(start[..., :width]), []
  for piece in lax.all_gather(own, sharding.SEQUENCE):
    states.append(state)
    state = piece[..., :width] + piece[..., width:] @ state
  return jnp.stack(states)[lax.axis_index(sharding.SEQUENCE)]


@jax.custom_vjp
def _inverse(a: jax.Array) -> jax.Array:
  """Returns (I + a)^-1 of strictly lower triangular matrices [..., C, C].

      [[A, 0], [L, B]]^-1 = [[A^-1, 0], [-B^-1 L A^-1, B^-1]]

  Blocks of 8 rows are (I - a)(I + a^2)(I + a^4), as a^8 = 0; the terms of more
  rows would cancel.
  """
  multiply = functools.partial(jnp.matmul, precision='highest')
  size = a.shape[-1]
  if size <= _BLOCK:
    square = multiply(a, a)
    x = jnp.broadcast_to(jnp.eye(size), a.shape) - a
    x += multiply(x, square)
    return x + multiply(x, multiply(square, square))
  half = size // 2
  pair = jnp.stack([a[..., :half, :half], a[..., half:, half:]])
  first, last = _inverse(pair)
  low = -multiply(last, multiply(a[..., half:, :half], first))
  return jnp.block([[first, jnp.zeros_like(low)], [low, last]])


_inverse.defvjp(lambda a: (_inverse(a),) * 2, lambda x, g: (-x.mT @ g @ x.mT,))
