"""Sizes of an adapter on a mesh, by hand."""

import math

import pytest

from posttrain import schema, sharding
from posttrain.models import lora, transformer
from posttrain.stage import adapter

MODEL = schema.Model(
  vocab_size=100,
  layers=3,
  embed_dim=32,
  heads=4,
  kv_heads=2,
  head_dim=16,
  mlp_dim=48,
)


@pytest.mark.parametrize(
  ('sizes', 'targets', 'expected'),
  [
    # q: A [32, 2] is split by fsdp, B [2, 64] by tensor.
    ((1, 4, 1), 'q/kernel', (3 * 64, 3 * 128, 3 * 2)),
    ((2, 2, 2), 'q/kernel', (3 * 64, 3 * 64, 3 * 2)),
    # down: A [48, 2] by tensor, B [2, 32] by fsdp; x A is computed twice.
    ((1, 4, 1), 'down/kernel', (3 * 64, 3 * 96, 3 * 2 * 2)),
    ((1, 2, 2), 'down/kernel', (3 * 64, 3 * 48, 3 * 2 * 2)),
    ((1, 2, 2), '(q|down)/kernel', (3 * 128, 3 * 112, 3 * 2 * 3)),
  ],
)
def test_sizes_of_a_mesh(sizes, targets, expected):
  options = schema.Lora(rank=2, targets=targets)
  mesh = sharding.abstract_mesh(schema.Mesh(*sizes), math.prod(sizes))
  like = lora.shapes(options, transformer.shapes(MODEL))
  rules = transformer.SHARDING_RULES
  size = adapter.of(sharding.placed(like, rules, mesh))
  assert (size.split, size.whole, size.summed) == expected
  assert size.numbers == expected[0] + expected[1]
