"""The algorithms, by `type`. Reading a class top to bottom is the method."""

from posttrain.algorithms import base, grpo, sft

TYPES = {'sft': sft.Sft, 'grpo': grpo.Grpo}


def make(cfg) -> base.Algorithm:
  """Builds the algorithm that a schema node describes."""
  return TYPES[cfg.type](cfg)
