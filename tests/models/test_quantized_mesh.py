"""Quantized bases on several devices compute what they do on one."""

import sys

import jax
import numpy as np
import pytest

from posttrain import schema, sharding
from posttrain.models import layers, lora, transformer
from tests import fixtures

CFG = schema.Model(
  vocab_size=40,
  layers=2,
  embed_dim=64,
  heads=2,
  kv_heads=2,
  head_dim=32,
  mlp_dim=128,
  experts=schema.Experts(count=4, per_token=2, mlp_dim=64),
  dense_layers=(0,),
)
# DoRA is for matrices without experts.
KINDS = {
  'int4': schema.Lora(rank=2, base='int4'),
  'int8': schema.Lora(
    rank=2, base='int8', dora=True, targets='(attention|mlp)/.*/kernel$'
  ),
}


def outcome(mesh, options):
  """Returns hidden states, the adapter's gradient, and a decode view's."""
  key = jax.random.key(0)
  base = lora.quantize(fixtures.params(CFG), options.base)
  adapter = lora.init(key, options, base)
  adapter = jax.tree.map(np.add, adapter, fixtures.normal(adapter))
  rules = transformer.SHARDING_RULES
  base, adapter = (
    sharding.put(x, sharding.shardings(x, rules, mesh)) for x in (base, adapter)
  )
  tokens = np.random.default_rng(0).integers(0, 40, (8, 6)).astype(np.int32)
  positions = np.broadcast_to(np.arange(6, dtype=np.int32), (8, 6))
  rows = tokens, positions, np.ones_like(tokens)

  def attach(base, adapter):
    return lora.Base(base, 0.5, lora.keeps_factors(options)).attach(adapter)

  def loss(adapter, base):
    hidden, _ = transformer.trunk(attach(base, adapter), CFG, *rows)
    return (hidden**3).sum(), hidden

  def decode(adapter, base):
    view = transformer.decode_view(attach(base, adapter), CFG)
    place = sharding.shardings(view, transformer.VIEW_RULES, mesh)
    if sharding.current() is not None:
      view = jax.lax.with_sharding_constraint(view, place)
    cache = layers.Cached(transformer.empty_cache(CFG, 8, 8))
    return transformer.trunk(view, CFG, *rows, cache=cache)[0]

  with sharding.use(mesh):
    grads, hidden = jax.jit(jax.grad(loss, has_aux=True))(adapter, base)
    return [*jax.tree.leaves(grads), hidden, jax.jit(decode)(adapter, base)]


def outcomes(mesh):
  return {kind: outcome(mesh, options) for kind, options in KINDS.items()}


@pytest.mark.slow
def test_devices_match_one(tmp_path):
  path, meshes = tmp_path / 'arrays.npz', [(1, 1, 2, 2, 2)]
  one = fixtures.assert_devices_match_one(outcomes, path, 8, meshes)
  for kind in KINDS:
    *_, hidden, decoded = (v for k, v in one.items() if kind in k)
    np.testing.assert_allclose(decoded, hidden, atol=1e-5)


if __name__ == '__main__':
  fixtures.write_outcomes(outcomes, *sys.argv[1:])
