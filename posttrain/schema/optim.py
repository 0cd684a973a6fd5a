"""Options of the optimizer."""

import dataclasses

from posttrain.schema import base


@dataclasses.dataclass(frozen=True)
class Optim:
  """AdamW with a schedule (Loshchilov and Hutter, arXiv 1711.05101)."""

  # Peak learning rate.
  lr: float = 3e-4
  # Learning rate after warm-up: 'constant', 'linear' or 'cosine' decay over the
  # stage.
  schedule: str = 'cosine'
  # Length of the linear warm-up from 0, in updates.
  warmup_steps: int = 0
  # Learning rate at the end of the decay, as a fraction of lr.
  final_lr_fraction: float = 0.0
  # Decay of the first moment (the mean gradient), in [0, 1).
  beta1: float = 0.9
  # Decay of the second moment (the mean squared gradient), in [0, 1).
  beta2: float = 0.95
  # Dtype in which both moments are stored: 'float32', or 'bfloat16', which
  # takes 4 bytes less per trained parameter and needs decays of at most 0.99.
  # Each update is computed in float32.
  moments_dtype: str = 'float32'
  # Added to the root of the second moment.
  eps: float = 1e-8
  # Decoupled weight decay: weights shrink by lr times this per update.
  weight_decay: float = 0.1
  # Regex searched in parameter paths; a match is not decayed (scales, biases).
  no_decay: str = r'(scale|bias)$'
  # Largest global gradient norm; a larger gradient is scaled down to it.
  clip_norm: float = 1.0
  # Decay of a moving average of the weights, which evaluation uses; None = no
  # average.
  average: float | None = None
  # Number of consecutive non-finite gradients after which the run aborts.
  max_skipped: int = 5

  def __post_init__(self):
    base.require_positive(self, 'lr', 'eps', 'clip_norm', 'max_skipped')
    base.require_choice(self, 'schedule', ('constant', 'linear', 'cosine'))
    base.require_choice(self, 'moments_dtype', ('float32', 'bfloat16'))
    base.require_non_negative(self, 'warmup_steps', 'weight_decay')
    for field in ('beta1', 'beta2'):  # bias correction divides by 1 - beta
      value = getattr(self, field)
      base.require(0 <= value < 1, field, 'be in [0, 1)', value)
      base.require(
        value <= 0.99 or self.moments_dtype != 'bfloat16',
        field,
        "be at most 0.99 with moments_dtype='bfloat16', which rounds smaller "
        'changes away',
        value,
      )
    base.require(
      0 <= self.final_lr_fraction <= 1,
      'final_lr_fraction',
      'be in [0, 1]',
      self.final_lr_fraction,
    )
    base.require_regex(self, 'no_decay')
    base.require(
      self.average is None or 0 < self.average < 1,
      'average',
      'be None or in (0, 1)',
      self.average,
    )
