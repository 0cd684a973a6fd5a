"""Planned bytes of programs against those of the compiler."""

import ast
import dataclasses
import math

import pytest

from posttrain import schema, sharding
from posttrain.stage import plan
from tests import fixtures

# Compiled without a device for H100 by jax 0.10.2 on 2026-11-23: program,
# preset, mesh, (rows or slots, tokens of each), options, bytes per device of
# the arguments and of arguments, temporaries and results together.
H100 = (
  (
    'train_step',
    'qwen3_0p6b',
    (1, 1, 1),
    (2, 4096),
    {'remat': 'none'},
    7_153_000_496,
    20_953_099_652,
  ),
  (
    'train_step',
    'qwen3_0p6b',
    (1, 1, 1),
    (8, 4096),
    {},
    7_154_204_720,
    16_081_548_420,
  ),
  (
    'score',
    'qwen3_0p6b',
    (1, 1, 1),
    (8, 4096),
    {},
    2_384_723_968,
    3_163_064_712,
  ),
  (
    'decode',
    'qwen3_0p6b',
    (1, 1, 1),
    (64, 8192),
    {},
    61_637_135_684,
    61_792_734_068,
  ),
  (
    'train_step',
    'qwen3_8b',
    (1, 1, 1),
    (8, 4096),
    {'layers': 2},
    19_568_285_744,
    34_060_842_156,
  ),
  (
    'score',
    'qwen3_8b',
    (1, 1, 1),
    (8, 4096),
    {'layers': 2},
    6_522_750_976,
    8_787_939_720,
  ),
  (
    'train_step',
    'qwen3_8b',
    (1, 1, 1),
    (1, 4096),
    {'layers': 2},
    19_566_880_816,
    31_283_933_356,
  ),
  (
    'score',
    'qwen3_8b',
    (1, 1, 1),
    (1, 4096),
    {'layers': 2},
    6_522_292_224,
    6_893_523_080,
  ),
  (
    'train_step',
    'llama3_8b',
    (1, 1, 1),
    (8, 4096),
    {'layers': 2},
    17_844_420_656,
    32_186_107_740,
  ),
  (
    'train_step',
    'qwen3_8b',
    (1, 1, 1),
    (8, 4096),
    {'layers': 4, 'remat': 'none'},
    24_199_000_112,
    55_459_857_580,
  ),
  (
    'train_step',
    'qwen3_4b',
    (1, 1, 1),
    (4, 8192),
    {'layers': 4, 'vocab_size': 8192},
    5_097_973_808,
    13_847_640_708,
  ),
  (
    'decode',
    'qwen3_8b',
    (1, 1, 1),
    (64, 8192),
    {'layers': 2},
    7_560_320_324,
    7_715_909_300,
  ),
  (
    'train_step',
    'qwen3_8b',
    (1, 8, 1),
    (8, 4096),
    {},
    12_289_540_144,
    25_827_320_492,
  ),
  ('score', 'qwen3_8b', (1, 8, 1), (8, 4096), {}, 4_096_512_000, 5_947_845_256),
  (
    'train_step',
    'qwen3_8b',
    (1, 2, 4),
    (8, 4096),
    {},
    12_290_142_256,
    27_882_232_236,
  ),
  ('score', 'qwen3_8b', (1, 2, 4), (8, 4096), {}, 4_096_708_608, 6_135_835_784),
  (
    'train_step',
    'qwen3_32b',
    (1, 8, 1),
    (8, 4096),
    {},
    49_150_492_720,
    94_433_791_148,
  ),
  (
    'score',
    'qwen3_32b',
    (1, 8, 1),
    (8, 4096),
    {},
    16_383_496_192,
    23_177_128_840,
  ),
  (
    'train_step',
    'qwen3_32b',
    (1, 1, 8),
    (8, 4096),
    {},
    49_151_897_648,
    106_789_759_404,
  ),
  (
    'train_step',
    'qwen3_8b',
    (2, 2, 2),
    (8, 4096),
    {},
    24_575_381_552,
    46_871_734_956,
  ),
  (
    'train_step',
    'qwen3_0p6b',
    (8, 1, 1),
    (16, 4096),
    {},
    7_153_000_496,
    13_657_440_900,
  ),
  (
    'train_step',
    'qwen3_8b',
    (1, 8, 1),
    (8, 4096),
    {'remat': 'attention'},
    12_289_540_144,
    27_037_377_196,
  ),
  (
    'train_step',
    'qwen3_8b',
    (1, 8, 1),
    (8, 4096),
    {'remat': 'none'},
    12_289_540_144,
    38_584_297_388,
  ),
  (
    'decode',
    'qwen3_8b',
    (1, 2, 4),
    (64, 8192),
    {'layers': 4},
    2_084_198_052,
    2_103_652_052,
  ),
  (
    'train_step',
    'qwen3_0p6b',
    (1, 8, 1),
    (8, 4096),
    {'reduce_gradients': 'update'},
    894_963_760,
    6_236_718_724,
  ),
  (
    'train_step',
    'qwen3_8b',
    (1, 8, 1),
    (8, 4096),
    {'layers': 12, 'reduce_gradients': 'update'},
    5_341_339_696,
    37_808_297_900,
  ),
  (
    'train_step',
    'qwen3_8b',
    (1, 8, 1),
    (8, 4096),
    {'layers': 12, 'rank': 16},
    1_007_386_672,
    3_208_742_172,
  ),
  (
    'train_step',
    'qwen3_8b',
    (1, 8, 1),
    (8, 4096),
    {'layers': 12, 'rank': 16, 'reduce_gradients': 'update'},
    1_007_386_672,
    9_877_023_772,
  ),
  (
    'train_step',
    'qwen3_0p6b',
    (2, 4, 1),
    (8, 4096),
    {'rank': 16, 'reduce_gradients': 'update'},
    390_664_240,
    2_248_978_452,
  ),
)


def _programs(preset, mesh, shape, platform, **options):
  """The planned programs of a stage of this many rows, or slots, of tokens."""
  rows, tokens = shape
  rank = options.pop('rank', 0)
  reduce = options.pop('reduce_gradients', 'micro_batch')
  model = dataclasses.replace(schema.PRESETS[preset], **options)
  stage = schema.Stage(
    envs={'a': schema.EnvEntry()},
    lora=schema.Lora(rank=rank),
    batch=schema.Batch(
      row_tokens=tokens,
      micro_batch_tokens=rows * tokens,
      reduce_gradients=reduce,
    ),
    rollout=schema.Rollout(slots=rows, prefill_rows=16, prefill_tokens=256),
  )
  devices = sharding.abstract_mesh(schema.Mesh(*mesh), math.prod(mesh))
  return plan.make('a', stage, model, devices, platform, tokens).programs


@pytest.mark.parametrize('row', H100, ids=lambda row: '-'.join(map(str, row)))
def test_the_plan_is_not_below_the_compiler_and_close_above(row):
  name, preset, mesh, shape, options, arguments, total = row
  program = _programs(preset, mesh, shape, 'gpu', **options)[name]
  assert program.arguments == pytest.approx(arguments, rel=0.01)
  assert 1.0 <= program.total / total <= 1.2


def test_one_communication_per_update_has_frozen_weights_whole():
  options = {'layers': 12, 'rank': 16}
  shape, mesh = (8, 4096), (1, 8, 1)
  often, once = (
    _programs(
      'qwen3_8b', mesh, shape, 'gpu', reduce_gradients=reduce, **options
    )['train_step']
    for reduce in ('micro_batch', 'update')
  )
  assert often.arguments == once.arguments
  # 12 layers and two tables in bfloat16: 7.1e9 bytes. Without them, XLA would
  # hold o and down transposed.
  tables = 2 * 151_936 * 4096
  layers = 12 * 4096 * (2 * 40 * 128 + 3 * 12_288)
  transposed = 12 * 4096 * (4096 + 12_288) // 8
  # The adapter: A of five matrices and B of two, split by fsdp, and the rest.
  split = 12 * 16 * 7 * 4096
  rest = 12 * 16 * (4096 + 2 * 1024 + 2 * 12_288 + 4096 + 12_288)
  more = 2 * (layers + tables - transposed)
  # Whole: its sum of gradients, in bfloat16 itself and its gradient. Often:
  # the device's part of both gradients.
  more += (4 + 2 * 2) * (split + rest) - 2 * 4 * (split // 8 + rest)
  assert once.temporaries - often.temporaries == pytest.approx(1.05 * more)
  # Devices of `data` alone have the whole base as an argument.
  alone = _programs(
    'qwen3_8b', (8, 1, 1), shape, 'gpu', reduce_gradients='update', **options
  )['train_step']
  assert alone.temporaries < once.temporaries - (layers + tables)


def test_64_slots_of_8192_tokens_of_qwen3_0p6b_fit_into_80_gb():
  stage = schema.Stage(
    envs={'a': schema.EnvEntry()},
    batch=schema.Batch(row_tokens=8192, micro_batch_tokens=16_384),
    rollout=schema.Rollout(slots=64),
  )
  mesh = sharding.abstract_mesh(schema.Mesh(), 1)
  model = schema.PRESETS['qwen3_0p6b']
  made = plan.make('a', stage, model, mesh, 'gpu', 8192)
  assert made.decode_bytes == pytest.approx(61.6e9, rel=0.01)
  assert made.total_bytes < 80e9


def test_qwen3_32b_decodes_on_eight_devices_of_80_gb_over_tensor_alone():
  """Under fsdp the decode view is whole: 61 GiB on every device."""
  stage = schema.Stage(
    envs={'a': schema.EnvEntry()},
    batch=schema.Batch(row_tokens=1024, micro_batch_tokens=8192),
    rollout=schema.Rollout(slots=64),
    optim=schema.Optim(moments_dtype='bfloat16'),
  )
  model = schema.PRESETS['qwen3_32b']

  def made(*sizes):
    mesh = sharding.abstract_mesh(schema.Mesh(*sizes), 8)
    return plan.make('a', stage, model, mesh, 'gpu', 2048)

  split, whole = made(1, 1, 8), made(1, 8, 1)
  state = split.state_bytes
  assert state == pytest.approx(8 * 32.76e9 / 8, rel=0.01)
  assert state + split.decode_bytes + split.rollout_bytes < 60e9
  assert state + whole.decode_bytes > 80e9


# Prints the bytes of the programs that XLA compiles for the CPU devices here.
COMPILED = """
import ast, dataclasses, sys
import jax
from experiments import census, programs
from posttrain import schema, sharding
mesh, model, sizes, rank, reduce = ast.literal_eval(sys.argv[1])
mesh = sharding.make_mesh(schema.Mesh(*mesh))
sizes, model = programs.Sizes(**sizes), schema.Model(**model)
stage = schema.Stage(
  envs={'tokens': schema.EnvEntry()},
  lora=schema.Lora(rank=rank),
  batch=schema.Batch(reduce_gradients=reduce),
)
found = {}
for name in ('train_step', 'score', 'decode'):
  compiled = programs.lower(name, model, mesh, sizes, stage=stage).compile()
  memory = compiled.memory_analysis()
  found[name] = memory.argument_size_in_bytes, census.peak(compiled)
print(found)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ('mesh', 'rank', 'reduce'),
  [
    ((1, 1, 1), 0, 'micro_batch'),
    ((1, 8, 1), 0, 'micro_batch'),
    ((2, 2, 2), 0, 'micro_batch'),
    ((2, 4, 1), 16, 'micro_batch'),
    ((2, 4, 1), 16, 'update'),
  ],
)
def test_planned_arguments_are_those_of_the_programs_on_cpus(
  mesh, rank, reduce, record_property
):
  model = {
    'vocab_size': 8192,
    'layers': 3,
    'embed_dim': 256,
    'heads': 8,
    'kv_heads': 4,
    'mlp_dim': 768,
    'remat': 'block',
  }
  sizes = {'rows': 16, 'row_tokens': 128, 'slots': 16, 'capacity': 128}
  text = fixtures.run_on_devices(
    math.prod(mesh), '-c', COMPILED, repr((mesh, model, sizes, rank, reduce))
  )
  compiled = ast.literal_eval(text.splitlines()[-1])
  stage = schema.Stage(
    envs={'a': schema.EnvEntry()},
    lora=schema.Lora(rank=rank),
    batch=schema.Batch(
      row_tokens=128, micro_batch_tokens=16 * 128, reduce_gradients=reduce
    ),
    rollout=schema.Rollout(slots=16),
  )
  devices = sharding.abstract_mesh(schema.Mesh(*mesh), math.prod(mesh))
  made = plan.make('a', stage, schema.Model(**model), devices, 'cpu', 128)
  for name, (arguments, total) in compiled.items():
    if rank and name != 'train_step':
      continue  # they are those of a model whose weights all train
    program = made.programs[name]
    print(name, mesh, 'planned / compiled:', program.total / total)
    record_property(name, program.total / total)
    assert program.arguments == pytest.approx(arguments, rel=0.01)
    assert 0.5 < program.total / total < 2.0
