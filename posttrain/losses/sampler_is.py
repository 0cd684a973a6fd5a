"""Bounded importance weights, and a mask, that correct for the sampler.

The sampler's distribution mu differs slightly from the policy's pi: older
weights, other kernels, other rounding. The ratio c = pi / mu, without gradient,
corrects for it. A few large ratios could dominate the step, so they are
truncated or masked.

Axes: T tokens of a row; any dimensions before it.
"""

import jax
import jax.numpy as jnp

from posttrain.losses import combine, ratios, segments


def weigh(
  ratio: ratios.Ratio,
  segment_ids: jax.Array,
  *,
  mode: str,
  clip_min: float | None,
  clip_max: float,
  norm: str,
  max_log_ratio: float,
) -> tuple[jax.Array, combine.Metrics]:
  """Returns the bounded importance weight of each token.

  token:     c = pi / mu of the token
  sequence:  c = exp(sum or mean of log pi - log mu over the sequence's members)

  truncate:  min(max(c, clip_min), clip_max)
  mask:      c where clip_min <= c <= clip_max, else 0

  pi = mu gives 1 everywhere. With 'sum', c is the likelihood ratio of the whole
  sequence: unbiased, and far from 1 for long sequences. With 'mean', it is the
  geometric mean of the token ratios: biased, and near 1.

  Args:
    ratio: proximal policy over sampler.
    segment_ids: i32[..., T], see `segments`.
    mode: one of `schema.SAMPLER_IS_MODES`, except 'none'.
    clip_min, clip_max: bounds of c; clip_min None = no lower bound.
    norm: 'sum' or 'mean': how a sequence's log ratios are combined.
    max_log_ratio: bound on the logarithm of c before exp, in nats.

  Returns:
    The weight, f32[..., T] without gradient, arbitrary at non-members; and
    metrics, over the members, of the unbounded c:
      sampler_is_mean, sampler_is_max: mean and maximum of c.
      sampler_is_cut: fraction whose c is truncated or masked.
    and over the sequences, in every mode:
      sampler_is_sum_norm, sampler_is_mean_norm: mean of a sequence's c with
        either norm.

  References:
    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training", 2025 (token_truncate, "TIS"). Ling Team, "Every Step
    Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking
    Model", arXiv 2510.18855 (token_mask, "IcePop").
  """
  level, _, action = mode.partition('_')
  total = segments.totals(ratio.clamped_log_ratio, segment_ids)
  count = segments.totals(ratio.member, segment_ids)

  def exp(x):
    return jnp.exp(jnp.clip(x, -max_log_ratio, max_log_ratio))

  sequence = {'sum': exp(total), 'mean': exp(total / jnp.maximum(count, 1.0))}
  c = sequence[norm] if level == 'sequence' else ratio.value
  c = jax.lax.stop_gradient(c)
  low = 0.0 if clip_min is None else clip_min
  cut = (c < low) | (c > clip_max)
  masks = action == 'mask'
  weight = jnp.where(cut, 0.0, c) if masks else jnp.clip(c, low, clip_max)
  one_each = segments.firsts(ratio.member, segment_ids)
  return weight, {
    'sampler_is_mean': combine.pair(c, ratio.member),
    'sampler_is_max': combine.largest(c, ratio.member),
    'sampler_is_cut': combine.pair(cut, ratio.member),
    'sampler_is_sum_norm': combine.pair(sequence['sum'], one_each),
    'sampler_is_mean_norm': combine.pair(sequence['mean'], one_each),
  }


def off_policy(
  ratio: ratios.Ratio,
  advantages: jax.Array,
  segment_ids: jax.Array,
  delta: float,
) -> jax.Array:
  """Returns the tokens with A < 0 of sequences that the policy moved away from.

  mean over the sequence's members of log mu - log pi > delta

  pi = mu and an infinite delta give none.

  Args:
    ratio: policy over sampler.
    advantages: f32[..., T], credit.
    segment_ids: i32[..., T], see `segments`.
    delta: the bound, in nats per token.

  Returns:
    bool[..., T].

  References:
    DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556 (without a value of delta).
  """
  total = segments.totals(ratio.log_ratio, segment_ids)
  count = segments.totals(ratio.member, segment_ids)
  return ratio.member & (advantages < 0) & (-total > delta * count)
