"""Options of the losses: of tokens (`ce` has none), and of pairs."""

import dataclasses
import math
from typing import Annotated, Any

from posttrain.schema import bounds, signals


class Sigmoid(bounds.Options):
  """DPO."""

  type: str = 'sigmoid'
  # Reference model, frozen.
  reference: signals.FrozenReference = 'init'
  # Factor of the log ratio to the reference; a larger beta keeps the policy
  # closer to the reference.
  beta: bounds.Positive = 0.1
  # Assumed rate of wrong labels.
  label_smoothing: Annotated[
    float, bounds.Rule('be in [0, 0.5)', lambda x: 0 <= x < 0.5)
  ] = 0.0


class SigmoidNorm(Sigmoid):
  """DPO of log ratios divided by the answer's length (length-normalized)."""

  type: str = 'sigmoid_norm'


class IpoPairs(bounds.Options):
  """IPO with log ratios summed over the answer, as in the paper."""

  type: str = 'ipo'
  # Reference model, frozen.
  reference: signals.FrozenReference = 'init'
  # The target margin is 1 / (2 beta).
  beta: bounds.Positive = 0.1


class IpoNorm(IpoPairs):
  """IPO of log ratios divided by the answer's length, as in TRL."""

  type: str = 'ipo_norm'


class SimPo(bounds.Options):
  """SimPO: length-normalized, without a reference."""

  type: str = 'simpo'
  # Factor of the log probability per token.
  beta: bounds.Positive = 2.0
  # Target margin between the chosen and the rejected answer.
  gamma: bounds.NonNegative = 1.0


class Kto(bounds.Options):
  """KTO: a loss per answer, chosen or rejected."""

  type: str = 'kto'
  # Reference model, frozen.
  reference: signals.FrozenReference = 'init'
  # Factor of the log ratio to the reference; a larger beta keeps the policy
  # closer to the reference.
  beta: bounds.Positive = 0.1
  # Factor of the chosen answers' loss.
  desirable_weight: bounds.Positive = 1.0
  # Factor of the rejected answers' loss.
  undesirable_weight: bounds.Positive = 1.0


class Ranking(bounds.Options):
  """The Bradley-Terry loss of a reward model."""

  # Factor of (r_chosen + r_rejected)^2, which keeps rewards around 0.
  center_coef: bounds.NonNegative = 0.0
  # Factor of the chosen answers' negative log-likelihood per token, which keeps
  # the model's knowledge of text (Cobbe et al., arXiv 2110.14168; Yang et al.,
  # arXiv 2406.10216).
  lm_coef: bounds.NonNegative = 0.0


PreferenceLoss = Sigmoid | SigmoidNorm | IpoPairs | IpoNorm | SimPo | Kto


# exp of 80 is still far from float32's largest number.
LogRatio = Annotated[float, bounds.Rule('be in (0, 80]', lambda x: 0 < x <= 80)]


AGGREGATIONS = ('token', 'sequence', 'constant')
SAMPLER_IS_MODES = (
  'none',
  'token_truncate',
  'token_mask',
  'sequence_truncate',
  'sequence_mask',
)


class _Rl(bounds.Options):
  """Options of every type of the rl component. Abstract."""

  type: str
  # Mean of the loss: 'token' (over all member tokens of the batch), 'sequence'
  # (over samples, of the mean over each sample's tokens) or 'constant' (over
  # samples, of the sum over each sample's tokens divided by `constant_tokens`).
  aggregation: Annotated[str, bounds.one_of(*AGGREGATIONS)] = 'token'
  # Divisor of 'constant', in tokens, such as the longest completion.
  constant_tokens: int | None = None
  # Factor of the entropy bonus on the member tokens.
  entropy_coef: bounds.NonNegative = 0.0
  # Importance weight that corrects for the sampler, instead of the loss's own
  # ratio: 'none', or the ratio of policy and sampler per token or sequence,
  # truncated to its bounds or masked (weight 0) outside of them:
  # 'token_truncate' (TIS), 'token_mask' (IcePop), 'sequence_truncate',
  # 'sequence_mask'. The type's own ratio is then to the policy before the
  # step's first update (decoupled PPO), so its bounds have no effect with
  # updates_per_rollout=1.
  sampler_is_mode: Annotated[str, bounds.one_of(*SAMPLER_IS_MODES)] = 'none'
  # Lower bound of the importance weight; None = no lower bound.
  sampler_is_clip_min: float | None = None
  # Upper bound of the importance weight.
  sampler_is_clip_max: bounds.Positive = 3.0
  # Log ratio of a sequence: 'sum' or 'mean' of its tokens' log ratios.
  sampler_is_norm: Annotated[str, bounds.one_of('sum', 'mean')] = 'sum'
  # No policy gradient from tokens with a negative advantage in sequences where
  # the mean of log(sampler / policy) exceeds this, in nats; None = no mask.
  off_policy_mask: Annotated[
    float | None, bounds.Rule('be >= 0', lambda x: x >= 0)
  ] = None
  # Bound on |log ratio| before exp, in nats; beyond it, the ratio has no
  # gradient.
  max_log_ratio: LogRatio = 20.0

  def __post_init__(self):
    super().__post_init__()
    low, high = self.sampler_is_clip_min, self.sampler_is_clip_max
    bounds.require(
      low is None or 0 <= low < high,
      'sampler_is_clip_min',
      f'be None or in [0, sampler_is_clip_max={high})',
      low,
    )
    bounds.require(
      self.aggregation != 'constant' or (self.constant_tokens or 0) > 0,
      'constant_tokens',
      "be > 0 where aggregation is 'constant'",
      self.constant_tokens,
    )

  @property
  def is_per_token(self) -> bool:
    """Whether a token's loss depends on no other token of its sample."""
    return (
      self.type in ('dppo', 'ipo', 'clip', 'cispo', 'dro')
      and self.aggregation != 'sequence'
      and self.sampler_is_mode == 'none'
      and self.off_policy_mask is None
    )


class Dppo(_Rl):
  """Policy gradient, masked where a probability changed a lot (DPPO)."""

  type: str = 'dppo'
  # Largest decrease of a token's probability with a policy gradient, if its
  # advantage is <= 0.
  low: bounds.NonNegative = 0.2
  # Largest increase of a token's probability with a policy gradient, if its
  # advantage is > 0.
  high: bounds.NonNegative = 0.2
  # Factor of the policy gradient.
  adv_tau: bounds.NonNegative = 1.0
  # Factor of the squared log ratio of policy and sampler, of every token.
  kl_tau: bounds.NonNegative = 1e-3


class Ipo(_Rl):
  """Policy gradient, masked by the absolute change of a probability."""

  type: str = 'ipo'
  # Largest change of a token's probability, either way, with a policy
  # gradient.
  threshold: bounds.NonNegative = 0.1
  # Factor of the policy gradient.
  adv_tau: bounds.NonNegative = 1.0
  # Factor of the squared log ratio of policy and sampler, of every token.
  kl_tau: bounds.NonNegative = 1e-3


class Clip(_Rl):
  """Policy gradient with a clipped ratio (PPO, GRPO, DAPO)."""

  type: str = 'clip'
  # The smallest ratio with a policy gradient is 1 - low, if the advantage is
  # negative.
  low: bounds.NonNegative = 0.2
  # The largest ratio with a policy gradient is 1 + high, if the advantage is
  # positive; high > low is DAPO's clip-higher.
  high: bounds.NonNegative = 0.28
  # The largest ratio with a policy gradient, if the advantage is negative;
  # None = no upper bound.
  delta: float | None = None

  def __post_init__(self):
    super().__post_init__()
    bounds.require(
      self.delta is None or 1 + self.high < self.delta < math.inf,
      'delta',
      f'be None or > 1 + high={1 + self.high:g}',
      self.delta,
    )


class Gspo(_Rl):
  """Policy gradient, clipped by the mean ratio of a sequence (GSPO)."""

  type: str = 'gspo'
  # The smallest ratio of a sequence with a policy gradient is 1 - low, if the
  # advantage is negative.
  low: bounds.NonNegative = 3e-4
  # The largest ratio of a sequence with a policy gradient is 1 + high, if the
  # advantage is positive.
  high: bounds.NonNegative = 4e-4
  # Mean of the loss, as for the other types; the default is the paper's.
  aggregation: str = 'sequence'


class Cispo(_Rl):
  """Policy gradient with a clipped importance weight, no mask (CISPO)."""

  type: str = 'cispo'
  # The smallest weight of a token is 1 - low; low = 1 is no lower bound.
  low: bounds.NonNegative = 1.0
  # The largest weight of a token is 1 + high.
  high: bounds.NonNegative = 4.0


class Dro(_Rl):
  """Policy gradient without a ratio, with a squared log ratio (DRO)."""

  type: str = 'dro'
  # Factor of half the squared log ratio of policy and sampler, of every token.
  beta: bounds.NonNegative = 0.05


class CustomRl(_Rl):
  """The user's function: arrays per token -> loss per token."""

  type: str = 'custom'
  # 'package.module:function', see `losses.rl_types.custom`.
  import_path: bounds.Function = ''
  # Keyword arguments of the function, any JSON.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


RlLoss = Dppo | Ipo | Clip | Gspo | Cispo | Dro | CustomRl


class RefKl(bounds.Options):
  """KL to a reference: the penalty of `kl_beta`, and the loss of opd, opsd."""

  # 'reverse' (policy gradient of the reverse KL) or 'k3' (the k3 estimator in
  # the loss, as in TRL and the GRPO paper; another gradient).
  estimator: Annotated[str, bounds.one_of('reverse', 'k3')] = 'reverse'
  # Largest decrease of a token's probability with a signal. Only 'reverse'
  # reads this and kl_tau.
  mask_low: bounds.NonNegative = 0.2
  # Factor of the squared log ratio of policy and sampler, of every token.
  kl_tau: bounds.NonNegative = 1e-3
  # Bound on the log ratio before exp, in nats; beyond it, no gradient.
  max_log_ratio: LogRatio = 20.0


class Value(bounds.Options):
  """Advantages by a critic (GAE), and the critic's loss."""

  # Discount of rewards per sampled token.
  gamma: bounds.Share = 1.0
  # Weight of longer sums of rewards in an advantage: 1 = the sum of all later
  # rewards less the value, 0 = the next value stands for them.
  gae_lambda: bounds.Share = 1.0
  # Advantages less their mean, divided by their standard deviation, over the
  # tokens of the batch that have a value.
  normalize_advantages: bool = True
  # Divides the loss by the variance of the batch's returns, so that it does not
  # depend on the scale of the rewards.
  normalize_returns: bool = False
  # Bound of a value's change within the updates of a batch, in units of reward:
  # a value that moved further, towards its return, gets no gradient; None = no
  # bound. It has no effect with updates_per_rollout=1.
  clip: Annotated[float | None, bounds.Rule('be > 0', lambda x: x > 0)] = 0.2
  # Factor of the critic's loss, which with critic.kind='head' also trains the
  # policy's trunk; 0 = the critic does not train.
  coef: bounds.NonNegative = 0.5


class Loss(bounds.Options):
  """Options of all losses."""

  # The policy-gradient loss, a node with a `type`: 'dppo', 'ipo', 'clip',
  # 'gspo', 'cispo', 'dro' or 'custom'.
  rl: RlLoss = Dppo()
  # The KL to a reference.
  ref_kl: RefKl = RefKl()
  # The critic's loss, and the advantages that it gives.
  value: Value = Value()
  # The loss of a stage of kind 'preference', a node with a `type`: 'sigmoid'
  # (DPO), 'sigmoid_norm', 'ipo', 'ipo_norm', 'simpo' or 'kto'.
  preference: PreferenceLoss = Sigmoid()
  # The loss of a stage of kind 'ranking'.
  ranking: Ranking = Ranking()
  # Weight of the loss that balances a model's experts (Switch Transformers,
  # arXiv 2101.03961), over the tokens of a micro-batch, mean over layers; 0 =
  # it is metered only, as router/balance. Not in stages on pairs.
  balance: bounds.NonNegative = 0.0
