"""Options of low-rank adaptation."""

import dataclasses

from posttrain.schema import base

MAX_RANK = 2**16  # beyond any matrix that an adapter corrects


@dataclasses.dataclass(frozen=True)
class Lora:
  """Trains a low-rank correction of frozen weights (arXiv 2106.09685)."""

  # Rank of the correction; 0 = no correction, all weights train.
  rank: int = 0
  # The correction is multiplied by alpha / rank.
  alpha: float = 32.0
  # Multiplies by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732).
  rslora: bool = False
  # Regex searched in the paths of the layers' matrices, which are corrected if
  # it matches. Paths are layers/attention/q/kernel (k, v, o) and
  # layers/mlp/up/kernel (gate, down). The default matches all of them.
  targets: str = r'^layers/.*/kernel$'

  def __post_init__(self):
    base.require_within(self, 0, MAX_RANK, 'rank')
    base.require_positive(self, 'alpha')
    base.require_regex(self, 'targets')
