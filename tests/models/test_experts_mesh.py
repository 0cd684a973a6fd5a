"""Experts on several devices compute what one does."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

from posttrain import schema, sharding
from posttrain.models import layers, lora, transformer
from posttrain.ops import dispatch
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
  attention='xla',
)


def sent(x, out, starts, sizes, their_starts, arriving, *, axis_name, **_):
  """The definition of ragged_all_to_all, from the whole arrays of all."""
  x, starts, sizes, their_starts = (
    jax.lax.all_gather(y, axis_name) for y in (x, starts, sizes, their_starts)
  )
  me, places = jax.lax.axis_index(axis_name), jnp.arange(len(out))
  for i in range(len(x)):
    index = places - their_starts[i, me]
    arrives = (index >= 0) & (index < sizes[i, me])
    rows = x[i, jnp.where(arrives, index + starts[i, me], 0)]
    out = jnp.where(arrives.reshape(-1, *(1,) * (out.ndim - 1)), rows, out)
  return out


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
    # One of the two without and one with ragged_all_to_all.
    cfg = dataclasses.replace(CFG, ragged=not adapted)
    params, adapter = trees
    params = lora.Base(params, 0.5).attach(adapter) if adapted else params
    rows = tokens, positions, segments
    hidden, stats = transformer.trunk(params, cfg, *rows)
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
    steps = [
      jax.jit(jax.value_and_grad(lambda t, x=x: loss(t, x), has_aux=True))
      for x in (False, True)
    ]
    out = {f'adapted={x}': steps[x](trees) for x in (False, True)}
    # All tokens visit one device alone.
    bias = trees[0]['layers']['experts']['router']['bias']
    bias = jax.device_put(
      jnp.zeros_like(bias).at[..., :2].set(9), bias.sharding
    )
    trees[0]['layers']['experts']['router']['bias'] = bias
    out['together'] = steps[0](trees)
    # Rows that do not divide over the devices as well.
    for rows in (8, 3):
      out[f'decode={rows}'] = jax.jit(lambda p, rows=rows: decode(p, rows))(
        trees[0]
      )
  return out


@pytest.mark.parametrize(
  'devices, meshes',
  [
    pytest.param(
      4, ((1, 1, 2, 2, 1),), marks=[pytest.mark.gate, pytest.mark.slow]
    ),
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
  mlir.register_lowering(
    jax.lax.ragged_all_to_all_p, mlir.lower_fun(sent, False), 'cpu'
  )
  dispatch.platform = lambda: 'gpu'
  fixtures.write_outcomes(outcome, *sys.argv[1:])
