"""The types of the rl component: one function per type, a loss per token.

All multiply the advantage A with rho = pi / mu, the ratio of policy and
sampler; they differ in the tokens whose gradient they mask or bound. The old
policy of the papers is the sampler itself, or, with a `sampler_is_mode`, the
proximal policy, whose logprobs a type then gets as the sampler's. Where rho = 1
each has the gradient of plain policy gradient, -A d log pi.

A type takes the inputs, the ratio, and its options. It returns the loss
per token, before weight and aggregation (`rl.loss` applies them), and metrics
over the members, always with those of `ratios.masking_metrics`.

Axes: T tokens of a row; any dimensions before it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from posttrain.losses import combine, ratios, segments
from posttrain.schema import objective
from posttrain.util import imports

Result = tuple[jax.Array, combine.Metrics]
_CUSTOM = "config.<stage>.loss.rl.import_path's function"


class Inputs(NamedTuple):
  """Inputs of a type; floats are f32[..., T], and 0 where weights are 0."""

  logprobs: jax.Array  # log pi in nats, with gradient
  sampler_logprobs: jax.Array  # log mu in nats
  advantages: jax.Array  # credit
  weights: jax.Array  # membership is weight != 0; `rl.loss` multiplies by it
  segment_ids: jax.Array  # i32[..., T], contiguous, see `segments`; 0 = pad


def dppo(
  inputs: Inputs, ratio: ratios.Ratio, options: objective.Dppo
) -> Result:
  """Masks by the change of probability, with a squared log ratio as the KL.

  -keep adv_tau A rho + kl_tau (log rho)^2
  keep = pi - mu <= high   where A > 0
         pi - mu >= -low   else, zero advantage included

  The mask is one-sided: a token whose probability changed against the sign of
  its advantage is kept. A masked token keeps the squared term, whose gradient
  reduces the change. low, high >= 1 mask nothing; then, with kl_tau = 0, this
  is importance-weighted policy gradient, and plain policy gradient where
  rho = 1.

  Args:
    inputs, ratio: see `rl.loss`.
    options: low, high: largest decrease and increase of a probability;
      adv_tau, kl_tau: factors of the policy gradient and of the squared log
      ratio.

  Returns:
    The loss per token, and the metrics of `ratios.masking_metrics` with
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
  change = ratio.probability_change
  high, low = options.high, options.low
  too_far = jnp.where(advantages > 0, change > high, change < -low)
  masked = ratio.member & too_far
  positive, negative = advantages > 0, advantages < 0
  return _masked_loss(ratio, advantages, masked, options), {
    **ratios.masking_metrics(ratio, masked),
    'is_masked_low': combine.pair(masked & negative, ratio.member),
    'is_masked_high': combine.pair(masked & positive, ratio.member),
    'masked_advantage_negative': combine.pair(negative, masked),
    'masked_advantage_positive': combine.pair(positive, masked),
  }


def ipo(inputs: Inputs, ratio: ratios.Ratio, options: objective.Ipo) -> Result:
  """Masks by the absolute change of probability; otherwise `dppo`.

  -keep adv_tau A rho + kl_tau (log rho)^2,   keep = |pi - mu| <= threshold

  The mask is two-sided and independent of the advantage: a token whose
  probability changed against the sign of its advantage is masked too, and only
  the squared term reduces the change. threshold >= 1 masks nothing. (Not the
  IPO of preference learning.)

  Args:
    inputs, ratio: see `rl.loss`.
    options: threshold: largest change of a probability, either way; adv_tau,
      kl_tau: as in `dppo`.

  Returns:
    The loss per token, and the metrics of `ratios.masking_metrics`.

  References:
    Prime Intellect, prime-rl, loss type "ipo".
  """
  masked = ratio.member & (
    jnp.abs(ratio.probability_change) > options.threshold
  )
  values = _masked_loss(ratio, inputs.advantages, masked, options)
  return values, ratios.masking_metrics(ratio, masked)


def _masked_loss(
  ratio: ratios.Ratio,
  advantages,
  masked,
  options: objective.Dppo | objective.Ipo,
) -> jax.Array:
  gain = jnp.where(masked, 0.0, options.adv_tau * advantages * ratio.value)
  return options.kl_tau * jnp.square(ratio.log_ratio) - gain


def clip(
  inputs: Inputs, ratio: ratios.Ratio, options: objective.Clip
) -> Result:
  """Clips the ratio as PPO does, with separate bounds below and above 1.

  -min(min(rho, delta) A, clip(rho, 1 - low, 1 + high) A)

  A token has no gradient where rho > 1 + high and A > 0, where rho < 1 - low
  and A < 0, and, with a delta, where rho > delta and A < 0: PPO's gradient on
  such a token grows with rho without bound. There is no KL term: that is the
  ref_kl component. Infinite low and high, and no delta, clip nothing; rho = 1
  gives plain policy gradient.

  Args:
    inputs, ratio: see `rl.loss`.
    options: low, high: how far below and above 1 a ratio has a gradient; high
      > low is DAPO's "clip-higher"; delta: bound on the ratio where A < 0,
      > 1 + high; None = none.

  Returns:
    The loss per token, and the metrics of `ratios.masking_metrics` with
    "masked" meaning clipped, and
    clip_low, clip_high: fraction of the members that are clipped below
      (A < 0), above (A > 0).
    clip_delta: fraction that are clipped at delta, if there is one.

  References:
    Schulman et al., "Proximal Policy Optimization Algorithms", arXiv
    1707.06347. Shao et al., "DeepSeekMath" (GRPO), arXiv 2402.03300. Yu et
    al., "DAPO", arXiv 2503.14476 (two bounds, one mean over all tokens).
    Prime Intellect, "INTELLECT-2", arXiv 2505.07291 (delta).
  """
  return _clipped_loss(inputs, ratio, ratio.value, options, options.delta)


def gspo(
  inputs: Inputs, ratio: ratios.Ratio, options: objective.Gspo
) -> Result:
  """Clips the ratio of whole sequences (GSPO).

  -min(s A, clip(s, 1 - low, 1 + high) A)
  s = exp(mean over the sequence's members of log pi - log mu)

  s is the same for all tokens of a sequence, which are clipped together. Each
  token's term is sg(s) pi / sg(pi), where sg stops gradients. The mean of the
  terms over the sequence has the value and gradient of the paper's s if
  advantage and weight are constant within it, so aggregation 'sequence' is the
  paper's objective. Where they differ within a sequence this is the paper's
  GSPO-token. The mean is near 1 for sequences of any length, hence the small
  bounds; for sequences of one token this is `clip`. rho = 1 gives plain policy
  gradient.

  The mean is over clamped log ratios.

  Args:
    inputs, ratio: see `rl.loss`.
    options: low, high: how far below and above 1 a sequence has a gradient.

  Returns:
    As `clip`; the fractions are of member tokens.

  References:
    Zheng et al., "Group Sequence Policy Optimization", arXiv 2507.18071.
  """
  count = segments.totals(ratio.member, inputs.segment_ids)
  total = segments.totals(ratio.clamped_log_ratio, inputs.segment_ids)
  mean = total / jnp.maximum(count, 1.0)
  log_ratio = ratio.clamped_log_ratio
  own = log_ratio - jax.lax.stop_gradient(log_ratio)  # 0, with gradient
  return _clipped_loss(inputs, ratio, jnp.exp(mean + own), options)


def _clipped_loss(
  inputs: Inputs,
  ratio: ratios.Ratio,
  rho,
  options: objective.Clip | objective.Gspo,
  delta: float | None = None,
) -> Result:
  """Returns the loss of `clip` for rho, which may be a sequence's ratio."""
  low, high = options.low, options.high
  advantages = inputs.advantages
  # min(rho A, clip(rho) A) is clip(rho) A where rho exceeds the bound on the
  # side of A's sign, else rho A. As `where`s, a tie has the full gradient; with
  # minimum it would have half of it.
  above = (advantages > 0) & (rho > 1 + high)
  below = (advantages < 0) & (rho < 1 - low)
  bounded = jnp.where(above, 1 + high, jnp.where(below, 1 - low, rho))
  masked, metrics = above | below, {}
  if delta is not None:
    capped = (advantages < 0) & (rho > delta)
    bounded, masked = jnp.where(capped, delta, bounded), masked | capped
    metrics['clip_delta'] = combine.pair(capped, ratio.member)
  return -advantages * bounded, {
    **ratios.masking_metrics(ratio, masked),
    'clip_low': combine.pair(below, ratio.member),
    'clip_high': combine.pair(above, ratio.member),
    **metrics,
  }


def cispo(
  inputs: Inputs, ratio: ratios.Ratio, options: objective.Cispo
) -> Result:
  """Clips the importance weight of each token; masks no gradient (CISPO).

  -sg(clip(rho, 1 - low, 1 + high)) A log pi

  sg stops gradients, so every token keeps the gradient of log pi, with a
  bounded weight. The value of this loss is not an objective. low and high are
  distances from 1, as in the other types, in the paper and in verl; TRL's
  `epsilon_high` is the cap itself. The paper has no lower cap, and tunes the
  upper one without giving its value; low = 1 is no cap, and high = 4 caps at
  5, as TRL suggests. rho = 1 gives the gradient of plain policy gradient, and
  another value.

  Args:
    inputs, ratio: see `rl.loss`. The clamp of log rho bounds the weight too.
    options: low, high: how far below and above 1 a weight may be.

  Returns:
    The loss per token, and the metrics of `ratios.masking_metrics`, with no
    token masked, and
    clip_low, clip_high: fraction of the members whose weight is below, above
      its bound, whatever the advantage.

  References:
    MiniMax, "MiniMax-M1", arXiv 2506.13585. Khatri et al., "The Art of
    Scaling Reinforcement Learning Compute for LLMs", arXiv 2510.13786.
  """
  least, most = 1 - options.low, 1 + options.high
  weight = jax.lax.stop_gradient(jnp.clip(ratio.value, least, most))
  return -weight * inputs.advantages * inputs.logprobs, {
    **ratios.masking_metrics(ratio, jnp.zeros_like(ratio.member)),
    'clip_low': combine.pair(ratio.value < least, ratio.member),
    'clip_high': combine.pair(ratio.value > most, ratio.member),
  }


def dro(inputs: Inputs, ratio: ratios.Ratio, options: objective.Dro) -> Result:
  """Penalizes the squared log ratio; weighs and masks no gradient (DRO).

  -A log pi + beta/2 (log rho)^2

  rho = 1 gives the gradient of plain policy gradient, and another value. The
  advantages of the paper are soft: rewards less a value that depends on beta.

  Args:
    inputs, ratio: see `rl.loss`.
    options: beta: factor of the penalty.

  Returns:
    The loss per token, and the metrics of `ratios.masking_metrics`, with no
    token masked.

  References:
    Richemond et al., "Offline Regularised Reinforcement Learning for Large
    Language Models Alignment", arXiv 2405.19107. Kimi Team, "Kimi k1.5", arXiv
    2501.12599.
  """
  penalty = 0.5 * options.beta * jnp.square(ratio.log_ratio)
  values = penalty - inputs.advantages * inputs.logprobs
  unmasked = jnp.zeros_like(ratio.member)
  return values, ratios.masking_metrics(ratio, unmasked)


def custom(
  inputs: Inputs, ratio: ratios.Ratio, options: objective.CustomRl
) -> Result:
  """Returns the loss per token that the user's function computes.

      def importance(inputs, scale):
        ratio = jnp.exp(inputs.logprobs - inputs.sampler_logprobs)
        return -scale * inputs.advantages * ratio, {'ratio': ratio}

  As for every type, the loss is multiplied by the weights and divided by the
  global count afterwards: the function must neither sum nor average. Its
  inputs are not clamped; they are 0 at non-members, where its outputs are
  dropped.

  Args:
    inputs: see `Inputs`; a row may hold several sequences, with
      different `segment_ids`.
    ratio: policy over sampler; only `member` is read.
    options: name the function, of jax operations, which is traced once per
      compilation, and its keyword arguments.

  Returns:
    The loss per token, and the means over the members of the function's
    metrics.

  Raises:
    ValueError: the function returns neither a loss per token nor a pair of a
      loss and a dict of metrics per token.
  """
  function = imports.function(
    options.import_path, 'config.STAGE.loss.rl.import_path'
  )
  outputs = function(inputs, **options.kwargs)
  values, metrics = outputs if isinstance(outputs, tuple) else (outputs, {})
  shape = inputs.logprobs.shape
  if not isinstance(metrics, Mapping):
    got = type(metrics).__name__
    raise ValueError(
      f'{_CUSTOM} must return metrics as a dict of arrays: got {got}'
    )
  named = {f'a metric {name!r}': value for name, value in metrics.items()}
  for what, value in {'a loss': values, **named}.items():
    is_array = isinstance(value, jax.Array)
    if not is_array or value.shape != shape:
      got = f'shape {value.shape}' if is_array else type(value).__name__
      raise ValueError(
        f'{_CUSTOM} must return {what} per token: got {got}, expected shape '
        f'{shape}; do not sum or average'
      )
  dtype = jnp.promote_types(values.dtype, jnp.float32)
  values = jnp.where(ratio.member, values.astype(dtype), 0.0)
  return values, {
    name: combine.pair(value, ratio.member) for name, value in metrics.items()
  }
