"""KL to a reference per token: a distillation signal, or a penalty.

rho = pi / mu is the ratio of policy and sampler, q the reference.

Axes: any; all arrays have the same shape.
"""

import chex
import jax
import jax.numpy as jnp

from posttrain.losses import combine, ratios


def loss(
  logprobs: jax.Array,
  sampler_logprobs: jax.Array,
  ref_logprobs: jax.Array,
  weights: jax.Array,
  *,
  estimator: str,
  mask_low: float,
  kl_tau: float,
  max_log_ratio: float,
) -> tuple[jax.Array, combine.Metrics]:
  """Returns the weighted KL to the reference of the member tokens.

  'reverse':  w (-keep s rho + kl_tau (log rho)^2)
              s = stop_gradient(log q - log pi),  keep = pi - mu >= -mask_low

  Policy gradient with s as the credit. Its expectation under mu is the
  gradient of KL(pi || q) of the token's distribution.

  'k3':       w (q / pi - log(q / pi) - 1)

  As in TRL and the GRPO paper. Its value is never negative, and estimates
  KL(pi || q) without bias where mu = pi. But its gradient is
  (1 - q / pi) d log pi, in expectation that of KL(q || pi), the other
  direction, and only where mu = pi: no ratio corrects it. It reads
  sampler_logprobs only for its metrics, and neither mask_low nor kl_tau.

  A token with weight 0 has a term of exactly 0, and no gradient, whatever its
  other inputs (also inf or NaN). A reference equal to the policy gives value
  and gradient 0, except for the kl_tau term where mu != pi.

  Args:
    logprobs: f32[...], log pi of each token under the trained parameters, in
      nats, at the token's sampling temperature.
    sampler_logprobs: f32[...], log mu of each token at sampling time, nats.
    ref_logprobs: f32[...], log q of each token under the reference, nats.
    weights: f32[...]; a token is a member where this is not 0.
    estimator: 'reverse' or 'k3'.
    mask_low: largest decrease of a token's probability, whatever the sign of
      s.
    kl_tau: factor of the squared log ratio, of masked tokens too.
    max_log_ratio: bound on |log rho| ('reverse') or on log(q / pi) ('k3')
      before exp, in nats; beyond it, the term has no gradient.

  Returns:
    The terms, f32[...], and metrics over the members: `kl`, the mean of
    log pi - log q, which estimates KL(pi || q) and is positive in
    expectation where mu = pi; with 'reverse' those of
    `ratios.masking_metrics`; with 'k3' the mean `k3`, and the fraction
    `clamped`.

  References:
    Lu and Thinking Machines Lab, "On-Policy Distillation", 2025 (the signal
    s). Schulman, "Approximating KL Divergence", 2020 (k3). Shao et al.,
    "DeepSeekMath" (GRPO), arXiv 2402.03300 (k3 in the loss). Kimi Team,
    "Kimi K2.5", arXiv 2602.02276 (the squared log ratio).
  """
  chex.assert_equal_shape([logprobs, ref_logprobs])
  ratio = ratios.policy_over_sampler(
    logprobs, sampler_logprobs, weights, max_log_ratio
  )
  # log q - log pi, masked before the difference: inf - inf is NaN.
  gap = jnp.where(ratio.member, ref_logprobs, 0.0) - jnp.where(
    ratio.member, logprobs, 0.0
  )
  if estimator == 'reverse':
    masked = ratio.probability_change < -mask_low
    signal = jnp.where(masked, 0.0, jax.lax.stop_gradient(gap))
    penalty = kl_tau * jnp.square(ratio.log_ratio)
    terms = weights * (penalty - signal * ratio.value)
    metrics = ratios.masking_metrics(ratio, masked)
  else:
    assert estimator == 'k3', estimator
    # Only a large positive gap overflows. Both terms are clamped: with exp
    # alone clamped, the other term's gradient points away from the reference.
    bounded = jnp.minimum(gap, max_log_ratio)
    k3 = jnp.exp(bounded) - bounded - 1.0
    terms, metrics = (
      weights * k3,
      {
        'k3': combine.pair(k3, ratio.member),
        'clamped': combine.pair(gap > max_log_ratio, ratio.member),
      },
    )
  return terms, {'kl': combine.pair(-gap, ratio.member), **metrics}
