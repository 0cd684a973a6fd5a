"""A decoder-only transformer of the Llama, Qwen2 or Qwen3 shape.

Pure functions of a params tree: `init` makes it, `trunk` turns tokens into
hidden states, `head` gives the matrix that turns those into logits. One
`Block`, scanned over the leading layer axis of its parameters.

    embed/table                                   [V, D]
    layers/attention_norm/scale                   [L, D]
    layers/attention/{q,k,v}/kernel               [L, D, N*H or K*H]
    layers/attention/{q,k,v}/bias                 [L, N*H or K*H]  qkv_bias
    layers/attention/{q_norm,k_norm}/scale        [L, H]           qk_norm
    layers/attention/o/kernel                     [L, N*H, D]
    layers/mlp_norm/scale                         [L, D]
    layers/mlp/{gate,up}/kernel                   [L, D, F]
    layers/mlp/down/kernel                        [L, F, D]
    final_norm/scale                              [D]
    head/kernel                                   [D, V]   not tied_head

Axes: B rows, T tokens, L layers, N query heads, K kv heads, H head dim,
D model, F mlp, V vocab.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from posttrain import schema
from posttrain.ops import attention as attention_op

Params = Any

# (regex over 'a/b/c' paths, mesh axis or None per dimension); the first match
# wins. Megatron's split over `tensor`: what enters a block's hidden width is
# cut by column, what leaves it by row. `fsdp` cuts the other dimension.
SHARDING_RULES = (
    (r'embed/table$', ('tensor', 'fsdp')),
    (r'head/kernel$', ('fsdp', 'tensor')),
    (r'attention/[qkv]/kernel$', (None, 'fsdp', 'tensor')),
    (r'attention/[qkv]/bias$', (None, 'tensor')),
    (r'attention/o/kernel$', (None, 'tensor', 'fsdp')),
    (r'mlp/(gate|up)/kernel$', (None, 'fsdp', 'tensor')),
    (r'mlp/down/kernel$', (None, 'tensor', 'fsdp')),
    (r'final_norm/scale$', (None,)),
    (r'norm/scale$', (None, None)),
)

# What a block keeps for its backward pass. 'none' recomputes no matrix
# product: it keeps what they made, under the name 'kept', and redoes only
# elementwise work (norms, RoPE, SwiGLU), which costs less than storing its
# results. 'block' keeps a block's input alone and redoes all of it.
REMAT = {
    'none': jax.checkpoint_policies.save_only_these_names('kept'),
    'block': jax.checkpoint_policies.nothing_saveable,
}


class RMSNorm(nn.Module):
  """x / rms(x) * scale, in float32 (Zhang and Sennrich, arXiv 1910.07467)."""

  eps: float

  @nn.compact
  def __call__(self, x):
    scale = self.param('scale', nn.initializers.ones, x.shape[-1:])
    scale = jnp.expand_dims(scale, range(x.ndim - 1))
    y = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
    return (y * jax.lax.rsqrt(mean + self.eps) * scale).astype(x.dtype)


class Linear(nn.Module):
  """x @ kernel (+ bias) in x's dtype; normal init, scale / sqrt(fan in)."""

  features: int
  use_bias: bool = False
  scale: float = 1.0

  @nn.compact
  def __call__(self, x):
    fan_in = x.shape[-1]
    normal = nn.initializers.normal(self.scale / math.sqrt(fan_in))
    kernel = self.param('kernel', normal, (fan_in, self.features))
    # Two dimensions: the gradient then needs no transposed copy of x.
    y = x.reshape(-1, fan_in) @ kernel.astype(x.dtype)
    if self.use_bias:
      bias = self.param('bias', nn.initializers.zeros, (self.features,))
      y = y + bias.astype(x.dtype)[None]
    return y.reshape(*x.shape[:-1], self.features)


class Attention(nn.Module):
  """Grouped-query self-attention with rotary positions."""

  cfg: schema.Model

  @nn.compact
  def __call__(self, x, rope, k_start, k_end):
    cfg = self.cfg
    size = cfg.head_dim

    def heads(name, count):
      y = Linear(count * size, cfg.qkv_bias, name=name)(x)
      if cfg.qk_norm:  # otherwise its gradient does not need it
        y = checkpoint_name(y, 'kept')
      return y.reshape(*x.shape[:-1], count, size)

    q, k = heads('q', cfg.heads), heads('k', cfg.kv_heads)
    v = heads('v', cfg.kv_heads)
    if cfg.qk_norm:
      q = RMSNorm(cfg.norm_eps, name='q_norm')(q)
      k = RMSNorm(cfg.norm_eps, name='k_norm')(k)
    out = attention_op.attention(
        rotate(q, rope), rotate(k, rope), v, k_start, k_end,
        scale=1.0 / math.sqrt(size),
    )
    out = out.reshape(*x.shape[:-1], cfg.heads * size)
    return Linear(cfg.embed_dim, scale=residual_scale(cfg), name='o')(out)


class MLP(nn.Module):
  """SwiGLU: (silu(x gate) * x up) down (Shazeer, arXiv 2002.05202)."""

  cfg: schema.Model

  @nn.compact
  def __call__(self, x):
    cfg = self.cfg
    gate = checkpoint_name(Linear(cfg.mlp_dim, name='gate')(x), 'kept')
    up = checkpoint_name(Linear(cfg.mlp_dim, name='up')(x), 'kept')
    down = Linear(cfg.embed_dim, scale=residual_scale(cfg), name='down')
    return down(nn.silu(gate) * up)


class Block(nn.Module):
  """One layer: pre-norm attention and MLP on a residual stream."""

  cfg: schema.Model

  @nn.compact
  def __call__(self, x, rope, k_start, k_end):
    cfg = self.cfg
    y = RMSNorm(cfg.norm_eps, name='attention_norm')(x)
    x = x + Attention(cfg, name='attention')(y, rope, k_start, k_end)
    x = checkpoint_name(x, 'kept')
    y = RMSNorm(cfg.norm_eps, name='mlp_norm')(x)
    return x + MLP(cfg, name='mlp')(y), None


class Embed(nn.Module):
  """Rows of a table."""

  cfg: schema.Model

  @nn.compact
  def __call__(self, tokens):
    cfg = self.cfg
    normal = nn.initializers.normal(1.0 / math.sqrt(cfg.embed_dim))
    shape = (cfg.vocab_size, cfg.embed_dim)
    table = self.param('table', normal, shape)
    return jnp.take(table, tokens, axis=0).astype(cfg.dtype)


class Transformer(nn.Module):
  """Tokens to normalized hidden states."""

  cfg: schema.Model

  @nn.compact
  def __call__(self, tokens, positions, segment_ids):
    cfg = self.cfg
    x = Embed(cfg, name='embed')(tokens)
    rope = rope_table(positions, cfg.head_dim, cfg.rope_theta)
    k_start, k_end = attention_op.intervals(segment_ids, positions)
    layers = nn.scan(
        nn.remat(Block, prevent_cse=False, policy=REMAT[cfg.remat]),
        variable_axes={'params': 0}, split_rngs={'params': True},
        in_axes=nn.broadcast, length=cfg.layers,
    )
    x, _ = layers(cfg, name='layers')(x, rope, k_start, k_end)
    x = RMSNorm(cfg.norm_eps, name='final_norm')(x)
    if self.is_initializing() and not cfg.tied_head:
      Linear(cfg.vocab_size, name='head')(x)  # `head` reads the kernel
    return x


def residual_scale(cfg: schema.Model) -> float:
  """Keeps the variance of a sum of 2 L residual branches at that of one."""
  return 1.0 / math.sqrt(2 * cfg.layers)


def rope_table(
    positions: jax.Array, head_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
  """(cos, sin) of `positions * theta^(-2i / H)`, f32[B, T, 1, H / 2] each.

  References: Su et al., RoFormer, arXiv 2104.09864.
  """
  exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  frequencies = (theta**-exponents)[None, None]
  angles = positions[..., None].astype(jnp.float32) * frequencies
  return jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Turns the pairs (x[i], x[i + H/2]) by their angles (half-split layout)."""
  cos, sin = rope
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)


@functools.partial(jax.jit, static_argnames='cfg')
def init(key: jax.Array, cfg: schema.Model) -> Params:
  """Draws parameters: a plain nested dict of float32 arrays.

  Kernels are normal with variance 1 / fan in, those that write to the
  residual stream with 1 / (2 L fan in); scales are 1, biases 0.

  Args:
    key: PRNG key.
    cfg: model options, with `vocab_size` resolved.
  """
  assert cfg.vocab_size is not None, 'vocab_size must be resolved'
  tokens = jnp.zeros((1, 1), jnp.int32)
  return Transformer(cfg).init(key, tokens, tokens, tokens)['params']


def trunk(
    params: Params,
    cfg: schema.Model,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    cache: None = None,
) -> tuple[jax.Array, None]:
  """Turns tokens into the hidden states that predict their successors.

  Args:
    params: as made by `init`.
    cfg: model options.
    tokens: i32[B, T].
    positions: i32[B, T], RoPE index, restarting at 0 in every segment.
    segment_ids: i32[B, T], packed example id; 0 = pad.
    cache: None; the full forward keeps no cache.

  Returns:
    (hidden [B, T, D] in the compute dtype, cache). Pads see no key and are
    seen by none; their hidden states are finite and mean nothing.
  """
  assert cache is None, 'the full forward keeps no cache'
  hidden = Transformer(cfg).apply(
      {'params': params}, tokens, positions, segment_ids
  )
  return hidden, cache


def head(params: Params, cfg: schema.Model) -> tuple[jax.Array, None]:
  """The output matrix, f32[D, V], and its softcap (None: logits = h W)."""
  if cfg.tied_head:
    return params['embed']['table'].T, None
  return params['head']['kernel'], None


def num_params(cfg: schema.Model) -> int:
  """Counts the parameters without making them."""
  shapes = jax.eval_shape(lambda key: init(key, cfg), jax.random.key(0))
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
