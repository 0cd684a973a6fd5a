"""Logprobs whose tokens, head and vocabulary are split over eight devices.

python -m tests.losses.test_logprobs_mesh    # prints the largest differences
"""

import json

import jax
import numpy as np
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
CASES = (  # rows, chunks, meshes
  (ROWS, 'both', SIZES),
  (ROWS, 'columns', SIZES[2:3]),
  (ROWS, 'whole', SIZES[3:]),
  (3, 'columns', SIZES[3:]),  # three rows do not divide: all whole
)


def _inputs(rows):
  rng = np.random.default_rng(0)
  shape = rows, TOKENS
  hidden, weight, cotangents = (
    rng.standard_normal(x, np.float32)
    for x in ((*shape, MODEL), (MODEL, VOCAB), (2, *shape))
  )
  targets = rng.integers(0, VOCAB, shape)
  temperatures = rng.uniform(0.5, 1.0, shape).astype(np.float32)
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
  for rows, name, meshes in CASES:
    chunks = CHUNKS[name]
    expected = _results(one, rows, chunks)
    for sizes in meshes:
      actual = _results(sharding.make_mesh(schema.Mesh(*sizes)), rows, chunks)
      differences[f'{sizes} {rows} {name}'] = max(
        float(np.max(np.abs(a - b)) / np.max(np.abs(a)))
        for a, b in zip(expected, actual, strict=True)
      )
  return differences


def test_eight_devices_match_one():
  printed = fixtures.run_on_devices(8, '-m', 'tests.losses.test_logprobs_mesh')
  differences = json.loads(printed.splitlines()[-1])
  assert len(differences) == sum(len(meshes) for *_, meshes in CASES)
  assert not {k: x for k, x in differences.items() if not x < 1e-5}


if __name__ == '__main__':
  assert jax.device_count() == 8
  print(json.dumps(_differences()))
