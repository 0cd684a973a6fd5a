"""The parts of a transformer: norms, projections, attention, MLP, the block.

Axes: B rows, T tokens, S cache slots, L layers, N query heads, K kv heads,
H head dim, D model, F mlp, V vocab.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from posttrain import schema
from posttrain.models import lora
from posttrain.ops import attention as attention_op


class RMSNorm(nn.Module):
  """x / rms(x) * scale, in float32 (Zhang and Sennrich, arXiv 1910.07467).

  With `norm_offset` the parameter is what the scale exceeds 1 by.
  """

  cfg: schema.Model

  @nn.compact
  def __call__(self, x):
    offset = self.cfg.norm_offset
    start = nn.initializers.zeros if offset else nn.initializers.ones
    scale = self.param('scale', start, x.shape[-1:])
    scale = 1.0 + scale if offset else scale
    scale = jnp.expand_dims(scale, range(x.ndim - 1))
    y = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
    return (y * jax.lax.rsqrt(mean + self.cfg.norm_eps) * scale).astype(x.dtype)


class Linear(nn.Module):
  """x @ kernel (+ bias) in x's dtype; normal init, scale / sqrt(fan in).

  The kernel may be one with a low-rank correction, see `lora`.
  """

  features: int
  use_bias: bool = False
  scale: float = 1.0

  @nn.compact
  def __call__(self, x):
    fan_in = x.shape[-1]
    normal = nn.initializers.normal(self.scale / math.sqrt(fan_in))
    kernel = self.param('kernel', normal, (fan_in, self.features))
    # Two dimensions: the gradient then needs no transposed copy of x.
    y = lora.matmul(x.reshape(-1, fan_in), kernel)
    if self.use_bias:
      bias = self.param('bias', nn.initializers.zeros, (self.features,))
      y = y + bias.astype(x.dtype)[None]
    return y.reshape(*x.shape[:-1], self.features)


class Attention(nn.Module):
  """Grouped-query self-attention with rotary positions."""

  cfg: schema.Model
  fused: bool = False

  @nn.compact
  def __call__(self, x, rope, places, k_start, k_end, cache):
    cfg = self.cfg
    counts = {'q': cfg.heads, 'k': cfg.kv_heads, 'v': cfg.kv_heads}

    def project(name, count):
      y = Linear(count * cfg.head_dim, cfg.qkv_bias, name=name)(x)
      if cfg.qk_norm:  # otherwise its gradient does not need it
        y = checkpoint_name(y, 'kept')
      return y.reshape(*x.shape[:-1], count, cfg.head_dim)

    if self.fused:
      y = project('qkv', sum(counts.values()))
      q, k, v = jnp.split(y, (cfg.heads, cfg.heads + cfg.kv_heads), axis=-2)
    else:
      q, k, v = (project(name, count) for name, count in counts.items())
    if cfg.qk_norm:
      q = RMSNorm(cfg, name='q_norm')(q)
      k = RMSNorm(cfg, name='k_norm')(k)
    q, k = rotate(q, rope), rotate(k, rope)
    options = {
      'scale': 1.0 / math.sqrt(cfg.query_scale or cfg.head_dim),
      'softcap': cfg.attention_softcap,
    }
    if cache is None:
      out = attention_op.attention(q, k, v, k_start, k_end, **options)
    else:
      old_k, old_v = cache
      cache = write(old_k, k, places), write(old_v, v, places)
      out = _attend(q, cache, k_start, k_end, options)
    out = out.reshape(*x.shape[:-1], cfg.heads * cfg.head_dim)
    out = Linear(cfg.embed_dim, scale=residual_scale(cfg), name='o')(out)
    return out, cache


def _attend(q, cache, k_start, k_end, options):
  """Attention of [B, T, N, H] over a cache; one query per row is decoding."""
  if q.shape[1] > 1:
    return attention_op.cached(q, *cache, k_start, k_end, **options)
  q, k_start, k_end = q[:, 0], k_start[:, 0], k_end[:, 0]
  out = attention_op.decode(q, *cache, k_start, k_end, **options)
  return out[:, None]


class MLP(nn.Module):
  """Gated: (silu(x gate) * x up) down (Shazeer, arXiv 2002.05202)."""

  cfg: schema.Model
  fused: bool = False

  @nn.compact
  def __call__(self, x):
    cfg = self.cfg
    if self.fused:
      y = Linear(2 * cfg.mlp_dim, name='gate_up')(x)
      gate, up = jnp.split(y, 2, axis=-1)
    else:
      gate = checkpoint_name(Linear(cfg.mlp_dim, name='gate')(x), 'kept')
      up = checkpoint_name(Linear(cfg.mlp_dim, name='up')(x), 'kept')
    down = Linear(cfg.embed_dim, scale=residual_scale(cfg), name='down')
    activate = nn.silu if cfg.activation == 'silu' else nn.gelu
    return down(activate(gate) * up)


class Block(nn.Module):
  """One layer: pre-norm attention and MLP on a residual stream.

  `fused`: the parameters are those of a decode view. `sights` holds what layers
  see by, (rope, k_start) pairs; with two, `local` (bool[]) says which is meant.
  `places` and `cache` are None, or where to write keys and values, i32[B, T],
  and what to attend to.
  """

  cfg: schema.Model
  fused: bool = False

  @nn.compact
  def __call__(self, x, local, sights, k_end, places=None, cache=None):
    cfg = self.cfg
    rope, k_start = sights[0]
    if local is not None:
      rope, k_start = jax.tree.map(
        lambda wide, near: jnp.where(local, near, wide), *sights
      )

    def norm(name, y):
      return RMSNorm(cfg, name=name)(y)

    y = norm('attention_norm', x)
    attention = Attention(cfg, self.fused, name='attention')
    y, cache = attention(y, rope, places, k_start, k_end, cache)
    if cfg.post_norms:
      y = norm('attention_post_norm', checkpoint_name(y, 'kept'))
    x = checkpoint_name(x + y, 'kept')
    y = MLP(cfg, self.fused, name='mlp')(norm('mlp_norm', x))
    if cfg.post_norms:
      y = norm('mlp_post_norm', checkpoint_name(y, 'kept'))
    return x + y, cache


class Embed(nn.Module):
  """Rows of a table."""

  cfg: schema.Model

  @nn.compact
  def __call__(self, tokens):
    cfg = self.cfg
    normal = nn.initializers.normal(1.0 / math.sqrt(cfg.embed_dim))
    shape = (cfg.vocab_size, cfg.embed_dim)
    table = self.param('table', normal, shape)
    x = jnp.take(table, tokens, axis=0).astype(cfg.dtype)
    if cfg.scale_embeddings:  # by a root that has been rounded as x is
      x *= jnp.asarray(math.sqrt(cfg.embed_dim), cfg.dtype)
    return x


def residual_scale(cfg: schema.Model) -> float:
  """Keeps the variance of a sum of 2 L residual branches at that of one."""
  return 1.0 / math.sqrt(2 * cfg.layers)


def sights(
  cfg: schema.Model,
  positions: jax.Array,
  index: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
) -> tuple:
  """What layers see by: (rope, k_start), and the same of local ones if any.

  Args:
    cfg: model options.
    positions: i32[B, T], RoPE index.
    index: i32[B or 1, T], where among the keys a query stands itself.
    k_start: i32[B, T], the first key of its sequence.
    k_end: i32[B, T], one past the last key that it sees.
  """
  wide = rope_table(positions, frequencies(cfg, False)), k_start
  if not cfg.local_layers:
    return (wide,)
  near = jnp.clip(index - cfg.window + 1, k_start, k_end)
  return wide, (rope_table(positions, frequencies(cfg, True)), near)


def frequencies(cfg: schema.Model, local: bool) -> jax.Array:
  """Radians per token by which RoPE turns each pair of a head: f32[H / 2].

      theta^(-2i / H),  stretched as `rope_scaling` says

  `llama3`, with w = original_length / wavelength: pairs that turn w >=
  high_frequency times within the original context stay, those that turn w <=
  low_frequency times are divided by the factor, between the two is a straight
  line in w. Layers that are local by a base of their own are never stretched.

  References: Su et al., RoFormer, arXiv 2104.09864.
  """
  own = local and cfg.local_rope_theta is not None
  theta = cfg.local_rope_theta if own else cfg.rope_theta
  exponents = jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim
  turns, scaling = theta**-exponents, cfg.rope_scaling
  if own or scaling.kind == 'none':
    return turns
  slow = turns / scaling.factor
  if scaling.kind == 'linear':
    return slow
  low, high = scaling.low_frequency, scaling.high_frequency
  w = scaling.original_length * turns / (2 * math.pi)
  keep = jnp.clip((w - low) / (high - low), 0.0, 1.0)
  return (1.0 - keep) * slow + keep * turns


def rope_table(
  positions: jax.Array, turns: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """(cos, sin) of `positions * turns`, f32[B, T, 1, H / 2] each."""
  angles = positions[..., None].astype(jnp.float32) * turns[None, None]
  return jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Turns the pairs (x[i], x[i + H/2]) by their angles (half-split layout)."""
  cos, sin = rope
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)


def write(cache: jax.Array, new: jax.Array, places: jax.Array) -> jax.Array:
  """Puts new keys or values [B, T, K, H] at `places` of a cache [B, K, S, H].

  A place of S or more is nowhere.
  """
  rows = jnp.arange(len(new))[:, None]
  return cache.at[rows, :, places].set(new.astype(cache.dtype), mode='drop')
