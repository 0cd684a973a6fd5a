"""Options of the algorithms, one dataclass per type."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sft:
  """Supervised fine-tuning: cross-entropy on the completion tokens."""

  type: str = 'sft'
