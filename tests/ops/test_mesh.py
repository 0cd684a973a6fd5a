"""Attention on the rows and heads of eight devices, against one device.

python -m tests.ops.test_mesh CASES    # on all devices of the process
"""

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from posttrain import schema, sharding
from posttrain.ops import attention
from tests import fixtures
from tests.kernels import inputs

T, S, N, H = 16, 32, 8, 16
B = len(inputs.KINDS)
SCALE = H**-0.5
MESHES = ((1, 8, 1), (2, 2, 2), (1, 2, 4))
# (mesh, kv heads, rows, implementation); three rows divide over no mesh.
QUICK = [
  (MESHES[0], 2, B, 'xla'),
  (MESHES[1], 4, B, 'interpret'),
  (MESHES[2], 2, 3, 'interpret'),
]


def product(mesh):
  return [
    (mesh, kv, b, impl)
    for kv in (2, 4, 8)
    for b in (B, 3)
    for impl in ('interpret', 'xla')
  ]


def make(kv, b):
  """Draws the arguments of the three ops, and a gradient."""
  q, g = inputs.draw(0, (b, T, N, H), (b, T, N, H))
  k, v = inputs.draw(1, (b, T, kv, H), (b, T, kv, H))
  cache = inputs.draw(2, (b, kv, S, H), (b, kv, S, H))
  ends = tuple(x[:b] for x in inputs.every_kind(T))
  late = tuple(x[:b] for x in inputs.every_kind(T, S))
  return q, k, v, g, cache, ends, late


def run(impl, q, k, v, g, cache, ends, late):
  """Returns attention with its gradients, cached, and decode."""
  options = {'scale': SCALE, 'impl': impl}
  out, vjp = jax.vjp(
    lambda *x: attention.attention(*x, *ends, **options), q, k, v
  )
  trees = attention.attention(q, k, v, *ends, until(q), **options)
  decoded = attention.decode(
    q[:, -1], *cache, late[0][:, -1], late[1][:, -1], **options
  )
  cached = attention.cached(q, *cache, *late, **options)
  return out, *vjp(g), trees, cached, decoded


def until(q):
  """Returns bounds of keys that differ by row, i32[B, T]."""
  index = jnp.arange(T, dtype=jnp.int32)[None]
  rows = jnp.arange(len(q), dtype=jnp.int32)[:, None]
  return jnp.minimum(index + rows + 1, T)


def place(mesh, args):
  """Places arguments by rows, and by heads where these divide."""
  q, k, v, g, cache, ends, late = args

  def put(axis, x):
    spec = sharding.fitting(x.shape[:1], (sharding.BATCH_AXES,))
    if axis:
      (heads,) = sharding.fitting((x.shape[axis],), (sharding.TENSOR,))
      spec = PartitionSpec(*spec, *(None,) * (axis - 1), heads)
    return jax.device_put(x, NamedSharding(mesh, spec))

  q, k, v, g = (put(2, x) for x in (q, k, v, g))
  cache, ends = tuple(put(1, x) for x in cache), [put(0, x) for x in ends]
  return q, k, v, g, cache, ends, [put(0, x) for x in late]


def compare(sizes, kv, b, impl):
  """Compares a mesh with one device; returns the kinds of collectives."""
  mesh, args = sharding.make_mesh(schema.Mesh(*sizes)), make(kv, b)
  expected = jax.jit(functools.partial(run, 'xla'))(*args)
  with sharding.use(mesh):
    placed = place(mesh, args)
    compiled = jax.jit(functools.partial(run, impl)).lower(*placed).compile()
  ours = jax.block_until_ready(compiled(*placed))
  for a, x in zip(ours, expected, strict=True):
    a, x = np.asarray(a), np.asarray(x)
    np.testing.assert_allclose(a, x, atol=1e-5 * np.abs(x).max())
  rows = b // (sizes[0] * sizes[1]) if b % 2 == 0 else b
  assert ours[0].addressable_shards[0].data.shape == (
    *(rows, T, N // sizes[2], H),
  )
  text = compiled.as_text()
  return set(re.findall(r'(all-\w+|collective-\w+|reduce-scatter)\(', text))


@pytest.mark.parametrize(
  'cases',
  [QUICK, *(pytest.param(product(x), marks=pytest.mark.slow) for x in MESHES)],
)
def test_eight_devices_match_one(cases):
  out = fixtures.run_on_devices(
    8, '-m', 'tests.ops.test_mesh', json.dumps(cases)
  )
  collectives = json.loads(out.splitlines()[-1])
  for (mesh, kv, b, _), kinds in zip(cases, collectives, strict=True):
    divides = kv % mesh[2] == 0 and b == B
    assert not (divides and kinds), (mesh, kv, kinds)


def test_indivisible_kv_heads_are_repeated_but_not_in_a_cache():
  """Of 2 kv heads over 4 devices, each has one, which its query heads read."""
  mesh = sharding.abstract_mesh(schema.Mesh(1, 2, 4), 8)
  q, k, v, _, cache, ends, _ = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make(2, B)
  )
  with sharding.use(mesh):
    text = str(
      jax.make_jaxpr(functools.partial(attention.attention, scale=SCALE))(
        q, k, v, *ends
      )
    )
    assert f'f32[{B // 2},{T},1,{H}]' in text  # keys of a device
    assert f'f32[{B // 2},{T},2,{H}]' in text  # its queries
    text = str(
      jax.make_jaxpr(functools.partial(attention.cached, scale=SCALE))(
        q, *cache, *ends
      )
    )
    assert f'f32[{B // 2},2,{S},{H}]' in text


if __name__ == '__main__':
  assert jax.device_count() == 8
  jnp.zeros(()).block_until_ready()
  found = [sorted(compare(*case)) for case in json.loads(sys.argv[1])]
  print(json.dumps(found))
