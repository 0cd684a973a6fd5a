"""Kernels, and programs of four layers, compiled for TPUs that are not here."""

import pytest

from experiments.planner import aot, kernels, programs

LAYERS = 4
SIZES = programs.Sizes()
PROGRAMS = tuple(
  aot.Program(target, name, preset, mesh, LAYERS)
  for target in ('v5e', 'v6e')
  for name, preset, mesh in (
    ('train_step', 'qwen3_0p6b', (1, 8, 1)),
    ('prefill', 'qwen3_0p6b', (1, 8, 1)),
    ('decode', 'qwen3_0p6b', (1, 8, 1)),
    ('decode', 'qwen3_8b', (1, 2, 4)),
  )
)

pytestmark = [
  pytest.mark.aot,
  pytest.mark.skipif(
    aot.missing('v5e') is not None, reason=str(aot.missing('v5e'))
  ),
]


@pytest.mark.parametrize('target', ['v5e', 'v6e'])
@pytest.mark.parametrize('case', kernels.CASES)
def test_kernels_compile(case, target, tmp_path, record):
  rows = aot.kernel(case, target, str(tmp_path))
  record(*rows)
  assert all(row['calls'] == 1 for row in rows), rows


@pytest.mark.parametrize('case', PROGRAMS, ids=str)
def test_programs(case, record):
  row, wrong = aot.program(case, SIZES)
  record(row)
  assert wrong == []
