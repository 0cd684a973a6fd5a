"""Importance weights that correct for another sampler, kept within bounds.

The sampler's law mu is not quite the policy's: other weights, other kernels,
other rounding. The ratio c = pi / mu, without gradient, makes up for it; a
few large ones would rule the step, so they are truncated or left out.

Axes: T tokens of a row; any dimensions before it.
"""

import jax
import jax.numpy as jnp

from posttrain.losses import combine, ratio, segments

MODES = (
  'none',
  'token_truncate',
  'token_mask',
  'sequence_truncate',
  'sequence_mask',
)
NORMS = ('sum', 'mean')


def weigh(
  at: ratio.Moved,
  segment_ids: jax.Array,
  *,
  mode: str,
  clip_min: float | None,
  clip_max: float,
  norm: str,
  max_log_ratio: float,
) -> tuple[jax.Array, combine.Metrics]:
  """Turns the ratio of policy and sampler into a bounded weight.

  token:     c = pi / mu of the token
  sequence:  c = exp(sum or mean of log pi - log mu over the sequence's members)

  truncate:  min(max(c, clip_min), clip_max)
  mask:      c where clip_min <= c <= clip_max, else 0

  pi = mu gives 1 everywhere. The sum is the likelihood ratio of the whole
  sequence, unbiased, and for long ones far from 1; the mean is its geometric
  mean by length, biased and near 1.

  Args:
    at: the policy against the sampler.
    segment_ids: i32[..., T], see `segments`.
    mode: of `MODES`, other than 'none'.
    clip_min, clip_max: bounds of c; clip_min None = none.
    norm: 'sum' or 'mean', of a sequence's log ratios.
    max_log_ratio: bound on the logarithm of c before exp.

  Returns:
    The weight, f32[..., T] without gradient, anything at non-members; and,
    over the members, with c as it was before its bounds:
      sampler_is_mean, sampler_is_max: of c.
      sampler_is_cut: fraction whose c was truncated, or masked.
    and over the sequences:
      sampler_is_sum_norm, sampler_is_mean_norm: mean of a sequence's c under
        either norm, whatever the mode.

  References:
    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training", 2025 (token_truncate, "TIS"). Ling Team, "Every Step
    Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking
    Model", arXiv 2510.18855 (token_mask, "IcePop").
  """
  level, _, action = mode.partition('_')
  total = segments.totals(at.bounded, segment_ids)
  count = segments.totals(at.member, segment_ids)

  def exp(x):
    return jnp.exp(jnp.clip(x, -max_log_ratio, max_log_ratio))

  sequence = {'sum': exp(total), 'mean': exp(total / jnp.maximum(count, 1.0))}
  c = sequence[norm] if level == 'sequence' else at.ratio
  c = jax.lax.stop_gradient(c)
  low = 0.0 if clip_min is None else clip_min
  cut = (c < low) | (c > clip_max)
  bounded = (
    jnp.where(cut, 0.0, c) if action == 'mask' else (jnp.clip(c, low, clip_max))
  )
  one_each = segments.firsts(at.member, segment_ids)
  return bounded, {
    'sampler_is_mean': combine.pair(c, at.member),
    'sampler_is_max': combine.largest(c, at.member),
    'sampler_is_cut': combine.pair(cut, at.member),
    'sampler_is_sum_norm': combine.pair(sequence['sum'], one_each),
    'sampler_is_mean_norm': combine.pair(sequence['mean'], one_each),
  }
