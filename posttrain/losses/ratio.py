"""How far the policy has moved from the sampler: ratios that cannot overflow.

Axes: any; all arrays have the same shape.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from posttrain.losses import combine


class Moved(NamedTuple):
  """What changed between sampling a token and now; nothing at non-members."""

  member: jax.Array  # bool, weight != 0
  log_ratio: jax.Array  # f32, log pi - log mu in nats, never clamped
  bounded: jax.Array  # f32, the same, clamped
  ratio: jax.Array  # f32, pi / mu, its logarithm clamped
  probability: jax.Array  # f32, pi - mu, without gradient
  k3: jax.Array  # f32, ratio - log ratio - 1, without gradient
  clamped: jax.Array  # bool, where the clamp is active


def moved(
  logprobs: jax.Array,
  sampler_logprobs: jax.Array,
  weights: jax.Array,
  max_log_ratio: float,
) -> Moved:
  """Compares policy and sampler on the member tokens.

  ratio = exp(clip(log pi - log mu, -max_log_ratio, max_log_ratio))

  Where the clamp is active, the ratio is a constant: its gradient is 0.
  """
  chex.assert_equal_shape([logprobs, sampler_logprobs, weights])
  member = weights != 0
  # Masked before exp and not only after it: the gradient of a where is
  # 0 * d exp, which is NaN where exp overflows.
  new, old = (jnp.where(member, x, 0.0) for x in (logprobs, sampler_logprobs))
  log_ratio = new - old
  bounded = jnp.clip(log_ratio, -max_log_ratio, max_log_ratio)
  ratio = jnp.exp(bounded)
  return Moved(
    member,
    log_ratio,
    bounded,
    ratio,
    jax.lax.stop_gradient(jnp.exp(new) - jnp.exp(old)),
    jax.lax.stop_gradient(ratio - bounded - 1.0),
    jnp.abs(log_ratio) > max_log_ratio,
  )


def masking(at: Moved, dropped: jax.Array) -> combine.Metrics:
  """Metrics of a loss that drops the policy gradient of some members.

  Returns:
    is_masked: fraction of the members that are dropped.
    masked_mismatch_kl, unmasked_mismatch_kl: mean k3 estimate of
      KL(mu || pi) over the dropped members, and over the others.
    clamped: fraction of the members whose log ratio is clamped.
  """
  return {
    'is_masked': combine.pair(dropped, at.member),
    'masked_mismatch_kl': combine.pair(at.k3, dropped),
    'unmasked_mismatch_kl': combine.pair(at.k3, at.member & ~dropped),
    'clamped': combine.pair(at.clamped, at.member),
  }
