"""Rows in pieces, on several devices, score as whole rows on one."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema, scoring, sharding
from posttrain.models import lora, transformer
from posttrain.ops import attention
from tests import fixtures

# Delta layers, a window, experts, and fewer kv heads than devices of a mesh.
CFG = schema.Model(
  vocab_size=40,
  layers=4,
  embed_dim=16,
  heads=4,
  kv_heads=2,
  head_dim=8,
  mlp_dim=24,
  qk_norm=True,
  local_layers=(1,),
  window=9,
  delta_layers=(0, 2),
  delta=schema.Delta(key_heads=2, value_heads=4, key_dim=8, value_dim=8),
  experts=schema.Experts(count=4, per_token=2, mlp_dim=12),
  dense_layers=(3,),
)
SEGMENTS = (
  (150,),  # its pieces are of one segment
  (17, 20, 41, 60),
  (32, 2, 1, 64),  # begin and end with a piece
  (8,) * 10,
)


def outcome(mesh):
  """Returns logprobs, entropies, and the gradients of weights and adapter."""
  # Those of `fixtures.params` decay less, and round twice as much.
  params = transformer.init(jax.random.key(0), CFG)
  # B is 0 at first.
  adapter = fixtures.normal(
    jax.eval_shape(
      lambda x: lora.init(jax.random.key(1), schema.Lora(rank=2), x), params
    )
  )
  trees = params, adapter
  rules = transformer.SHARDING_RULES
  trees = sharding.put(trees, sharding.shardings(trees, rules, mesh))
  rng, shape = np.random.default_rng(0), (4, 150)
  tokens = rng.integers(0, 40, shape).astype(np.int32)
  positions, segments = np.zeros((2, *shape), np.int32)
  for row, sizes in enumerate(SEGMENTS):
    end = sum(sizes)
    positions[row, :end] = np.concatenate([np.arange(x) for x in sizes])
    segments[row, :end] = np.repeat(np.arange(len(sizes)) + 1, sizes)
  temperatures = rng.uniform(0.5, 2, shape).astype(np.float32)
  weights = rng.normal(size=(2, *shape)).astype(np.float32)

  def loss(trees):
    params, adapter = trees
    params = lora.Base(params, 0.5).attach(adapter)
    rows = tokens, positions, segments, temperatures
    scored = jnp.stack(scoring.score(params, CFG, *rows))
    return jnp.sum(weights * scored) / len(tokens), scored

  with sharding.use(mesh):
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(trees)


@pytest.mark.slow
@pytest.mark.parametrize(
  'devices, meshes',
  [(4, ((1, 4, 1, 1, 1),)), (8, ((1, 2, 2, 2, 1), (1, 2, 1, 1, 4)))],
)
def test_devices_match_one(tmp_path, devices, meshes):
  path = tmp_path / 'arrays.npz'
  # On one device another chunk of delta layers makes 1.1e-5, and a piece of a
  # row is a chunk of its own here.
  fixtures.assert_devices_match_one(outcome, path, devices, meshes, 4e-5)


def test_a_device_gathers_the_keys_of_its_rows():
  mesh = sharding.abstract_mesh(schema.Mesh(1, sequence=4), 4)
  q = jax.ShapeDtypeStruct((8, 6, 4, 16), 'float32')
  k = jax.ShapeDtypeStruct((8, 6, 2, 16), 'float32')
  end = jax.ShapeDtypeStruct((8, 6), 'int32')
  with sharding.use(mesh):
    fn = functools.partial(attention.attention, scale=1.0)
    text = str(jax.make_jaxpr(fn)(q, k, k, end, end))
  assert text.count('f32[2,24,2,16] = all_gather') == 2


if __name__ == '__main__':
  fixtures.write_outcomes(outcome, *sys.argv[1:])
