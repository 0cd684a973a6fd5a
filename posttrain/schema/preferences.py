"""Options of the losses on pairs: preference losses, reward-model loss."""

import dataclasses

from posttrain.schema import base, references


@dataclasses.dataclass(frozen=True)
class Sigmoid:
  """DPO."""

  type: str = 'sigmoid'
  # Reference model, frozen.
  reference: references.Reference = 'init'
  # Factor of the log ratio to the reference; a larger beta keeps the policy
  # closer to the reference.
  beta: float = 0.1
  # Assumed rate of wrong labels.
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
  """DPO of log ratios divided by the answer's length (length-normalized)."""

  type: str = 'sigmoid_norm'


@dataclasses.dataclass(frozen=True)
class IpoPairs:
  """IPO with log ratios summed over the answer, as in the paper."""

  type: str = 'ipo'
  # Reference model, frozen.
  reference: references.Reference = 'init'
  # The target margin is 1 / (2 beta).
  beta: float = 0.1

  def __post_init__(self):
    references.require_frozen(self, 'reference')
    base.require_positive(self, 'beta')


@dataclasses.dataclass(frozen=True)
class IpoNorm(IpoPairs):
  """IPO of log ratios divided by the answer's length, as in TRL."""

  type: str = 'ipo_norm'


@dataclasses.dataclass(frozen=True)
class SimPo:
  """SimPO: length-normalized, without a reference."""

  type: str = 'simpo'
  # Factor of the log probability per token.
  beta: float = 2.0
  # Target margin between the chosen and the rejected answer.
  gamma: float = 1.0

  def __post_init__(self):
    base.require_positive(self, 'beta')
    base.require_non_negative(self, 'gamma')


@dataclasses.dataclass(frozen=True)
class Kto:
  """KTO: a loss per answer, chosen or rejected."""

  type: str = 'kto'
  # Reference model, frozen.
  reference: references.Reference = 'init'
  # Factor of the log ratio to the reference; a larger beta keeps the policy
  # closer to the reference.
  beta: float = 0.1
  # Factor of the chosen answers' loss.
  desirable_weight: float = 1.0
  # Factor of the rejected answers' loss.
  undesirable_weight: float = 1.0

  def __post_init__(self):
    references.require_frozen(self, 'reference')
    base.require_positive(
      self, 'beta', 'desirable_weight', 'undesirable_weight'
    )


@dataclasses.dataclass(frozen=True)
class Ranking:
  """The Bradley-Terry loss of a reward model."""

  # Factor of (r_chosen + r_rejected)^2, which keeps rewards around 0.
  center_coef: float = 0.0
  # Factor of the chosen answers' negative log-likelihood per token, which keeps
  # the model's knowledge of text (Cobbe et al., arXiv 2110.14168; Yang et al.,
  # arXiv 2406.10216).
  lm_coef: float = 0.0

  def __post_init__(self):
    base.require_non_negative(self, 'center_coef', 'lm_coef')


PreferenceLoss = Sigmoid | SigmoidNorm | IpoPairs | IpoNorm | SimPo | Kto
