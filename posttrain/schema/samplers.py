"""Options of the samplers: where an environment's rollouts come from."""

import dataclasses

from posttrain.schema import base


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Replays the demonstrations that the environment's tasks carry."""

  type: str = 'dataset'
  # A sample longer than a row: 'error', or 'truncate' (cut on the right).
  too_long: str = 'error'

  def __post_init__(self):
    base.require_choice(self, 'too_long', ('error', 'truncate'))
