"""The algorithms, by `type`: one module and one class each."""

from posttrain import schema
from posttrain.algorithms import (
  base,
  custom,
  echo,
  grpo,
  max_rl,
  opd,
  opsd,
  reward,
  rloo,
  sft,
)

# By `type` of the options.
TYPES = {
  'grpo': grpo.Grpo,
  'max_rl': max_rl.MaxRl,
  'rloo': rloo.Rloo,
  'reward': reward.Reward,
  'custom': custom.Custom,
  'echo': echo.Echo,
  'opd': opd.Opd,
  'opsd': opsd.Opsd,
  'sft': sft.Sft,
}


def make(cfg: schema.Algorithm) -> base.Algorithm:
  """Builds the algorithm of the options."""
  return TYPES[cfg.type](cfg)
