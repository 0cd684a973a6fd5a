"""The rl component: policy gradient, in all its types.

1. A type of `rl_types` (or a user's, `rl_custom`) gives a loss per token.
2. `sampler_is` may weigh it with the ratio of policy and sampler.
3. The token's own weight, the entropy bonus, the aggregation.

Axes: T tokens of a row; any dimensions before it.
"""

import chex
import jax
import jax.numpy as jnp

from posttrain.losses import (
  combine,
  ratio,
  rl_custom,
  rl_types,
  sampler_is,
  segments,
)

TYPES = {
  'dppo': rl_types.dppo,
  'ipo': rl_types.ipo,
  'clip': rl_types.clip,
  'gspo': rl_types.gspo,
  'cispo': rl_types.cispo,
  'custom': rl_custom.custom,
}
AGGREGATIONS = ('token', 'sequence', 'constant')


def loss(
  logprobs: jax.Array,
  sampler_logprobs: jax.Array,
  advantages: jax.Array,
  weights: jax.Array,
  segment_ids: jax.Array,
  entropy: jax.Array,
  *,
  type: str = 'dppo',
  aggregation: str = 'token',
  entropy_coef: float = 0.0,
  sampler_is_mode: str = 'none',
  sampler_is_clip_min: float | None = None,
  sampler_is_clip_max: float = 3.0,
  sampler_is_norm: str = 'sum',
  max_log_ratio: float = 20.0,
  **constants,
) -> tuple[jax.Array, combine.Metrics]:
  """Returns the weighted policy-gradient loss of the member tokens.

  (c w l - entropy_coef H) / n

  l: the type's loss; w: the weight; H: the token's entropy; n: the number of
  members of its sequence with aggregation 'sequence', else 1. The sum of
  these, divided by `denominator`, is the component's loss.

  c = 1 with sampler_is_mode 'none': rho = pi / mu inside l corrects for the
  sampler, as far as the type's bounds let it. With another mode the type sees
  the policy itself in the sampler's place, so that rho = pi / sg(pi) is 1 and
  has the gradient of log pi; no bound of the type bites, squared log ratios
  are 0, and so are its metrics; and c is the ratio sg(pi) / mu, truncated or
  masked by `sampler_is.weigh`. A token that is masked stays in the
  denominator. This is what TRL does at one update per batch, and wants one:
  from the second on the policy itself is no longer the old one.

  A token with weight 0 has a term of exactly 0, and no gradient, whatever its
  other inputs (also inf or NaN).

  Args:
    logprobs: f32[..., T], log pi of each token under the trained parameters,
      at the temperature it was sampled at, in nats.
    sampler_logprobs: f32[..., T], log mu, the same when it was sampled.
    advantages: f32[..., T], credit.
    weights: f32[..., T]; a token is a member where this is not 0.
    segment_ids: i32[..., T], which sequence of the row; see `segments`.
    entropy: f32[..., T], of the law of each token, in nats.
    type: of `TYPES`.
    aggregation: of `AGGREGATIONS`; see `denominator`.
    entropy_coef: factor of the entropy bonus, which no weight multiplies.
    sampler_is_mode: of `sampler_is.MODES`.
    sampler_is_clip_min, sampler_is_clip_max, sampler_is_norm: clip_min,
      clip_max and norm of `sampler_is.weigh`.
    max_log_ratio: bound on |log rho| before exp; above it, no gradient passes
      through the ratio. (Not in the papers: rho overflows without it.)
    **constants: of the type's function.

  Returns:
    The terms, f32[..., T], and metrics over the member tokens, as
    (sum, count), of the type and of `sampler_is.weigh`.
  """
  chex.assert_equal_shape([advantages, weights, segment_ids, entropy])
  at = ratio.moved(logprobs, sampler_logprobs, weights, max_log_ratio)
  correction, metrics = None, {}
  if sampler_is_mode != 'none':
    correction, metrics = sampler_is.weigh(
      at,
      segment_ids,
      mode=sampler_is_mode,
      clip_min=sampler_is_clip_min,
      clip_max=sampler_is_clip_max,
      norm=sampler_is_norm,
      max_log_ratio=max_log_ratio,
    )
    sampler_logprobs = jax.lax.stop_gradient(logprobs)
    at = ratio.moved(logprobs, sampler_logprobs, weights, max_log_ratio)
  floats = (
    jnp.where(at.member, x, 0.0)
    for x in (logprobs, sampler_logprobs, advantages, weights)
  )
  inputs = rl_types.Inputs(*floats, segment_ids)
  values, named = TYPES[type](inputs, at, **constants)
  terms = weights * (values if correction is None else correction * values)
  if entropy_coef:
    terms -= entropy_coef * jnp.where(at.member, entropy, 0.0)
  if aggregation == 'sequence':
    terms /= jnp.maximum(segments.totals(at.member, segment_ids), 1.0)
  return terms, {**named, **metrics}


def denominator(
  tokens: jax.Array,
  sequences: jax.Array,
  *,
  aggregation: str = 'token',
  constant_tokens: int | None = None,
) -> jax.Array:
  """Returns what the sum of all terms is divided by.

  token:     member tokens: one mean over all, so a long sequence counts more
  sequence:  sequences: the mean over them of the mean over their members
  constant:  sequences x constant_tokens: the mean over sequences of their
             sums, in units of a length that no batch and no policy changes

  Sequences of the same length make the first two equal, and all three where
  constant_tokens is that length.

  Args:
    tokens: f32[], members of the whole global batch.
    sequences: f32[], sequences of it that have a member.
    aggregation: of `AGGREGATIONS`.
    constant_tokens: read with 'constant' alone.

  References:
    Yu et al., "DAPO", arXiv 2503.14476 (token). Shao et al., "DeepSeekMath",
    arXiv 2402.03300 (sequence). Liu et al., "Understanding R1-Zero-Like
    Training", arXiv 2503.20783 (constant).
  """
  assert aggregation in AGGREGATIONS, aggregation
  if aggregation == 'token':
    return tokens
  return sequences * (constant_tokens if aggregation == 'constant' else 1)
