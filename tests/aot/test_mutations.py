"""Deliberate mistakes that the compile tier must catch."""

import jax
import pytest

from experiments.planner import aot, kernels, programs
from kernels import flash_triton
from posttrain import sharding
from posttrain.decode import loop

pytestmark = [
  pytest.mark.aot,
  pytest.mark.skipif(bool(aot.missing('h100')), reason='no compiler'),
]


@pytest.fixture(autouse=True)
def fresh():
  """Traces anew: a traced function keeps what it was traced with."""
  jax.clear_caches()
  yield
  jax.clear_caches()


def wrong(name, mesh):
  """Returns what the checks find in two layers of a program."""
  case = aot.Program('h100', name, 'qwen3_8b', mesh, layers=2)
  return '\n'.join(aot.program(case, programs.Sizes())[1])


def test_a_dropped_constraint(monkeypatch):
  monkeypatch.setattr(sharding, 'pin_batch', lambda x: x)
  assert 'collectives: ' in wrong('train_step', (1, 8, 1))


def test_a_tile_beyond_shared_memory(monkeypatch, tmp_path):
  monkeypatch.setattr(flash_triton, 'BLOCK', 256)
  case = kernels.CASES['training, 16/8 heads of 128']
  h100 = aot.devices('h100')[0]
  with pytest.raises(Exception, match='Shared memory size limit exceeded'):
    kernels.compile(case, h100, 'triton', 'cuda', str(tmp_path))


def test_a_cache_that_is_not_donated(monkeypatch):
  decode = jax.jit(loop.decode.__wrapped__, static_argnums=(1, 5, 7))
  monkeypatch.setattr(loop, 'decode', decode)
  assert 'must replace the one given' in wrong('decode', (1, 2, 4))
