"""Experts on several devices compute what one does."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema, sharding
from posttrain.models import layers, lora, transformer
from tests import fixtures

CFG = schema.Model(
  vocab_size=40,
  layers=2,
  embed_dim=16,
  heads=2,
  kv_heads=2,
  head_dim=8,
  mlp_dim=24,
  experts=schema.Experts(
    count=4, per_token=2, mlp_dim=12, shared_dim=8, bias=True, clamp=1.0
  ),
  attention_sinks=True,
  dense_layers=(0,),
)


def outcome(mesh):
  """Returns logits, the gradient of a sum, and those of a decode view."""
  params = fixtures.params(CFG)  # in which no bias is 0
  # B is 0 at first.
  adapter = fixtures.normal(
    jax.eval_shape(
      lambda x: lora.init(jax.random.key(1), schema.Lora(rank=2), x), params
    )
  )
  trees = params, adapter
  rules = transformer.SHARDING_RULES
  trees = sharding.put(trees, sharding.shardings(trees, rules, mesh))
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 40, (8, 6)).astype(np.int32)
  positions = np.broadcast_to(np.arange(6, dtype=np.int32), (8, 6))
  segments = np.ones_like(tokens)
  segments[:3, 4:] = 0

  def loss(trees, adapted):
    params, adapter = trees
    params = lora.Base(params, 0.5).attach(adapter) if adapted else params
    rows = tokens, positions, segments
    hidden, stats = transformer.trunk(params, CFG, *rows)
    weights = jnp.asarray((segments != 0)[..., None], jnp.float32)
    return jnp.sum(weights * hidden**3), (hidden * weights, stats)

  def decode(params, rows):
    view = transformer.decode_view(params, CFG)
    place = sharding.shardings(view, transformer.VIEW_RULES, mesh)
    if sharding.current() is not None:
      view = jax.lax.with_sharding_constraint(view, place)
    cache = layers.Cached(transformer.empty_cache(CFG, rows, 8))
    hidden, _ = transformer.trunk(
      view, CFG, *(x[:rows] for x in (tokens, positions, segments)), cache=cache
    )
    return hidden * (segments[:rows] != 0)[..., None]

  with sharding.use(mesh):
    out = {
      f'adapted={x}': jax.jit(
        jax.value_and_grad(lambda t, x=x: loss(t, x), has_aux=True)
      )(trees)
      for x in (False, True)
    }
    # Rows that do not divide over the devices as well.
    for rows in (8, 3):
      out[f'decode={rows}'] = jax.jit(lambda p, rows=rows: decode(p, rows))(
        trees[0]
      )
  return out


@pytest.mark.parametrize(
  'devices, meshes',
  [
    (4, ((1, 1, 2, 2, 1),)),
    pytest.param(
      8,
      ((2, 1, 1, 4, 1), (1, 1, 2, 2, 2), (2, 1, 1, 2, 2)),
      marks=pytest.mark.slow,
    ),
  ],
)
def test_devices_match_one(tmp_path, devices, meshes):
  path = tmp_path / 'arrays.npz'
  fixtures.assert_devices_match_one(outcome, path, devices, meshes)


if __name__ == '__main__':
  fixtures.write_outcomes(outcome, *sys.argv[1:])
