"""Options of the loss components (`ce` has none)."""

import dataclasses
import math
from typing import Any

from posttrain.schema import base, preferences

_MAX_LOG_RATIO = 80.0  # exp of it is still far from float32's largest number


def _require_log_ratio(node) -> None:
  value = node.max_log_ratio
  base.require(
    0 < value <= _MAX_LOG_RATIO,
    'max_log_ratio',
    f'be in (0, {_MAX_LOG_RATIO:g}]',
    value,
  )


def _require_defaults(node, fields: tuple[str, ...], why: str) -> None:
  """Refuses keys that were set although nothing would read them."""
  defaults = {f.name: f.default for f in dataclasses.fields(node)}
  for field in fields:
    value, default = getattr(node, field), defaults[field]
    base.require(
      value == default,
      field,
      f'be left at {default!r}',
      value,
      f'nothing reads it where {why}',
    )


@dataclasses.dataclass(frozen=True)
class _Rl:
  """Options that every type of the rl component has. Abstract."""

  # What the loss is a mean over: 'token' (all member tokens of the batch),
  # 'sequence' (the samples, each the mean over its own) or 'constant' (the
  # samples, each the sum over its own, divided by `constant_tokens`).
  aggregation: str = 'token'
  # That divisor: a length in tokens, say the longest completion's.
  constant_tokens: int | None = None
  # Factor of the entropy bonus, over the member tokens.
  entropy_coef: float = 0.0
  # Corrects for a sampler that is not quite the policy, by a weight of its
  # own in place of the loss's ratio: 'none', or the ratio of a 'token_' or
  # 'sequence_', outside of its bounds either truncated or masked (weight 0):
  # 'token_truncate' (TIS), 'token_mask' (IcePop), 'sequence_truncate',
  # 'sequence_mask'. The bounds of the type then have nothing to bite on.
  sampler_is_mode: str = 'none'
  # Bounds of that weight; no lower one where None.
  sampler_is_clip_min: float | None = None
  # The upper one.
  sampler_is_clip_max: float = 3.0
  # A sequence's log ratio is the 'sum' or the 'mean' of its tokens'.
  sampler_is_norm: str = 'sum'
  # Bound on |log ratio| before exp; beyond it, no gradient of the ratio.
  max_log_ratio: float = 20.0

  _bounds = ()  # fields of a type that a ratio of 1 never meets

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
    self._check_unread()

  def _check_unread(self):
    if self.aggregation == 'constant':
      base.require(
        self.constant_tokens is not None and self.constant_tokens > 0,
        'constant_tokens',
        "be > 0 where aggregation is 'constant'",
        self.constant_tokens,
      )
    else:
      _require_defaults(
        self, ('constant_tokens',), "aggregation is not 'constant'"
      )
    mode = self.sampler_is_mode
    if mode == 'none':
      names = ('clip_min', 'clip_max')
      _require_defaults(
        self,
        tuple(f'sampler_is_{name}' for name in names),
        "sampler_is_mode is 'none'",
      )
    else:
      _require_defaults(
        self,
        self._bounds,
        f"sampler_is_mode is {mode!r}: the loss's own ratio is 1",
      )
    if not mode.startswith('sequence'):
      _require_defaults(
        self, ('sampler_is_norm',), f'sampler_is_mode is {mode!r}'
      )


@dataclasses.dataclass(frozen=True)
class Dppo(_Rl):
  """Policy gradient, masked where a probability moved far (DPPO)."""

  type: str = 'dppo'
  # A token has no policy gradient once its probability fell by more than
  # this, where its advantage is not positive.
  low: float = 0.2
  # The same once it rose by more than this, where the advantage is positive.
  high: float = 0.2
  # Factor of the policy gradient.
  adv_tau: float = 1.0
  # Factor of the squared log ratio of policy and sampler, of every token.
  kl_tau: float = 1e-3

  _bounds = ('low', 'high', 'kl_tau')

  def __post_init__(self):
    base.require_non_negative(self, 'low', 'high', 'adv_tau', 'kl_tau')
    super().__post_init__()


@dataclasses.dataclass(frozen=True)
class Ipo(_Rl):
  """Policy gradient, masked where a probability moved far either way."""

  type: str = 'ipo'
  # A token has no policy gradient once its probability changed by more than
  # this, whatever its advantage.
  threshold: float = 0.1
  # Factor of the policy gradient.
  adv_tau: float = 1.0
  # Factor of the squared log ratio of policy and sampler, of every token.
  kl_tau: float = 1e-3

  _bounds = ('threshold', 'kl_tau')

  def __post_init__(self):
    base.require_non_negative(self, 'threshold', 'adv_tau', 'kl_tau')
    super().__post_init__()


@dataclasses.dataclass(frozen=True)
class Clip(_Rl):
  """Policy gradient, clipped where a ratio moved far (PPO, GRPO, DAPO)."""

  type: str = 'clip'
  # A token has no policy gradient once its ratio is below 1 by more than
  # this, where its advantage is negative.
  low: float = 0.2
  # The same once it is above 1 by more than this, where the advantage is
  # positive; larger than `low` is DAPO's clip-higher.
  high: float = 0.28
  # The same once it is above this, where the advantage is negative; None =
  # it is pushed down from however far above.
  delta: float | None = None

  _bounds = ('low', 'high', 'delta')

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
  # A sequence has no policy gradient once its ratio is below 1 by more than
  # this, where its advantage is negative.
  low: float = 3e-4
  # The same once it is above 1 by more than this, where it is positive.
  high: float = 4e-4
  # As everywhere, but with the paper's default.
  aggregation: str = 'sequence'

  _bounds = ('low', 'high')

  def __post_init__(self):
    base.require_non_negative(self, 'low', 'high')
    super().__post_init__()


@dataclasses.dataclass(frozen=True)
class Cispo(_Rl):
  """Policy gradient with a clipped weight and no mask (CISPO)."""

  type: str = 'cispo'
  # How far below 1 the weight of a token may be; 1 = no lower cap.
  low: float = 1.0
  # How far above 1: the cap is 1 + high.
  high: float = 4.0

  _bounds = ('low', 'high')

  def __post_init__(self):
    base.require_non_negative(self, 'low', 'high')
    super().__post_init__()


@dataclasses.dataclass(frozen=True)
class CustomRl(_Rl):
  """A function of the user's: arrays per token -> loss per token."""

  type: str = 'custom'
  # Where it is: 'package.module:function', see `losses.rl_custom`.
  import_path: str = ''
  # Its arguments by name, any JSON.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    base.require_import_path(self, 'import_path')
    super().__post_init__()


RlLoss = Dppo | Ipo | Clip | Gspo | Cispo | CustomRl


@dataclasses.dataclass(frozen=True)
class RefKl:
  """KL to a reference: the leash of `kl_beta`."""

  # 'reverse' (policy gradient of the reverse KL) or 'k3' (the k3 estimator in
  # the loss, as in TRL and the GRPO paper; another gradient).
  estimator: str = 'reverse'
  # A token has no signal once its probability fell by more than this. This
  # and the next are read with 'reverse' alone.
  mask_low: float = 0.2
  # Factor of the squared log ratio of policy and sampler, of every token.
  kl_tau: float = 1e-3
  # Bound on the log ratio before exp; beyond it, no gradient.
  max_log_ratio: float = 20.0

  def __post_init__(self):
    base.require_choice(self, 'estimator', ('reverse', 'k3'))
    base.require_non_negative(self, 'mask_low', 'kl_tau')
    _require_log_ratio(self)
    if self.estimator == 'k3':
      _require_defaults(self, ('mask_low', 'kl_tau'), "estimator is 'k3'")


@dataclasses.dataclass(frozen=True)
class Loss:
  """How the components turn streams into a loss."""

  # The policy-gradient loss: a node with a `type`, 'dppo', 'ipo', 'clip',
  # 'gspo', 'cispo' or 'custom'.
  rl: RlLoss = Dppo()
  # The KL to a reference.
  ref_kl: RefKl = RefKl()
  # What a stage of kind 'preference' minimizes: a node with a `type`,
  # 'sigmoid' (DPO), 'sigmoid_norm', 'ipo', 'ipo_norm', 'simpo' or 'kto'.
  preference: preferences.PreferenceLoss = preferences.Sigmoid()
  # What a stage of kind 'ranking' minimizes.
  ranking: preferences.Ranking = preferences.Ranking()
