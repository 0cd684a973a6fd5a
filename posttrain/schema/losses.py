"""Options of the loss components (`ce` has none)."""

import dataclasses

from posttrain.schema import base

_MAX_LOG_RATIO = 80.0  # exp of it is still far from float32's largest number


def _require_log_ratio(node) -> None:
  value = node.max_log_ratio
  base.require(
      0 < value <= _MAX_LOG_RATIO, 'max_log_ratio',
      f'be in (0, {_MAX_LOG_RATIO:g}]', value,
  )


@dataclasses.dataclass(frozen=True)
class Dppo:
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
  # Bound on |log ratio| before exp; beyond it, no policy gradient.
  max_log_ratio: float = 20.0

  def __post_init__(self):
    base.require_non_negative(self, 'low', 'high', 'adv_tau', 'kl_tau')
    _require_log_ratio(self)


@dataclasses.dataclass(frozen=True)
class Clip:
  """Policy gradient, clipped where a ratio moved far (PPO, GRPO, DAPO)."""

  type: str = 'clip'
  # A token has no policy gradient once its ratio is below 1 by more than
  # this, where its advantage is negative.
  low: float = 0.2
  # The same once it is above 1 by more than this, where the advantage is
  # positive; larger than `low` is DAPO's clip-higher.
  high: float = 0.28
  # Bound on |log ratio| before exp; beyond it, no policy gradient.
  max_log_ratio: float = 20.0

  def __post_init__(self):
    base.require_non_negative(self, 'low', 'high')
    _require_log_ratio(self)


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
    for field in ('mask_low', 'kl_tau') if self.estimator == 'k3' else ():
      value, default = getattr(self, field), getattr(RefKl, field)
      base.require(
          value == default, field, f'be left at {default!r}', value,
          "nothing reads it where estimator is 'k3'",
      )


@dataclasses.dataclass(frozen=True)
class Loss:
  """How the components turn streams into a loss."""

  # The policy-gradient loss: a node with a `type`, 'dppo' or 'clip'.
  rl: Dppo | Clip = Dppo()
  # The KL to a reference.
  ref_kl: RefKl = RefKl()
