"""Options of the loss components (`ce` has none)."""

import dataclasses
import math
from typing import Any

from posttrain.schema import base, preferences

_MAX_LOG_RATIO = 80.0  # exp of it is still far from float32's largest number


def _require_log_ratio(node: Any) -> None:
  value = node.max_log_ratio
  base.require(
    0 < value <= _MAX_LOG_RATIO,
    'max_log_ratio',
    f'be in (0, {_MAX_LOG_RATIO:g}]',
    value,
  )


@dataclasses.dataclass(frozen=True)
class _Rl:
  """Options of every type of the rl component. Abstract."""

  # Mean of the loss: 'token' (over all member tokens of the batch), 'sequence'
  # (over samples, of the mean over each sample's tokens) or 'constant' (over
  # samples, of the sum over each sample's tokens divided by `constant_tokens`).
  aggregation: str = 'token'
  # Divisor of 'constant', in tokens, such as the longest completion.
  constant_tokens: int | None = None
  # Factor of the entropy bonus on the member tokens.
  entropy_coef: float = 0.0
  # Importance weight that corrects for the sampler, instead of the loss's own
  # ratio: 'none', or the ratio of policy and sampler per token or sequence,
  # truncated to its bounds or masked (weight 0) outside of them:
  # 'token_truncate' (TIS), 'token_mask' (IcePop), 'sequence_truncate',
  # 'sequence_mask'. The type's own bounds have no effect then.
  sampler_is_mode: str = 'none'
  # Lower bound of the importance weight; None = no lower bound.
  sampler_is_clip_min: float | None = None
  # Upper bound of the importance weight.
  sampler_is_clip_max: float = 3.0
  # Log ratio of a sequence: 'sum' or 'mean' of its tokens' log ratios.
  sampler_is_norm: str = 'sum'
  # Bound on |log ratio| before exp, in nats; beyond it, the ratio has no
  # gradient.
  max_log_ratio: float = 20.0

  def __post_init__(self):
    base.require_choice(self, 'aggregation', ('token', 'sequence', 'constant'))
    base.require_choice(
      self,
      'sampler_is_mode',
      (
        'none',
        'token_truncate',
        'token_mask',
        'sequence_truncate',
        'sequence_mask',
      ),
    )
    base.require_choice(self, 'sampler_is_norm', ('sum', 'mean'))
    base.require_non_negative(self, 'entropy_coef')
    base.require_positive(self, 'sampler_is_clip_max')
    _require_log_ratio(self)
    low, high = self.sampler_is_clip_min, self.sampler_is_clip_max
    base.require(
      low is None or 0 <= low < high,
      'sampler_is_clip_min',
      f'be None or in [0, sampler_is_clip_max={high})',
      low,
    )
    base.require(
      self.aggregation != 'constant' or (self.constant_tokens or 0) > 0,
      'constant_tokens',
      "be > 0 where aggregation is 'constant'",
      self.constant_tokens,
    )


@dataclasses.dataclass(frozen=True)
class Dppo(_Rl):
  """Policy gradient, masked where a probability changed a lot (DPPO)."""

  type: str = 'dppo'
  # Largest decrease of a token's probability with a policy gradient, if its
  # advantage is <= 0.
  low: float = 0.2
  # Largest increase of a token's probability with a policy gradient, if its
  # advantage is > 0.
  high: float = 0.2
  # Factor of the policy gradient.
  adv_tau: float = 1.0
  # Factor of the squared log ratio of policy and sampler, of every token.
  kl_tau: float = 1e-3

  def __post_init__(self):
    base.require_non_negative(self, 'low', 'high', 'adv_tau', 'kl_tau')
    super().__post_init__()


@dataclasses.dataclass(frozen=True)
class Ipo(_Rl):
  """Policy gradient, masked by the absolute change of a probability."""

  type: str = 'ipo'
  # Largest change of a token's probability, either way, with a policy
  # gradient.
  threshold: float = 0.1
  # Factor of the policy gradient.
  adv_tau: float = 1.0
  # Factor of the squared log ratio of policy and sampler, of every token.
  kl_tau: float = 1e-3

  def __post_init__(self):
    base.require_non_negative(self, 'threshold', 'adv_tau', 'kl_tau')
    super().__post_init__()


@dataclasses.dataclass(frozen=True)
class Clip(_Rl):
  """Policy gradient with a clipped ratio (PPO, GRPO, DAPO)."""

  type: str = 'clip'
  # The smallest ratio with a policy gradient is 1 - low, if the advantage is
  # negative.
  low: float = 0.2
  # The largest ratio with a policy gradient is 1 + high, if the advantage is
  # positive; high > low is DAPO's clip-higher.
  high: float = 0.28
  # The largest ratio with a policy gradient, if the advantage is negative;
  # None = no upper bound.
  delta: float | None = None

  def __post_init__(self):
    base.require_non_negative(self, 'low', 'high')
    base.require(
      self.delta is None or 1 + self.high < self.delta < math.inf,
      'delta',
      f'be None or > 1 + high={1 + self.high:g}',
      self.delta,
    )
    super().__post_init__()


@dataclasses.dataclass(frozen=True)
class Gspo(_Rl):
  """Policy gradient, clipped by the mean ratio of a sequence (GSPO)."""

  type: str = 'gspo'
  # The smallest ratio of a sequence with a policy gradient is 1 - low, if the
  # advantage is negative.
  low: float = 3e-4
  # The largest ratio of a sequence with a policy gradient is 1 + high, if the
  # advantage is positive.
  high: float = 4e-4
  # Mean of the loss, as for the other types; the default is the paper's.
  aggregation: str = 'sequence'

  def __post_init__(self):
    base.require_non_negative(self, 'low', 'high')
    super().__post_init__()


@dataclasses.dataclass(frozen=True)
class Cispo(_Rl):
  """Policy gradient with a clipped importance weight, no mask (CISPO)."""

  type: str = 'cispo'
  # The smallest weight of a token is 1 - low; low = 1 is no lower bound.
  low: float = 1.0
  # The largest weight of a token is 1 + high.
  high: float = 4.0

  def __post_init__(self):
    base.require_non_negative(self, 'low', 'high')
    super().__post_init__()


@dataclasses.dataclass(frozen=True)
class CustomRl(_Rl):
  """The user's function: arrays per token -> loss per token."""

  type: str = 'custom'
  # 'package.module:function', see `losses.rl_types.custom`.
  import_path: base.Function = ''
  # Keyword arguments of the function, any JSON.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    base.require_import_path(self, 'import_path')
    super().__post_init__()


RlLoss = Dppo | Ipo | Clip | Gspo | Cispo | CustomRl


@dataclasses.dataclass(frozen=True)
class RefKl:
  """KL to a reference: the penalty of `kl_beta`, and the loss of opd, opsd."""

  # 'reverse' (policy gradient of the reverse KL) or 'k3' (the k3 estimator in
  # the loss, as in TRL and the GRPO paper; another gradient).
  estimator: str = 'reverse'
  # Largest decrease of a token's probability with a signal. Only 'reverse'
  # reads this and kl_tau.
  mask_low: float = 0.2
  # Factor of the squared log ratio of policy and sampler, of every token.
  kl_tau: float = 1e-3
  # Bound on the log ratio before exp, in nats; beyond it, no gradient.
  max_log_ratio: float = 20.0

  def __post_init__(self):
    base.require_choice(self, 'estimator', ('reverse', 'k3'))
    base.require_non_negative(self, 'mask_low', 'kl_tau')
    _require_log_ratio(self)


@dataclasses.dataclass(frozen=True)
class Loss:
  """Options of all losses."""

  # The policy-gradient loss, a node with a `type`: 'dppo', 'ipo', 'clip',
  # 'gspo', 'cispo' or 'custom'.
  rl: RlLoss = Dppo()
  # The KL to a reference.
  ref_kl: RefKl = RefKl()
  # The loss of a stage of kind 'preference', a node with a `type`: 'sigmoid'
  # (DPO), 'sigmoid_norm', 'ipo', 'ipo_norm', 'simpo' or 'kto'.
  preference: preferences.PreferenceLoss = preferences.Sigmoid()
  # The loss of a stage of kind 'ranking'.
  ranking: preferences.Ranking = preferences.Ranking()
