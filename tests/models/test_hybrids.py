"""Hybrids: layers of gated DeltaNet between layers of attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from posttrain import schema, scoring
from posttrain.models import layers, transformer
from tests import fixtures

CFG = schema.Model(
  vocab_size=48,
  layers=3,
  embed_dim=32,
  heads=4,
  kv_heads=2,
  head_dim=8,
  mlp_dim=64,
  qk_norm=True,
  norm_offset=True,
  attention_gate=True,
  delta_layers=(0, 1),
  delta=schema.Delta(2, 4, 8, 6),
)


@functools.cache
def make_params():
  """Draws parameters, none of which is constant, with decays of all kinds."""
  params, rng = fixtures.params(CFG), np.random.default_rng(0)
  params = jax.tree.map(
    lambda x, y: jax.device_put(np.add(x, y)), params, fixtures.normal(params)
  )
  delta = params['layers']['delta']
  shape = delta['bias'].shape
  delta['bias'] = jnp.float32(rng.normal(size=shape) - 3)
  delta['log_scale'] = jnp.float32(rng.uniform(0, 2.8, shape))
  return params


@jax.jit
def logits(params, tokens, positions, segment_ids):
  hidden, _ = transformer.trunk(params, CFG, tokens, positions, segment_ids)
  return scoring.next_logits(params, CFG, hidden)


@jax.jit
def cached_logits(view, tokens, positions, valid, cache):
  hidden, cache = transformer.trunk(
    view, CFG, tokens, positions, valid, cache=layers.Cached(**cache)
  )
  new = {'slots': cache.slots, 'recurrent': cache.recurrent}
  return scoring.next_logits(view, CFG, hidden), new


def make_tokens(rows=2, length=21, seed=0):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, 48, (rows, length)).astype(np.int32)
  positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
  return tokens, positions, np.ones_like(tokens)


def test_init_builds_the_documented_tree():
  leaves = jax.tree.map(jnp.shape, make_params()['layers'])
  assert leaves['delta'] == {
    'qkv': {'kernel': (2, 32, 2 * (8 + 8 + 12))},
    'z': {'kernel': (2, 32, 24)},
    'a': {'kernel': (2, 32, 4)},
    'b': {'kernel': (2, 32, 4)},
    'taps': (2, 4, 56),
    'log_scale': (2, 4),
    'bias': (2, 4),
    'norm_scale': (2, 6),
    'o': {'kernel': (2, 24, 32)},
  }
  assert leaves['attention']['q']['kernel'] == (1, 32, 64)
  assert CFG.matrix_parameters == sum(
    x.size
    for path, x in jax.tree_util.tree_leaves_with_path(make_params())
    if path[-1].key in ('kernel', 'table')
  )


def test_cached_calls_are_the_full_forward():
  """Prefill in two chunks with pads, then tokens one by one."""
  tokens, positions, ones = make_tokens()
  want = logits(make_params(), tokens, positions, ones)
  view = transformer.decode_view(make_params(), CFG)
  cache = {
    'slots': transformer.empty_cache(CFG, 2, 32),
    # What a slot had before is of no matter.
    'recurrent': jax.tree.map(
      lambda x: x + 100, transformer.empty_recurrent(CFG, 2)
    ),
  }
  pieces = []
  for start, stop, size in (
    (0, 9, 9),
    (9, 14, 9),
    *((i, i + 1, 1) for i in range(14, 21)),
  ):
    pad = ((0, 0), (0, size - (stop - start)))
    part = (np.pad(x[:, start:stop], pad) for x in (tokens, positions, ones))
    out, cache = cached_logits(view, *part, cache)
    pieces.append(out[:, : stop - start])
  np.testing.assert_allclose(np.concatenate(pieces, 1), want, atol=1e-4)


def test_packed_is_alone():
  lengths = (2, 9, 1, 8)
  tokens, _, ones = make_tokens(rows=1)
  positions, segment_ids = np.zeros_like(ones), np.zeros_like(ones)
  start = 0
  for i, length in enumerate(lengths):
    positions[0, start : start + length] = np.arange(length)
    segment_ids[0, start : start + length] = i + 1
    start += length
  packed = np.asarray(logits(make_params(), tokens, positions, segment_ids))
  start = 0
  for length in lengths:
    alone = np.zeros_like(tokens)
    alone[0, :length] = tokens[0, start : start + length]
    row = np.arange(21)[None]
    want = logits(make_params(), alone, row, (row < length).astype(np.int32))
    got = packed[:, start : start + length]
    np.testing.assert_allclose(got, want[:, :length], atol=1e-5)
    start += length
  changed = tokens.copy()
  changed[0, :11] = (changed[0, :11] + 5) % 48
  other = logits(make_params(), changed, positions, segment_ids)
  np.testing.assert_array_equal(other[0, 11:], packed[0, 11:])
