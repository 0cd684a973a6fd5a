"""KL to a reference, token by token: a teacher's signal, or a leash.

rho = pi / mu is the ratio of policy and sampler, q the reference.

Axes: any; all arrays have the same shape.
"""

import chex
import jax
import jax.numpy as jnp

from posttrain.losses import combine, ratio

Result = tuple[jax.Array, combine.Metrics]


def loss(
  logprobs: jax.Array,
  sampler_logprobs: jax.Array,
  ref_logprobs: jax.Array,
  weights: jax.Array,
  *,
  estimator: str = 'reverse',
  mask_low: float = 0.2,
  kl_tau: float = 1e-3,
  max_log_ratio: float = 20.0,
) -> Result:
  """Returns the weighted KL to the reference of the member tokens.

  'reverse':  w (-keep s rho + kl_tau (log rho)^2)
              s = stop_gradient(log q - log pi),  keep = pi - mu >= -mask_low

  Policy gradient with s as the credit. Its expectation under mu is the
  gradient of KL(pi || q) of the token's law, so it is what it says.

  'k3':       w (q / pi - log(q / pi) - 1)

  As in TRL and the GRPO paper. As a value it estimates KL(pi || q) without
  bias where mu = pi, and is never negative; but its gradient in the loss is
  (1 - q / pi) d log pi, in expectation that of KL(q || pi), the other
  direction, and only where mu = pi: no ratio corrects it. It reads neither
  sampler_logprobs (but for its metrics) nor mask_low and kl_tau.

  A token with weight 0 has a term of exactly 0, and no gradient, whatever its
  other inputs (also inf or NaN). A reference equal to the policy gives value
  and gradient 0, but for the kl_tau term where mu != pi.

  Args:
    logprobs: f32[...], log pi of each token under the trained parameters, at
      the temperature it was sampled at, in nats.
    sampler_logprobs: f32[...], log mu, the same when it was sampled.
    ref_logprobs: f32[...], log q, the same under the reference.
    weights: f32[...]; a token is a member where this is not 0.
    estimator: 'reverse' or 'k3'.
    mask_low: largest fall of a token's probability, whatever the sign of s.
    kl_tau: factor of the squared log ratio, of masked tokens too.
    max_log_ratio: bound on |log rho| ('reverse') or on log(q / pi) ('k3')
      before exp; beyond it, the term has no gradient.

  Returns:
    The terms, f32[...], and metrics over the members: `kl`, the mean of
    log pi - log q, which estimates KL(pi || q) and is positive in
    expectation where mu = pi; with 'reverse' those of `ratio.masking`; with
    'k3' its mean `k3`, and `clamped`.

  References:
    Lu and Thinking Machines Lab, "On-Policy Distillation", 2025 (the signal
    s). Schulman, "Approximating KL Divergence", 2020 (k3). Shao et al.,
    "DeepSeekMath" (GRPO), arXiv 2402.03300 (k3 in the loss). Kimi Team,
    "Kimi K2.5", arXiv 2602.02276 (the squared log ratio).
  """
  chex.assert_equal_shape([logprobs, ref_logprobs])
  at = ratio.moved(logprobs, sampler_logprobs, weights, max_log_ratio)
  # log q - log pi, each masked for itself: inf - inf is NaN.
  gap = jnp.where(at.member, ref_logprobs, 0.0) - jnp.where(
    at.member, logprobs, 0.0
  )
  if estimator == 'reverse':
    terms, metrics = _reverse(at, gap, weights, mask_low, kl_tau)
  else:
    assert estimator == 'k3', estimator
    terms, metrics = _k3(at, gap, weights, max_log_ratio)
  return terms, {'kl': combine.pair(-gap, at.member), **metrics}


def _reverse(at: ratio.Moved, gap, weights, mask_low, kl_tau) -> Result:
  dropped = at.probability < -mask_low
  signal = jnp.where(dropped, 0.0, jax.lax.stop_gradient(gap))
  penalty = kl_tau * jnp.square(at.log_ratio)
  terms = weights * (penalty - signal * at.ratio)
  return terms, ratio.masking(at, dropped)


def _k3(at: ratio.Moved, gap, weights, max_log_ratio) -> Result:
  # Only a large gap overflows. Both terms are clamped: exp alone would leave
  # the gradient of the other, which points away from the reference.
  bounded = jnp.minimum(gap, max_log_ratio)
  k3 = jnp.exp(bounded) - bounded - 1.0
  return weights * k3, {
    'k3': combine.pair(k3, at.member),
    'clamped': combine.pair(gap > max_log_ratio, at.member),
  }
