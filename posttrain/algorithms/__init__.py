"""The algorithms, by `type`: one module and one class each."""

from typing import Any

from posttrain import schema, types
from posttrain.algorithms import (
  base,
  custom,
  echo,
  grpo,
  max_rl,
  opd,
  opsd,
  ppo,
  reward,
  rloo,
  sft,
)
from posttrain.util import imports

# By `type` of the options.
TYPES = {
  'grpo': grpo.Grpo,
  'max_rl': max_rl.MaxRl,
  'rloo': rloo.Rloo,
  'reward': reward.Reward,
  'ppo': ppo.Ppo,
  'custom': custom.Custom,
  'echo': echo.Echo,
  'opd': opd.Opd,
  'opsd': opsd.Opsd,
  'sft': sft.Sft,
}


def kind(cfg: schema.Algorithm, key: str = 'algorithm') -> type[base.Algorithm]:
  """Returns the class of the options: the user's own, where they name one.

  Args:
    cfg: the options.
    key: their dotted key, for errors.

  Raises:
    ValueError: the import path names nothing that can be called, or a class
      that is no algorithm.
  """
  own: Any = None
  if isinstance(cfg, schema.Custom):
    own = imports.function(cfg.import_path, f'{key}.import_path')
  if not isinstance(own, type):
    return TYPES[cfg.type]
  if not (
    issubclass(own, base.Algorithm)
    and own.component in types.COMPONENTS
    and (own.component != 'rl' or own.assign != base.Algorithm.assign)
  ):
    raise ValueError(
      f'{key}.import_path must name a function, or a subclass of '
      f'algorithms.base.Algorithm with a component of {types.COMPONENTS}, and '
      f'with assign where that is rl: got {own}'
    )
  return own


def make(cfg: schema.Algorithm) -> base.Algorithm:
  """Builds the algorithm of the options."""
  return kind(cfg)(cfg, **getattr(cfg, 'kwargs', {}))
