"""The rl component: policy-gradient losses.

1. A type of `rl_types`, which may be the user's function, returns a loss per
   token.
2. `sampler_is` may multiply it with the ratio of policy and sampler, and mask
   sequences that the policy has moved away from.
3. The token's weight, the entropy bonus and the aggregation are applied.

Axes: T tokens of a row; any dimensions before it.
"""

import chex
import jax
import jax.numpy as jnp

from posttrain.losses import combine, ratios, rl_types, sampler_is, segments
from posttrain.schema import objective

# By `type` of the options.
TYPES = {
  'dppo': rl_types.dppo,
  'ipo': rl_types.ipo,
  'clip': rl_types.clip,
  'gspo': rl_types.gspo,
  'cispo': rl_types.cispo,
  'dro': rl_types.dro,
  'custom': rl_types.custom,
}


def loss(
  logprobs: jax.Array,
  sampler_logprobs: jax.Array,
  advantages: jax.Array,
  weights: jax.Array,
  segment_ids: jax.Array,
  entropy: jax.Array,
  options: objective.RlLoss,
  proximal_logprobs: jax.Array | None = None,
) -> tuple[jax.Array, combine.Metrics]:
  """Returns the weighted policy-gradient loss of the member tokens.

  (c w l - entropy_coef H) / n

  l: the type's loss; w: the weight; H: the token's entropy; n: the number of
  members of its sequence with aggregation 'sequence', else 1. The sum of the
  terms, divided by `denominator`, is the component's loss.

  c = 1 with sampler_is_mode 'none': rho = pi / mu inside l corrects for the
  sampler, within the type's bounds. With another mode (decoupled PPO) the type
  gets the logprobs of the proximal policy, the one before the step's first
  update, as the sampler's, so that rho = pi / prox; and c is prox / mu,
  truncated or masked by `sampler_is.weigh`. A masked token stays in the
  denominator. In the first update rho is 1 and has the gradient of log pi; the
  type's bounds have no effect, squared log ratios and the type's metrics are 0.
  `proximal_logprobs` None stands for that update, with prox = sg(pi).

  With `off_policy_mask`, tokens of `sampler_is.off_policy` have a credit of 0;
  they stay in the denominator, and keep squared log ratios.

  A token with weight 0 has a term of exactly 0, and no gradient, whatever its
  other inputs (also inf or NaN).

  Args:
    logprobs: f32[..., T], log pi of each token under the trained parameters,
      in nats, at the token's sampling temperature.
    sampler_logprobs: f32[..., T], log mu of each token at sampling time, nats.
    advantages: f32[..., T], credit.
    weights: f32[..., T]; a token is a member where this is not 0.
    segment_ids: i32[..., T], the sequence within the row; see `segments`.
    entropy: f32[..., T], entropy of each token's distribution, in nats.
    options: those of the type. sampler_is_* are those of `sampler_is.weigh`;
      max_log_ratio bounds |log rho| before exp, in nats; above it, no gradient
      passes through the ratio. (Not in the papers: rho overflows without it.)
    proximal_logprobs: f32[..., T], log prox of each token in nats, or None.

  Returns:
    The terms, f32[..., T], and the metrics of the type and of
    `sampler_is.weigh` over the member tokens, as (sum, count); with
    off_policy_mask also is_off_policy, the fraction that it masks.

  References:
    Hilton et al., "Batch size-invariance for policy optimization", arXiv
    2110.00641; Fu et al., "AReaL", arXiv 2505.24298 (decoupled PPO).
    DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556 (off_policy_mask).
  """
  chex.assert_equal_shape([advantages, weights, segment_ids, entropy])
  bound = options.max_log_ratio
  ratio = ratios.policy_over_sampler(logprobs, sampler_logprobs, weights, bound)
  correction, is_metrics = None, {}
  if options.off_policy_mask is not None:
    masked = sampler_is.off_policy(
      ratio, advantages, segment_ids, options.off_policy_mask
    )
    advantages = jnp.where(masked, 0.0, advantages)
    is_metrics['is_off_policy'] = combine.pair(masked, ratio.member)
  if options.sampler_is_mode != 'none':
    proximal = logprobs if proximal_logprobs is None else proximal_logprobs
    proximal = jax.lax.stop_gradient(proximal)
    correction, weight_metrics = sampler_is.weigh(
      ratios.policy_over_sampler(proximal, sampler_logprobs, weights, bound),
      segment_ids,
      mode=options.sampler_is_mode,
      clip_min=options.sampler_is_clip_min,
      clip_max=options.sampler_is_clip_max,
      norm=options.sampler_is_norm,
      max_log_ratio=bound,
    )
    is_metrics |= weight_metrics
    sampler_logprobs = proximal
    ratio = ratios.policy_over_sampler(logprobs, proximal, weights, bound)
  arrays = logprobs, sampler_logprobs, advantages, weights
  new, old, credit, weight = (jnp.where(ratio.member, x, 0.0) for x in arrays)
  inputs = rl_types.Inputs(new, old, credit, weight, segment_ids)
  values, metrics = TYPES[options.type](inputs, ratio, options)
  terms = weights * (values if correction is None else correction * values)
  if options.entropy_coef:
    terms -= options.entropy_coef * jnp.where(ratio.member, entropy, 0.0)
  if options.aggregation == 'sequence':
    terms /= jnp.maximum(segments.totals(ratio.member, segment_ids), 1.0)
  return terms, {**metrics, **is_metrics}


def denominator(
  tokens: jax.Array,
  sequences: jax.Array,
  *,
  aggregation: str,
  constant_tokens: int | None,
) -> jax.Array:
  """Returns the divisor of the sum of all terms, f32[].

  token:     member tokens; the loss is the mean over all tokens, so a long
             sequence counts more
  sequence:  sequences; the loss is the mean over sequences of the mean over
             their members
  constant:  sequences x constant_tokens; the loss is the mean over sequences
             of their sums, divided by a length independent of batch and policy

  The first two are equal for sequences of equal length, and all three if
  constant_tokens is that length.

  Args:
    tokens: f32[], number of member tokens in the global batch.
    sequences: f32[], number of its sequences that have a member.
    aggregation: one of `objective.AGGREGATIONS`.
    constant_tokens: a length in tokens, read with 'constant' only.

  References:
    Yu et al., "DAPO", arXiv 2503.14476 (token). Shao et al., "DeepSeekMath",
    arXiv 2402.03300 (sequence). Liu et al., "Understanding R1-Zero-Like
    Training", arXiv 2503.20783 (constant).
  """
  assert aggregation in objective.AGGREGATIONS, aggregation
  if aggregation == 'token':
    return tokens
  scale = constant_tokens if aggregation == 'constant' else 1
  assert scale is not None, 'constant_tokens'
  return sequences * scale
