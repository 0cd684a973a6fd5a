"""The types of the rl component: one function per type, a loss per token.

All weigh the advantage A with rho = pi / mu, the ratio of policy and sampler;
they differ in which tokens have moved too far to have a gradient. The old
policy of the papers is the sampler itself: there is no third set of logprobs.
Where rho = 1 each has the gradient of plain policy gradient, -A d log pi.

A type takes the inputs, what moved, and constants of its own; it returns its
loss of each token, before weight and aggregation (`rl.loss` does those), and
metrics over the members. All of them have those of `ratio.masking`.

Axes: T tokens of a row; any dimensions before it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from posttrain.losses import combine, ratio, segments

Result = tuple[jax.Array, combine.Metrics]


class Inputs(NamedTuple):
  """What a type sees; floats are f32[..., T], and 0 where weights are 0."""

  logprobs: jax.Array  # log pi in nats, with gradient
  sampler_logprobs: jax.Array  # log mu in nats
  advantages: jax.Array  # credit
  weights: jax.Array  # membership is weight != 0; `rl.loss` multiplies by it
  segment_ids: jax.Array  # i32[..., T], contiguous per sequence; 0 = pad


def dppo(
  inputs: Inputs,
  at: ratio.Moved,
  *,
  low: float = 0.2,
  high: float = 0.2,
  adv_tau: float = 1.0,
  kl_tau: float = 1e-3,
) -> Result:
  """Masks by the change of probability; squares the log ratio as a KL.

  -keep adv_tau A rho + kl_tau (log rho)^2
  keep = pi - mu <= high   where A > 0
         pi - mu >= -low   else, zero advantage included

  The mask is one-sided: a token that moved against its advantage is kept.
  A masked token keeps the squared term, whose gradient pulls it back.
  low, high >= 1 mask nothing; then, with kl_tau = 0, this is importance-
  weighted policy gradient, and plain policy gradient where rho = 1.

  Args:
    inputs, at: see `rl.loss`.
    low, high: largest fall and rise of a probability.
    adv_tau: factor of the policy gradient.
    kl_tau: factor of the squared log ratio.

  Returns:
    The loss per token, and the metrics of `ratio.masking` with
    is_masked_low, is_masked_high: fraction of the members that are masked
      and have A < 0, A > 0.
    masked_advantage_negative, masked_advantage_positive: fraction of the
      masked tokens with A < 0, A > 0.

  References:
    Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning",
    arXiv 2602.04879 (the mask). Kimi Team, "Kimi K2.5", arXiv 2602.02276
    (the squared log ratio).
  """
  advantages = inputs.advantages
  too_far = jnp.where(
    advantages > 0, at.probability > high, at.probability < -low
  )
  dropped = at.member & too_far
  positive, negative = advantages > 0, advantages < 0
  return _masked(at, advantages, dropped, adv_tau, kl_tau), {
    **ratio.masking(at, dropped),
    'is_masked_low': combine.pair(dropped & negative, at.member),
    'is_masked_high': combine.pair(dropped & positive, at.member),
    'masked_advantage_negative': combine.pair(negative, dropped),
    'masked_advantage_positive': combine.pair(positive, dropped),
  }


def ipo(
  inputs: Inputs,
  at: ratio.Moved,
  *,
  threshold: float = 0.1,
  adv_tau: float = 1.0,
  kl_tau: float = 1e-3,
) -> Result:
  """Masks what moved far in either direction; otherwise `dppo`.

  -keep adv_tau A rho + kl_tau (log rho)^2,   keep = |pi - mu| <= threshold

  Two-sided and blind to the advantage: a token that moved far against its
  advantage is dropped too, and has but the squared term to bring it back.
  threshold >= 1 masks nothing. (Not the IPO of preference learning.)

  Args:
    inputs, at: see `rl.loss`.
    threshold: largest change of a probability.
    adv_tau, kl_tau: as in `dppo`.

  Returns:
    The loss per token, and the metrics of `ratio.masking`.

  References:
    Prime Intellect, prime-rl, loss type "ipo".
  """
  dropped = at.member & (jnp.abs(at.probability) > threshold)
  values = _masked(at, inputs.advantages, dropped, adv_tau, kl_tau)
  return values, ratio.masking(at, dropped)


def _masked(at, advantages, dropped, adv_tau, kl_tau):
  gain = jnp.where(dropped, 0.0, adv_tau * advantages * at.ratio)
  return kl_tau * jnp.square(at.log_ratio) - gain


def clip(
  inputs: Inputs,
  at: ratio.Moved,
  *,
  low: float = 0.2,
  high: float = 0.28,
  delta: float | None = None,
) -> Result:
  """Clips the ratio as PPO does, with a bound of its own for each side.

  -min(min(rho, delta) A, clip(rho, 1 - low, 1 + high) A)

  A token has no gradient where rho > 1 + high and A > 0, where rho < 1 - low
  and A < 0, and, with a delta, where rho > delta and A < 0: what should fall
  but has risen that far is left alone, where PPO pushes it the harder the
  further it rose. No KL term: that is the ref_kl component. Infinite low and
  high, and no delta, clip nothing; rho = 1 gives plain policy gradient.

  Args:
    inputs, at: see `rl.loss`.
    low, high: how far below and above 1 a ratio has a gradient; high > low
      is DAPO's "clip-higher".
    delta: bound on the ratio where A < 0, > 1 + high; None = none.

  Returns:
    The loss per token, and the metrics of `ratio.masking`, masked meaning
    clipped, with `clip_low` and `clip_high`: fraction of the members that
    are clipped below (A < 0), above (A > 0); with a delta also `clip_delta`.

  References:
    Schulman et al., "Proximal Policy Optimization Algorithms", arXiv
    1707.06347. Shao et al., "DeepSeekMath" (GRPO), arXiv 2402.03300. Yu et
    al., "DAPO", arXiv 2503.14476 (two bounds, one mean over all tokens).
    Prime Intellect, "INTELLECT-2", arXiv 2505.07291 (delta).
  """
  return _clipped(inputs, at, at.ratio, low, high, delta)


def gspo(
  inputs: Inputs, at: ratio.Moved, *, low: float = 3e-4, high: float = 4e-4
) -> Result:
  """Clips the ratio of whole sequences (GSPO).

  -min(s A, clip(s, 1 - low, 1 + high) A)
  s = exp(mean over the sequence's members of log pi - log mu)

  The same for every token of a sequence, clipped or not as one. Each token
  carries s with its own part of the gradient: sg(s) pi / sg(pi), where sg
  stops gradients. Their mean over the sequence has value and gradient of
  the paper's s where advantage and weight are the same all over it; so
  aggregation 'sequence' is the paper's objective. Where they differ within a
  sequence this is the paper's GSPO-token. A mean is near 1 however long the
  sequence, hence the small bounds; sequences of one token make this `clip`.
  rho = 1 gives plain policy gradient.

  A token whose own log ratio is clamped counts with the clamped one.

  Args:
    inputs, at: see `rl.loss`.
    low, high: how far below and above 1 a sequence has a gradient.

  Returns:
    As `clip`; the fractions are of the member tokens.

  References:
    Zheng et al., "Group Sequence Policy Optimization", arXiv 2507.18071.
  """
  count = segments.totals(at.member, inputs.segment_ids)
  total = segments.totals(at.bounded, inputs.segment_ids)
  mean = total / jnp.maximum(count, 1.0)
  own = at.bounded - jax.lax.stop_gradient(at.bounded)  # 0, with gradient
  return _clipped(inputs, at, jnp.exp(mean + own), low, high, None)


def _clipped(inputs, at, level, low, high, delta) -> Result:
  """`clip` of a ratio that may be another than the token's own."""
  advantages = inputs.advantages
  # min(rho A, clip(rho) A) is the second where A's sign has rho pass its
  # bound, else the first. Spelled out, a tie has a whole gradient, not half.
  above = (advantages > 0) & (level > 1 + high)
  below = (advantages < 0) & (level < 1 - low)
  bounded = jnp.where(above, 1 + high, jnp.where(below, 1 - low, level))
  dropped, metrics = above | below, {}
  if delta is not None:
    capped = (advantages < 0) & (level > delta)
    bounded, dropped = jnp.where(capped, delta, bounded), dropped | capped
    metrics['clip_delta'] = combine.pair(capped, at.member)
  return -advantages * bounded, {
    **ratio.masking(at, dropped),
    'clip_low': combine.pair(below, at.member),
    'clip_high': combine.pair(above, at.member),
    **metrics,
  }


def cispo(
  inputs: Inputs, at: ratio.Moved, *, low: float = 1.0, high: float = 4.0
) -> Result:
  """Clips the weight of a token, and never its gradient (CISPO).

  -sg(clip(rho, 1 - low, 1 + high)) A log pi

  sg stops gradients, so no token loses its own: a rare one that moved far
  still teaches, with a bounded weight. The value is no objective and says
  little. low and high are distances from 1, as everywhere here, in the paper
  and in verl; TRL's `epsilon_high` is the cap itself. The paper has no lower
  cap and tunes the upper one, without telling its value; low = 1 is none,
  and high = 4 caps at 5, as TRL suggests. rho = 1 gives plain policy gradient
  (but not its value).

  Args:
    inputs, at: see `rl.loss`. The clamp of log rho bounds the weight too.
    low, high: how far below and above 1 a weight may be.

  Returns:
    The loss per token, and the metrics of `ratio.masking`, of which nothing
    is masked, with `clip_low` and `clip_high`: fraction of the members whose
    weight is below, above its bound, whatever the advantage.

  References:
    MiniMax, "MiniMax-M1", arXiv 2506.13585. Khatri et al., "The Art of
    Scaling Reinforcement Learning Compute for LLMs", arXiv 2510.13786.
  """
  weight = jax.lax.stop_gradient(jnp.clip(at.ratio, 1 - low, 1 + high))
  return -weight * inputs.advantages * inputs.logprobs, {
    **ratio.masking(at, jnp.zeros_like(at.member)),
    'clip_low': combine.pair(at.ratio < 1 - low, at.member),
    'clip_high': combine.pair(at.ratio > 1 + high, at.member),
  }
