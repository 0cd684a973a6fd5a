"""Decoding with weights on a mesh of one device, as the train step has."""

import dataclasses

import jax
import numpy as np

from posttrain import compilation, schema, sharding
from posttrain.decode import engines, requests
from posttrain.models import transformer
from tests.decode import helpers

MODEL = dataclasses.replace(helpers.MODEL, layers=1)


def test_second_batch_compiles_nothing():
  mesh = sharding.make_mesh(schema.Mesh(data=1))
  params = helpers.params(MODEL)
  places = sharding.shardings(params, transformer.SHARDING_RULES, mesh)
  params = jax.device_put(params, places)
  options = engines.Options(
    slots=2, capacity=16, prefill_rows=2, prefill_tokens=4
  )
  engine = engines.Engine(MODEL, options, mesh)
  batch = [requests.Request(i, np.arange(3 + i), 4) for i in range(2)]
  engine.set_params(params, 0)
  first = engine.generate(batch)
  with compilation.CompileCounter() as compiles:
    engine.set_params(params, 1)
    second = engine.generate(batch)
  assert compiles.count == 0
  for a, b in zip(first, second, strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
