"""Logprobs whose tokens, head and vocabulary are split over eight devices.

python -m tests.losses.test_logprobs_mesh    # prints the largest differences
"""

import functools
import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from posttrain import schema, sharding
from posttrain.losses import logprobs
from tests import fixtures

SIZES = ((8, 1, 1), (1, 8, 1), (1, 2, 4), (2, 2, 2))
ROWS, TOKENS, MODEL, VOCAB = 8, 6, 16, 48
CHUNKS = {
  'whole': {},
  'columns': {'vocab_chunk': 5},
  'both': {'vocab_chunk': 5, 'row_chunk': 4},
}
COUNTS = {ROWS: CHUNKS, 3: ('columns',)}  # three rows do not divide: all whole


def _inputs(rows):
  keys = jax.random.split(jax.random.key(0), 5)
  hidden = jax.random.normal(keys[0], (rows, TOKENS, MODEL))
  weight = jax.random.normal(keys[1], (MODEL, VOCAB))
  targets = jax.random.randint(keys[2], (rows, TOKENS), 0, VOCAB)
  temperatures = jax.random.uniform(keys[3], (rows, TOKENS), minval=0.5)
  cotangents = jax.random.normal(keys[4], (2, rows, TOKENS))
  return hidden, weight, targets, temperatures, cotangents


def _results(mesh, rows, chunks):
  """Returns logprobs, entropy and the gradients of hidden and weight."""
  hidden, weight, targets, temperatures, cotangents = _inputs(rows)
  place = NamedSharding(mesh, PartitionSpec(*sharding.COLUMNS))
  weight = jax.device_put(weight, place)

  @jax.jit
  def run(hidden, weight, cotangents):
    with sharding.use(mesh):
      outputs, pull = jax.vjp(
        lambda h, w: logprobs.linear(
          h, w, targets, temperatures, softcap=3.0, **chunks
        ),
        hidden,
        weight,
      )
      return *outputs, *pull(tuple(cotangents))

  return jax.device_get(run(hidden, weight, cotangents))


def _differences():
  one = sharding.make_mesh(schema.Mesh(1, 1, 1), jax.devices()[:1])
  differences = {}
  for rows, some in COUNTS.items():
    for name in some:
      chunks = CHUNKS[name]
      expected = _results(one, rows, chunks)
      for sizes in SIZES:
        actual = _results(sharding.make_mesh(schema.Mesh(*sizes)), rows, chunks)
        differences[f'{sizes} {rows} {name}'] = max(
          float(np.max(np.abs(a - b)) / np.max(np.abs(a)))
          for a, b in zip(expected, actual, strict=True)
        )
  return differences


@functools.cache
def _differences_on_eight_devices():
  printed = fixtures.run_on_devices(8, '-m', 'tests.losses.test_logprobs_mesh')
  return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize(
  ('rows', 'chunks'), [(k, x) for k, names in COUNTS.items() for x in names]
)
@pytest.mark.parametrize('sizes', SIZES, ids=str)
def test_eight_devices_match_one(sizes, rows, chunks):
  assert _differences_on_eight_devices()[f'{sizes} {rows} {chunks}'] < 1e-5


if __name__ == '__main__':
  assert jax.device_count() == 8
  print(json.dumps(_differences()))
