"""Options of low-rank adaptation."""

import dataclasses

from posttrain.schema import base


@dataclasses.dataclass(frozen=True)
class Lora:
  """Trains a low-rank correction of frozen weights (arXiv 2106.09685)."""

  # Rank of the correction; 0 = none: all weights train.
  rank: int = 0
  # The correction counts alpha / rank times.
  alpha: float = 32.0
  # It counts alpha / sqrt(rank) times instead (rsLoRA, arXiv 2312.03732).
  rslora: bool = False
  # Regex; matrices of layers whose path it finds are corrected (default: all).
  # A path is such as layers/attention/q/kernel (k, v, o), layers/mlp/up/kernel
  # (gate, down).
  targets: str = r'^layers/.*/kernel$'

  def __post_init__(self):
    base.require_non_negative(self, 'rank')
    base.require_positive(self, 'alpha')
    base.require_regex(self, 'targets')
