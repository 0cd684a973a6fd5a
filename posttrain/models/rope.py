"""Positions of tokens in layers: RoPE, and the first key of a query.

Layers differ in both: local ones have a window, and may have another base.

Axes: B rows, T tokens, N heads, H head dim.
"""

import math

import jax
import jax.numpy as jnp

from posttrain import schema
from posttrain.ops import attention

# (cos, sin), f32[B, T, 1, H / 2] each, of the part that rotates; and the factor
# of queries, f32[B, T, 1, 1], None = 1.
Rope = tuple[jax.Array, jax.Array, jax.Array | None]
LayerRange = tuple[Rope, jax.Array]  # (rope, k_start i32[B, T])


def variants(cfg: schema.Model) -> list[tuple[bool, bool]]:
  """Returns whether each layer is local, and whether it has no RoPE."""
  return [
    (i in cfg.local_layers, i in cfg.nope_layers) for i in range(cfg.layers)
  ]


def layer_ranges(
  cfg: schema.Model,
  positions: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  trees: bool = False,
) -> tuple[LayerRange, ...]:
  """Returns (rope, k_start) of the different `variants`, in their order.

  Args:
    cfg: model options.
    positions: i32[B, T], RoPE index.
    k_start: i32[B, T], the first key of its sequence.
    k_end: i32[B, T], one past the last key that it attends to: itself.
    trees: whether rows are prefix trees, where a window is of ancestors.
  """
  ranges = []
  for local, nope in sorted({*variants(cfg)}):
    start = k_start
    if local:
      first = k_end - cfg.window
      if trees:
        first = attention.ancestors(positions, cfg.window)
      start = jnp.clip(first, k_start, k_end)
    ranges.append((rope_table(cfg, positions, local, nope), start))
  return tuple(ranges)


def frequencies(cfg: schema.Model, local: bool) -> tuple[jax.Array, float]:
  """Returns RoPE's angle per token of each pair, and its `attention_factor`.

      theta^(-2i / H),  scaled by `rope_scaling`

  `llama3`, with w = original_length / wavelength: frequencies with w >=
  high_frequency are kept, those with w <= low_frequency are divided by the
  factor, in between they are interpolated linearly in w. `yarn`: likewise with
  fast_turns and slow_turns, but linearly in i. `dynamic`, with n = rope_length
  and f the factor: theta (f n / original_length - f + 1)^(H / (H - 2)). Local
  layers with their own base are never scaled.

  References: Su et al., RoFormer, arXiv 2104.09864.

  Returns:
    (f32[H / 2] in radians, with H the numbers that rotate; the factor).
  """
  own = local and cfg.local_rope_theta is not None
  theta = cfg.local_rope_theta if own else cfg.rope_theta
  size, scaling = cfg.rotary_dim, cfg.rope_scaling
  kind, factor, whole = scaling.kind, scaling.factor, size
  if kind == 'proportional':
    whole = cfg.kv_sizes(not own)[1]
    size = whole if own else size
  if own:
    kind = 'none'
  context = scaling.original_length
  length = max(cfg.rope_length or context, context)
  if kind == 'dynamic':
    theta *= (factor * length / context - factor + 1) ** (size / (size - 2))
  exponents = jnp.arange(0, size, 2, dtype=jnp.float32) / whole
  radians, gain = theta**-exponents, scaling.attention_factor
  slow = radians / factor
  if kind in ('linear', 'proportional'):
    return slow, 1.0
  if kind == 'longrope':
    is_long = length > context
    factors = scaling.long_factors if is_long else scaling.short_factors
    if gain is None:
      gain = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(context))
    return radians / jnp.array(factors, jnp.float32), gain
  if kind == 'yarn':
    low, high = (
      size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))
      for turns in (scaling.fast_turns, scaling.slow_turns)
    )
    if scaling.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 * (low == high)
    ramp = jnp.arange(size // 2, dtype=jnp.float32)
    keep = 1.0 - jnp.clip((ramp - low) / (high - low), 0.0, 1.0)
    if gain is None:
      gain = 0.1 * math.log(max(factor, 1.0)) + 1
  elif kind == 'llama3':
    low, high = scaling.low_frequency, scaling.high_frequency
    w = context * radians / (2 * math.pi)
    keep, gain = jnp.clip((w - low) / (high - low), 0.0, 1.0), 1.0
  else:
    return radians, 1.0
  return (1.0 - keep) * slow + keep * radians, gain


def rope_table(
  cfg: schema.Model, positions: jax.Array, local: bool, nope: bool
) -> Rope:
  """Returns the rotations of tokens by positions, in one of `variants`."""
  radians, gain = frequencies(cfg, local)
  if nope:
    radians, gain = jnp.zeros_like(radians), 1.0
  if cfg.global_head_dim:  # one shape for all layers
    pairs = max(cfg.head_dim, cfg.global_head_dim) // 2
    radians = jnp.pad(radians, (0, pairs - len(radians)))
  angles = positions[..., None, None].astype(jnp.float32)
  angles *= radians[None, None, None]
  cos, sin = jnp.cos(angles) * gain, jnp.sin(angles) * gain
  if not cfg.query_beta:
    return cos, sin, None
  times = positions // cfg.rope_scaling.original_length
  scale = 1 + cfg.query_beta * jnp.log(1 + times.astype(jnp.float32))
  return cos, sin, scale[..., None, None]


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
  """Rotates pairs (x[i], x[i + H/2]) by their angles (half-split layout).

  If the table has fewer pairs than a head, its other numbers are unchanged; if
  it has more, they are not read.
  """
  cos, sin = (y[..., : x.shape[-1] // 2] for y in rope[:2])
  size = 2 * cos.shape[-1]
  a, b = jnp.split(x[..., :size].astype(jnp.float32), 2, axis=-1)
  y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return jnp.concatenate([y.astype(x.dtype), x[..., size:]], axis=-1)
