"""Sizes of models and steps that all implementations of a benchmark share."""

import dataclasses
import zlib

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of a model."""

  layers: int
  embed_dim: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp_dim: int
  vocab_size: int


SHAPES = {
  'S': Shape(4, 256, 8, 4, 32, 768, 512),
  'M': Shape(8, 512, 8, 4, 64, 1536, 8192),
  'L': Shape(12, 1024, 8, 4, 128, 3072, 32768),
}
# Of a train step; rows of its micro-batches.
ROWS, TOKENS, TRAIN_ROWS = 64, 160, 4
STEP_COUNT = 10_000  # of a stage: more than it is asked for
PAIRS, PAIR_TOKENS = 16, 32  # of a DPO step; tokens of a prompt, and an answer


@dataclasses.dataclass(frozen=True)
class Step:
  """Sizes of a GRPO step."""

  prompts: int = 8
  group: int = 8
  prompt: int = 32  # tokens
  new: int = 32  # tokens of a sample
  micro_rows: int = 16  # whole samples that a micro-batch has space for
  kl_beta: float = 0.0

  @property
  def length(self) -> int:
    return self.prompt + self.new


# `gsm8k` has about the lengths of GSM8K; `gsm8k_kl` a reference as well.
STEPS = {
  'grpo': Step(),
  'gsm8k': Step(prompt=128, new=128, micro_rows=8),
  'gsm8k_kl': Step(prompt=128, new=128, micro_rows=8, kl_beta=0.04),
}


def reward(text: bytes) -> float:
  """Returns a reward that differs from sample to sample."""
  return zlib.crc32(text) / 2**32


def random_ids(vocab_size: int, rows: int, tokens: int) -> np.ndarray:
  """Returns random ids i32[rows, tokens]."""
  rng = np.random.default_rng(0)
  return rng.integers(0, vocab_size, (rows, tokens), np.int32)
