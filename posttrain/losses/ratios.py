"""Ratios of the policy's probability of a token to the sampler's.

Axes: any; all arrays have the same shape.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from posttrain.losses import combine


class Ratio(NamedTuple):
  """Policy pi against sampler mu, per token; no difference at non-members."""

  member: jax.Array  # bool, weight != 0
  log_ratio: jax.Array  # f32, log pi - log mu in nats, never clamped
  clamped_log_ratio: jax.Array  # f32, the same, clamped
  value: jax.Array  # f32, exp of the clamped log ratio
  probability_change: jax.Array  # f32, pi - mu, without gradient
  k3: jax.Array  # f32, value - clamped log ratio - 1, without gradient
  is_clamped: jax.Array  # bool, where the clamp is active


def policy_over_sampler(
  logprobs: jax.Array,
  sampler_logprobs: jax.Array,
  weights: jax.Array,
  max_log_ratio: float,
) -> Ratio:
  """Computes the ratio of policy and sampler on the member tokens.

  ratio = exp(clip(log pi - log mu, -max_log_ratio, max_log_ratio))

  Where the clamp is active, the ratio is a constant: its gradient is 0.

  Args:
    logprobs: f32[...], log pi in nats.
    sampler_logprobs: f32[...], log mu in nats.
    weights: f32[...]; a token is a member where this is not 0.
    max_log_ratio: bound on |log pi - log mu| before exp, in nats.
  """
  chex.assert_equal_shape([logprobs, sampler_logprobs, weights])
  member = weights != 0
  # Masked before exp and not only after it: the gradient of a where is
  # 0 * d exp, which is NaN where exp overflows.
  new, old = (jnp.where(member, x, 0.0) for x in (logprobs, sampler_logprobs))
  log_ratio = new - old
  clamped = jnp.clip(log_ratio, -max_log_ratio, max_log_ratio)
  value = jnp.exp(clamped)
  return Ratio(
    member,
    log_ratio,
    clamped,
    value,
    jax.lax.stop_gradient(jnp.exp(new) - jnp.exp(old)),
    jax.lax.stop_gradient(value - clamped - 1.0),
    jnp.abs(log_ratio) > max_log_ratio,
  )


def masking_metrics(ratio: Ratio, masked: jax.Array) -> combine.Metrics:
  """Returns metrics of a loss that masks the policy gradient of some members.

  Args:
    ratio: policy over sampler.
    masked: bool[...], members without a policy gradient.

  Returns:
    is_masked: fraction of the members that are masked.
    masked_mismatch_kl, unmasked_mismatch_kl: mean k3 estimate of
      KL(mu || pi) over the masked members, and over the others, in nats.
    clamped: fraction of the members whose log ratio is clamped.
  """
  return {
    'is_masked': combine.pair(masked, ratio.member),
    'masked_mismatch_kl': combine.pair(ratio.k3, masked),
    'unmasked_mismatch_kl': combine.pair(ratio.k3, ratio.member & ~masked),
    'clamped': combine.pair(ratio.is_clamped, ratio.member),
  }
