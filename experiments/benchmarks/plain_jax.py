"""The yardstick of train steps: plain JAX, without imports from posttrain.

A Llama-shaped decoder, mean cross-entropy over all tokens but the first of a
row, clip and AdamW, gradients accumulated over micro-batches by a scan. Rows
are whole sequences: no packing, padding, temperature, entropy or weights.
Autodiff throughout.

Axes: B rows, T tokens, N query heads, K kv heads, G = N / K, H head dim,
D model, F mlp, V vocab, L layers.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of a model."""

  layers: int
  embed_dim: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp_dim: int
  vocab_size: int


SHAPES = {
  'S': Shape(4, 256, 8, 4, 32, 768, 512),
  'M': Shape(8, 512, 8, 4, 64, 1536, 8192),
}
ROWS, TOKENS = 64, 160  # of a step


def train_flops(shape: Shape, tokens: int) -> int:
  """Returns the FLOPs of training on a token of a row of `tokens`.

      6 (weights in products) + 12 L N H T

  Attention counts whole, not its causal half, as in PaLM (Chowdhery et al.,
  arXiv 2204.02311, appendix B).
  """
  heads = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
  layer = shape.embed_dim * (heads + 3 * shape.mlp_dim)
  weights = shape.layers * layer + shape.embed_dim * shape.vocab_size
  attention = shape.layers * shape.heads * shape.head_dim * tokens
  return 6 * weights + 12 * attention


def init(key: jax.Array, shape: Shape) -> dict:
  """Returns parameters with a leading layer axis and a tied head."""
  d, f = shape.embed_dim, shape.mlp_dim
  q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
  sizes = {
    'q': (d, q),
    'k': (d, kv),
    'v': (d, kv),
    'o': (q, d),
    'gate': (d, f),
    'up': (d, f),
    'down': (f, d),
  }
  keys = dict(zip([*sizes, 'embed'], jax.random.split(key, 8), strict=True))
  layers = {
    name: jax.random.normal(keys[name], (shape.layers, *size))
    / math.sqrt(size[0])
    for name, size in sizes.items()
  }
  layers |= {name: jnp.ones((shape.layers, d)) for name in ('norm1', 'norm2')}
  table = jax.random.normal(keys['embed'], (shape.vocab_size, d))
  return {'embed': table / math.sqrt(d), 'layers': layers, 'norm': jnp.ones(d)}


def rms_norm(x, scale):
  """Returns x / rms(x) * scale."""
  mean = jnp.mean(x * x, axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(mean + 1e-6) * scale


def rotate(x, cos, sin):
  """Applies RoPE to x [B, T, N, H]."""
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(q, k, v):
  """Returns causal attention; the query group is folded into rows."""
  b, t, n, h = q.shape
  kv = k.shape[2]
  q = q.reshape(b, t, kv, n // kv, h).transpose(0, 2, 3, 1, 4)
  q = q.reshape(b, kv, n // kv * t, h)
  k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  scores = (q @ k.mT / math.sqrt(h)).reshape(b, kv, n // kv, t, t)
  scores = jnp.where(jnp.tri(t, dtype=bool), scores, -1e30)
  weights = jax.nn.softmax(scores).reshape(b, kv, n // kv * t, t)
  out = (weights @ v).reshape(b, kv, n // kv, t, h)
  return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n * h)


def forward(params, shape: Shape, ids):
  """Returns logits f32[B, T, V]."""
  angles = jnp.arange(ids.shape[1])[:, None, None] * 10_000.0 ** (
    -jnp.arange(0, shape.head_dim, 2) / shape.head_dim
  )
  cos, sin = jnp.cos(angles), jnp.sin(angles)  # [T, 1, H / 2]

  def block(x, p):
    y = rms_norm(x, p['norm1'])
    q, k, v = (
      (y @ p[name]).reshape(*x.shape[:2], -1, shape.head_dim) for name in 'qkv'
    )
    x = x + attend(rotate(q, cos, sin), rotate(k, cos, sin), v) @ p['o']
    y = rms_norm(x, p['norm2'])
    return x + (jax.nn.silu(y @ p['gate']) * (y @ p['up'])) @ p['down'], None

  x, _ = jax.lax.scan(block, params['embed'][ids], params['layers'])
  return rms_norm(x, params['norm']) @ params['embed'].T


def loss(params, shape: Shape, ids):
  """Returns the sum of -log p(next token), in nats."""
  logprobs = jax.nn.log_softmax(forward(params, shape, ids)[:, :-1])
  return -jnp.take_along_axis(logprobs, ids[:, 1:, None], axis=-1).sum()


def make_step(shape: Shape, rows: int):
  """Returns (init_state, jitted step); micro-batches have `rows` sequences."""
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1),
  )

  def init_state(key):
    params = init(key, shape)
    return params, optimizer.init(params)

  def step(state, ids):
    params, opt_state = state
    count = ids.shape[0] * (ids.shape[1] - 1)

    def add_micro_batch(carry, micro):
      value, grads = jax.value_and_grad(loss)(params, shape, micro)
      return jax.tree.map(jnp.add, carry, (value, grads)), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    micros = ids.reshape(-1, rows, ids.shape[1])
    (value, grads), _ = jax.lax.scan(add_micro_batch, zeros, micros)
    grads = jax.tree.map(lambda g: g / count, grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value / count

  return init_state, jax.jit(step, donate_argnums=0)
