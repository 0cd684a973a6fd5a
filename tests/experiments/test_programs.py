"""Programs that are lowered without arrays."""

import dataclasses

import jax
import pytest

from experiments.planner import programs
from posttrain import schema, sharding

MODEL = dataclasses.replace(schema.PRESETS['tiny'], vocab_size=64)
SIZES = programs.Sizes(
  rows=2, row_tokens=16, slots=4, capacity=32, prefill_rows=2, prefill_tokens=8
)


@pytest.mark.parametrize('name', programs.PROGRAMS)
def test_every_program_compiles_without_arrays(name):
  before = jax.live_arrays()  # of other tests, kept alive
  mesh = sharding.make_mesh(schema.Mesh(), jax.devices()[:1])
  compiled = programs.lower(name, MODEL, mesh, SIZES).compile()
  assert 'ENTRY' in compiled.as_text()
  known = set(map(id, before))
  assert all(id(x) in known for x in jax.live_arrays())
