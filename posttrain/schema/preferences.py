"""Options of what trains on choices: preference losses, the reward model's."""

import dataclasses

from posttrain.schema import base, references


@dataclasses.dataclass(frozen=True)
class Sigmoid:
  """DPO."""

  type: str = 'sigmoid'
  # The frozen model that it is compared with.
  reference: references.Reference = 'init'
  # How near to the reference; the larger, the nearer.
  beta: float = 0.1
  # How often a label is taken to be wrong.
  label_smoothing: float = 0.0

  def __post_init__(self):
    references.require_frozen(self, 'reference')
    base.require_positive(self, 'beta')
    base.require(
      0 <= self.label_smoothing < 0.5,
      'label_smoothing',
      'be in [0, 0.5)',
      self.label_smoothing,
    )


@dataclasses.dataclass(frozen=True)
class SigmoidNorm(Sigmoid):
  """DPO of log ratios per token: length-normalized."""

  type: str = 'sigmoid_norm'


@dataclasses.dataclass(frozen=True)
class IpoPairs:
  """IPO, as in the paper: sums over the answer."""

  type: str = 'ipo'
  # The frozen model that it is compared with.
  reference: references.Reference = 'init'
  # The margin is 1 / (2 beta).
  beta: float = 0.1

  def __post_init__(self):
    references.require_frozen(self, 'reference')
    base.require_positive(self, 'beta')


@dataclasses.dataclass(frozen=True)
class IpoNorm(IpoPairs):
  """IPO of log ratios per token, as in TRL: length-normalized."""

  type: str = 'ipo_norm'


@dataclasses.dataclass(frozen=True)
class SimPo:
  """SimPO: length-normalized, and without a reference."""

  type: str = 'simpo'
  # Factor of the log probability per token.
  beta: float = 2.0
  # By how much the chosen answer is to win.
  gamma: float = 1.0

  def __post_init__(self):
    base.require_positive(self, 'beta')
    base.require_non_negative(self, 'gamma')


@dataclasses.dataclass(frozen=True)
class Kto:
  """KTO: each answer for itself, chosen or not."""

  type: str = 'kto'
  # The frozen model that it is compared with.
  reference: references.Reference = 'init'
  # How near to the reference; the larger, the nearer.
  beta: float = 0.1
  # Factor of the chosen ones.
  desirable_weight: float = 1.0
  # Factor of the others.
  undesirable_weight: float = 1.0

  def __post_init__(self):
    references.require_frozen(self, 'reference')
    base.require_positive(
      self, 'beta', 'desirable_weight', 'undesirable_weight'
    )


@dataclasses.dataclass(frozen=True)
class Ranking:
  """The reward model's."""

  # Factor of (r_chosen + r_rejected)^2, which keeps rewards around 0.
  center_coef: float = 0.0
  # Factor of the chosen answers' negative log likelihood, per token: what the
  # model knows of text helps it judge, and is not unlearned (Cobbe et al.,
  # arXiv 2110.14168; Yang et al., arXiv 2406.10216).
  lm_coef: float = 0.0

  def __post_init__(self):
    base.require_non_negative(self, 'center_coef', 'lm_coef')


PreferenceLoss = Sigmoid | SigmoidNorm | IpoPairs | IpoNorm | SimPo | Kto
