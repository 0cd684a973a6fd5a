"""Options of the optimizer."""

import dataclasses

from posttrain.schema import base


@dataclasses.dataclass(frozen=True)
class Optim:
  """AdamW with a schedule (Loshchilov and Hutter, arXiv 1711.05101)."""

  # Peak learning rate.
  lr: float = 3e-4
  # After warm-up: 'constant', 'linear' or 'cosine' decay over the stage.
  schedule: str = 'cosine'
  # Updates of linear warm-up from 0.
  warmup_steps: int = 0
  # Where the decay ends, as a fraction of lr.
  final_lr_fraction: float = 0.0
  beta1: float = 0.9
  beta2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.1
  # Parameters whose path matches are not decayed (norm scales, biases).
  no_decay: str = r'(scale|bias)$'
  # Global gradient norm above which the gradient is scaled down.
  clip_norm: float = 1.0
  # Decay of a moving average of the weights, used by evaluation; None = off.
  average: float | None = None
  # Abort after this many non-finite gradients in a row.
  max_skipped: int = 5

  def __post_init__(self):
    base.require_positive(self, 'lr', 'eps', 'clip_norm', 'max_skipped')
    base.require_choice(self, 'schedule', ('constant', 'linear', 'cosine'))
    base.require(
        self.warmup_steps >= 0, 'warmup_steps', 'be >= 0', self.warmup_steps
    )
    base.require(
        self.weight_decay >= 0, 'weight_decay', 'be >= 0', self.weight_decay
    )
    for field in ('beta1', 'beta2', 'final_lr_fraction'):
      value = getattr(self, field)
      base.require(0 <= value <= 1, field, 'be in [0, 1]', value)
    base.require(
        self.average is None or 0 < self.average < 1, 'average',
        'be None or in (0, 1)', self.average,
    )
