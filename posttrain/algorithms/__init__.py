"""The algorithms, by `type`. Reading a class top to bottom is the method."""

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


def make(cfg) -> base.Algorithm:
  """Builds the algorithm that a schema node describes."""
  return TYPES[cfg.type](cfg)
