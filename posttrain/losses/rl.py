"""Policy-gradient losses of a token: `dppo` and `clip`.

Both weigh the advantage with the ratio pi / mu of policy and sampler, and
take the gradient away from tokens that have moved far enough in the direction
it would push them; they differ in what "far" means. rho below is pi / mu.

Axes: any; all arrays have the same shape.
"""

import chex
import jax
import jax.numpy as jnp

from posttrain.losses import combine, ratio


def loss(
    logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    advantages: jax.Array,
    weights: jax.Array,
    *,
    type: str = 'dppo',
    **constants: float,
) -> tuple[jax.Array, combine.Metrics]:
  """Sums the weighted policy-gradient loss of a type over the members.

  A token with weight 0 adds exactly 0 to value and gradient, whatever its
  other inputs (also inf or NaN). No member gives 0.

  Args:
    logprobs: f32[...], log pi of each token under the trained parameters, at
      the temperature it was sampled at, in nats.
    sampler_logprobs: f32[...], log mu, the same when it was sampled.
    advantages: f32[...], credit.
    weights: f32[...]; a token is a member where this is not 0.
    type: 'dppo' or 'clip'.
    **constants: of that function.

  Returns:
    The sum, f32[], and metrics over the member tokens, as (sum, count).
  """
  return TYPES[type](
      logprobs, sampler_logprobs, advantages, weights, **constants
  )


def dppo(
    logprobs: jax.Array, sampler_logprobs: jax.Array, advantages: jax.Array,
    weights: jax.Array, *, low: float = 0.2, high: float = 0.2,
    adv_tau: float = 1.0, kl_tau: float = 1e-3, max_log_ratio: float = 20.0,
) -> tuple[jax.Array, combine.Metrics]:  # fmt: skip
  """Masks by the change of probability; squares the log ratio as a KL.

  sum w (-keep adv_tau A rho + kl_tau (log rho)^2)
  keep = pi - mu <= high   where A > 0
         pi - mu >= -low   else, zero advantage included

  The mask is one-sided: a token that moved against its advantage is kept.
  A masked token keeps the squared term, whose gradient pulls it back.
  low, high >= 1 mask nothing; then, with kl_tau = 0, this is importance-
  weighted policy gradient, and plain policy gradient where rho = 1.

  Args:
    logprobs, sampler_logprobs, advantages, weights: see `loss`.
    low, high: largest fall and rise of a probability.
    adv_tau: factor of the policy gradient.
    kl_tau: factor of the squared log ratio.
    max_log_ratio: bound on |log rho| before exp; above it, a token has no
      policy gradient. (Not in the paper: rho overflows without it.)

  Returns:
    The sum, f32[], and the metrics of `ratio.masking` with
    is_masked_low, is_masked_high: fraction of the members that are masked
      and have A < 0, A > 0.
    masked_advantage_negative, masked_advantage_positive: fraction of the
      masked tokens with A < 0, A > 0.

  References:
    Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning",
    arXiv 2602.04879 (the mask). Kimi Team, "Kimi K2.5", arXiv 2602.02276
    (the squared log ratio).
  """
  at, advantages = _inputs(
      logprobs, sampler_logprobs, advantages, weights, max_log_ratio
  )
  too_far = jnp.where(
      advantages > 0, at.probability > high, at.probability < -low
  )
  dropped = at.member & too_far
  gain = jnp.where(dropped, 0.0, adv_tau * advantages * at.ratio)
  total = jnp.sum(weights * (kl_tau * jnp.square(at.log_ratio) - gain))
  positive, negative = advantages > 0, advantages < 0
  return total, {
      **ratio.masking(at, dropped),
      'is_masked_low': combine.pair(dropped & negative, at.member),
      'is_masked_high': combine.pair(dropped & positive, at.member),
      'masked_advantage_negative': combine.pair(negative, dropped),
      'masked_advantage_positive': combine.pair(positive, dropped),
  }


def clip(
    logprobs: jax.Array, sampler_logprobs: jax.Array, advantages: jax.Array,
    weights: jax.Array, *, low: float = 0.2, high: float = 0.28,
    max_log_ratio: float = 20.0,
) -> tuple[jax.Array, combine.Metrics]:  # fmt: skip
  """Clips the ratio as PPO does, with a bound of its own for each side.

  sum -w min(rho A, clip(rho, 1 - low, 1 + high) A)

  The old policy of the papers is the sampler itself: there is no third set
  of logprobs. No KL term: that is the ref_kl component. Infinite low and
  high clip nothing; rho = 1 gives plain policy gradient.

  Args:
    logprobs, sampler_logprobs, advantages, weights: see `loss`.
    low, high: how far below and above 1 a ratio has a gradient; high > low
      is DAPO's "clip-higher".
    max_log_ratio: bound on |log rho| before exp; above it, no gradient.

  Returns:
    The sum, f32[], and the metrics of `ratio.masking`, masked meaning
    clipped, with `clip_low` and `clip_high`: fraction of the members that
    are clipped below (A < 0), above (A > 0).

  References:
    Schulman et al., "Proximal Policy Optimization Algorithms", arXiv
    1707.06347. Shao et al., "DeepSeekMath" (GRPO), arXiv 2402.03300. Yu et
    al., "DAPO", arXiv 2503.14476 (two bounds, one mean over all tokens).
  """
  at, advantages = _inputs(
      logprobs, sampler_logprobs, advantages, weights, max_log_ratio
  )
  # min(rho A, clip(rho) A) is the second where A's sign has rho pass its
  # bound, else the first. Spelled out, a tie has a whole gradient, not half.
  above = (advantages > 0) & (at.ratio > 1 + high)
  below = (advantages < 0) & (at.ratio < 1 - low)
  bounded = jnp.where(above, 1 + high, jnp.where(below, 1 - low, at.ratio))
  total = -jnp.sum(weights * advantages * bounded)
  return total, {
      **ratio.masking(at, above | below),
      'clip_low': combine.pair(below, at.member),
      'clip_high': combine.pair(above, at.member),
  }


def _inputs(logprobs, sampler_logprobs, advantages, weights, max_log_ratio):
  """(what moved, advantages), both with nothing at non-members."""
  chex.assert_equal_shape([advantages, weights])
  at = ratio.moved(logprobs, sampler_logprobs, weights, max_log_ratio)
  return at, jnp.where(at.member, advantages, 0.0)


TYPES = {'dppo': dppo, 'clip': clip}
