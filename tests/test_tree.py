"""Paths, rules and checksums of trees."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from posttrain import tree

PARAMS = {
  'block': {'query': jnp.zeros((2, 3)), 'scale': jnp.zeros(3)},
  'list': [jnp.zeros((), jnp.bfloat16), None],
}


def test_paths_join_every_kind_of_key():
  assert list(tree.flat(PARAMS)) == ['block/query', 'block/scale', 'list/0']
  state = optax.adam(0.1).init({'w': jnp.zeros(2)})
  assert list(tree.flat(state)) == ['0/count', '0/mu/w', '0/nu/w']


def test_the_first_matching_rule_wins():
  rules = ((r'scale$', 'a'), (r'block/', 'b'), (r'.*', None))
  values = {path: tree.match(rules, path) for path in tree.flat(PARAMS)}
  assert values == {'block/query': 'b', 'block/scale': 'a', 'list/0': None}
  with pytest.raises(ValueError, match="got none for 'list/0'.*'block'"):
    tree.match(((r'block', 1),), 'list/0')


def mixed(x):
  """The finalizer of MurmurHash3, in Python's integers."""
  x ^= x >> 16
  x = x * 0x85EBCA6B % 2**32
  x ^= x >> 13
  x = x * 0xC2B2AE35 % 2**32
  return x ^ x >> 16


def test_leaves_that_are_not_finite_are_named():
  big = np.full(100_000, 3e38, np.float32)  # the sum of all is infinite
  leaves = {'a': {'b': jnp.array(big)}, 'c': jnp.ones(3, jnp.bfloat16)}
  assert tree.not_finite(leaves) == []
  big[70_001] = -np.inf
  leaves['a']['b'] = jnp.array(big)
  assert tree.not_finite(leaves) == ['a/b']


def test_checksums_of_literal_arrays():
  # Mixed words times 1, 3, 5 for a vector.
  expected = (mixed(1) + 3 * mixed(2) + 5 * mixed(3)) % 2**32
  assert tree.checksums({'a': jnp.array([1, 2, 3])}) == {'a': expected}
  assert expected == 2178938508 and mixed(0) == 0
  one = {'a': mixed(0x3F800000)}
  assert tree.checksums({'a': jnp.float32(1.0)}) == one
  assert tree.checksums({'a': jnp.zeros((0, 2)), 'b': None}) == {'a': 0}


@pytest.mark.parametrize('dtype', ['bfloat16', 'int8'])
def test_a_flipped_bit_or_a_swap_changes_the_checksum(dtype):
  x = np.arange(12).reshape(3, 4).astype(jnp.dtype(dtype))
  sound = tree.checksums([x])
  for bit in range(0, 8 * x.nbytes, 5):
    data = bytearray(x.tobytes())
    data[bit // 8] ^= 1 << bit % 8
    flipped = np.frombuffer(bytes(data), x.dtype).reshape(x.shape)
    assert tree.checksums([flipped]) != sound
  assert tree.checksums([x[::-1]]) != sound != tree.checksums([x[:, ::-1]])
