"""Kernels and whole programs, compiled for devices that are not here."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from experiments.planner import aot, hlo, kernels, programs
from posttrain import schema, sharding
from posttrain.models import experts

PRESETS = tuple(f'qwen3_{x}' for x in ('0p6b', '1p7b', '4b', '8b', '14b'))
FSDP, MIXED, TENSOR, HALF = (1, 8, 1), (1, 2, 4), (1, 1, 8), (1, 4, 1)
EXPERTS = (1, 2, 1, 4)
DECODED = {
  **dict.fromkeys(PRESETS[:3], FSDP),
  **dict.fromkeys(PRESETS[3:], MIXED),
  'qwen3_32b': TENSOR,
}
PROGRAMS = (
  *(aot.Program('h100', 'train_step', x, FSDP) for x in PRESETS),
  # The state and gradients of 32B in float32 take more than an H100 has.
  *(
    aot.Program(target, 'train_step', f'qwen3_{preset}', mesh)
    for target, preset, mesh in (
      ('h100', '8b', MIXED),
      ('h100', '8b', (2, 2, 2)),
      ('h200', '32b', FSDP),
      ('h200', '32b', MIXED),
      ('h100', '0p6b', (1, 1, 1)),
    )
  ),
  aot.Program('h100', 'train_step', 'qwen3_0p6b', FSDP, trees=True),
  *(
    aot.Program('h100', name, preset, mesh)
    for name in ('prefill', 'decode')
    for preset, mesh in DECODED.items()
  ),
  # Four devices that train, and four of a sampler's own.
  aot.Program('h100', 'train_step', 'qwen3_8b', HALF),
  *(
    aot.Program('h100', name, 'qwen3_8b', (1, 1, 4))
    for name in ('score', 'prefill', 'decode')
  ),
  *(
    aot.Program('h100', 'hand_over', 'qwen3_8b', HALF, sampler=sampler)
    for sampler in (HALF, (1, 1, 4), (4, 1, 1))
  ),
  *(
    aot.Program(target, name, preset, mesh, layers=4)
    for target in ('v5e', 'v6e')
    for name, preset, mesh in (
      *((x, 'qwen3_0p6b', FSDP) for x in ('train_step', 'prefill', 'decode')),
      ('decode', 'qwen3_8b', MIXED),
    )
  ),
  aot.Program('h100', 'train_step', 'qwen3_5_4b', FSDP),
  aot.Program('h100', 'train_step', 'qwen3_5_9b', FSDP),
  aot.Program('h200', 'train_step', 'qwen3_30b_a3b', EXPERTS),
  # Four layers of the model with experts take more than 16 GiB.
  aot.Program('v5e', 'train_step', 'qwen3_5_4b', FSDP, layers=4),
  aot.Program('v5e', 'train_step', 'qwen3_30b_a3b', EXPERTS, layers=2),
  *(
    aot.Program(target, name, preset, mesh, layers=4)
    for target, names in (
      ('h100', ('prefill', 'decode')),
      ('v5e', ('prefill', 'decode')),
    )
    for name in names
    for preset, mesh in (
      ('qwen3_5_4b', FSDP),
      ('qwen3_5_9b', FSDP),
      ('qwen3_30b_a3b', EXPERTS),
    )
  ),
)
pytestmark = pytest.mark.aot


def need(target):
  """Skips the test where the target's compiler is missing."""
  if reason := aot.missing(target):
    pytest.skip(reason)


@pytest.mark.parametrize('target', aot.TARGETS)
@pytest.mark.parametrize('case', kernels.CASES)
def test_kernels(case, target, tmp_path, record):
  need(target)
  rows = aot.kernel(case, target, str(tmp_path))
  record(*rows)
  for row in rows:
    assert row.get('calls', 1) == 1, row
    if 'registers' in row:
      assert row['registers'] <= 255, row
      assert row['stack'] == row['spills'] == 0, row
      # Decoding multiplies few rows, fewer than an instruction of a warp group.
      decodes = row['call'].startswith('decode')
      assert row['wgmma'] > 0 or (decodes and row['mma'] > 0), row


@pytest.mark.parametrize('case', PROGRAMS, ids=str)
def test_programs(case, record):
  need(case.target)
  row, wrong = aot.program(case, programs.Sizes())
  record(row)
  assert wrong == []


@pytest.mark.parametrize('target', ['h100', 'v5e'])
def test_tokens_travel_to_the_devices_of_their_experts(target):
  need(target)
  mesh = sharding.make_mesh(schema.Mesh(1, 1, 1, 8), aot.devices(target))

  def like(shape, dtype, *axes):
    place = jax.sharding.NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

  rows, width, hidden, count = (8, 256), 1024, 128, 32
  params = {
    name: {'kernel': like((count, *shape), 'bfloat16', *experts.axes(name))}
    for name, shape in (
      ('gate', (width, hidden)),
      ('up', (width, hidden)),
      ('down', (hidden, width)),
    )
  }
  x, index, weights = (
    like((*rows, size), dtype, sharding.BATCH_AXES)
    for size, dtype in ((width, 'bfloat16'), (8, 'int32'), (8, 'float32'))
  )

  def step(params, x, index, weights):
    def loss(params, x, weights):
      y = experts.mix(params, x, index, weights, ragged=True)
      return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.grad(loss, (0, 1, 2))(params, x, weights)

  platforms = (aot.TARGETS[target].platform,)
  with sharding.use(mesh):
    traced = jax.jit(step).trace(params, x, index, weights)
    program = traced.lower(lowering_platforms=platforms).compile()
  kinds = hlo.parse(program.as_text()).bytes()
  # Tokens, results and their gradients, of the whole axis at most; a TPU has
  # 128 numbers for the 8 choices of a token.
  block = 8 * rows[1] * width * 2
  assert 4 * block <= kinds['ragged-all-to-all'] <= 5 * block
  assert 'all-gather' not in kinds
