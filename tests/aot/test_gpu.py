"""Kernels and whole programs, compiled for eight GPUs that are not here."""

import pytest

from experiments.planner import aot, kernels, programs

PRESETS = tuple(
  f'qwen3_{size}' for size in ('0p6b', '1p7b', '4b', '8b', '14b', '32b')
)
FSDP, MIXED, TENSOR = (1, 8, 1), (1, 2, 4), (1, 1, 8)
SIZES = programs.Sizes()
PROGRAMS = (
  *(aot.Program('h100', 'train_step', x, FSDP) for x in PRESETS[:-1]),
  aot.Program('h100', 'train_step', 'qwen3_8b', MIXED),
  aot.Program('h100', 'train_step', 'qwen3_8b', (2, 2, 2)),
  # Its state and gradients in float32 take more than an H100 has.
  aot.Program('h200', 'train_step', 'qwen3_32b', FSDP),
  aot.Program('h200', 'train_step', 'qwen3_32b', MIXED),
  aot.Program('h100', 'train_step', 'qwen3_0p6b', (1, 1, 1)),
  *(
    aot.Program('h100', name, preset, mesh)
    for name in ('prefill', 'decode')
    for preset, mesh in (
      ('qwen3_0p6b', FSDP),
      ('qwen3_1p7b', FSDP),
      ('qwen3_4b', FSDP),
      ('qwen3_8b', MIXED),
      ('qwen3_14b', MIXED),
      ('qwen3_32b', TENSOR),
    )
  ),
)

pytestmark = [
  pytest.mark.aot,
  pytest.mark.skipif(
    aot.missing('h100') is not None, reason=str(aot.missing('h100'))
  ),
]


@pytest.mark.parametrize('target', ['h100', 'h200'])
@pytest.mark.parametrize('case', kernels.CASES)
def test_kernels_use_tensor_cores_and_spill_nothing(
  case, target, tmp_path, record
):
  rows = aot.kernel(case, target, str(tmp_path))
  record(*rows)
  for row in rows:
    assert row['registers'] <= 255, row
    assert row['stack'] == row['spills'] == 0, row
    # Decoding multiplies 16 rows, fewer than an instruction of a warp group.
    assert row['mma' if row['kernel'] == 'decode' else 'wgmma'] > 0, row


@pytest.mark.parametrize('case', PROGRAMS, ids=str)
def test_programs(case, record):
  row, wrong = aot.program(case, SIZES)
  record(row)
  assert wrong == []
