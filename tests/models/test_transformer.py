"""The transformer: tree, initialization, masks, cache, RoPE, remat, dtypes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema, scoring
from posttrain.models import layers, rope, transformer

CFG = schema.Model(
  vocab_size=48,
  layers=2,
  embed_dim=32,
  heads=4,
  kv_heads=2,
  head_dim=8,
  mlp_dim=64,
)
FULL = dataclasses.replace(CFG, qk_norm=True, qkv_bias=True, tied_head=False)
GEMMA = dataclasses.replace(
  CFG,
  qk_norm=True,
  norm_offset=True,
  post_norms=True,
  activation='gelu',
  scale_embeddings=True,
  local_layers=(1,),
  window=3,
  local_rope_theta=50.0,
  rope_scaling=schema.RopeScaling('linear', 4.0),
  query_scale=20.0,
  attention_softcap=2.0,
  logit_softcap=3.0,
)
# Two layers with keys and values, two that read those.
GEMMA4 = dataclasses.replace(
  CFG,
  layers=4,
  qk_norm=True,
  v_norm=True,
  post_norms=True,
  activation='gelu',
  scale_embeddings=True,
  query_scale=1.0,
  local_layers=(0, 2),
  window=3,
  local_rope_theta=50.0,
  rope_scaling=schema.RopeScaling('proportional', 2.0),
  partial_rotary=0.5,
  global_head_dim=12,
  global_kv_heads=1,
  keys_as_values=True,
  shared_kv_layers=2,
  double_mlp=True,
  layer_embed_dim=4,
  layer_scalars=True,
)
SWITCHES = dataclasses.replace(
  CFG,
  qk_norm=True,
  wide_qk_norm=True,
  pre_norms=False,
  post_norms=True,
  output_bias=True,
  mlp_bias=True,
  partial_rotary=0.5,
  nope_layers=(1,),
  query_beta=0.5,
  rope_scaling=schema.RopeScaling('yarn', 4.0, 4),
  embedding_multiplier=3.0,
  residual_multiplier=0.5,
  attention_multiplier=0.3,
  logit_divisor=2.0,
)
EXPERTS = dataclasses.replace(
  CFG,
  experts=schema.Experts(count=5, per_token=2, mlp_dim=12, normalize=False),
  dense_layers=(0,),
)
kinds = pytest.mark.parametrize(
  'cfg',
  [
    FULL,
    GEMMA,
    SWITCHES,
    EXPERTS,
    pytest.param(GEMMA4, marks=pytest.mark.slow),
  ],
  ids=['full', 'gemma', 'switches', 'experts', 'gemma4'],
)


def make_tokens(rows=2, length=12, seed=0):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, 48, (rows, length)).astype(np.int32)
  positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
  return tokens, positions, np.ones_like(tokens)


@functools.partial(jax.jit, static_argnames='cfg')
def logits(params, cfg, *inputs):
  hidden, _ = transformer.trunk(params, cfg, *inputs)
  return scoring.next_logits(params, cfg, hidden)


@functools.cache
def make_params(cfg):
  return transformer.init(jax.random.key(0), cfg)


def shapes(cfg):
  return jax.eval_shape(lambda: transformer.init(jax.random.key(0), cfg))


def paths(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in leaves
  }


def test_init_builds_the_documented_tree():
  params = make_params(FULL)
  assert {k: v.shape for k, v in paths(params).items()} == {
    'embed/table': (48, 32),
    'final_norm/scale': (32,),
    'head/kernel': (32, 48),
    'layers/attention/k/bias': (2, 16),
    'layers/attention/k/kernel': (2, 32, 16),
    'layers/attention/k_norm/scale': (2, 8),
    'layers/attention/o/kernel': (2, 32, 32),
    'layers/attention/q/bias': (2, 32),
    'layers/attention/q/kernel': (2, 32, 32),
    'layers/attention/q_norm/scale': (2, 8),
    'layers/attention/v/bias': (2, 16),
    'layers/attention/v/kernel': (2, 32, 16),
    'layers/attention_norm/scale': (2, 32),
    'layers/mlp/down/kernel': (2, 64, 32),
    'layers/mlp/gate/kernel': (2, 32, 64),
    'layers/mlp/up/kernel': (2, 32, 64),
    'layers/mlp_norm/scale': (2, 32),
  }
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
  count = sum(x.size for x in jax.tree.leaves(params))
  assert transformer.num_params(FULL) == count
  tied = shapes(CFG)
  assert 'head' not in tied and 'bias' not in tied['layers']['attention']['q']


def test_init_scales_follow_fan_in_and_depth():
  cfg = schema.Model(vocab_size=500, layers=4, embed_dim=128, mlp_dim=384)
  params = paths(transformer.init(jax.random.key(0), cfg))
  residual = 8**-0.5
  for path, fan_in, scale in [
    ('attention/q', 128, 1.0),
    ('attention/o', 128, residual),
    ('mlp/up', 128, 1.0),
    ('mlp/down', 384, residual),
  ]:
    kernel = params[f'layers/{path}/kernel']
    np.testing.assert_allclose(kernel.std(), scale * fan_in**-0.5, rtol=0.02)
    assert not (kernel[0] == kernel[1]).any()


# The numbers of parameters that the models' authors publish, to the last one.
def test_num_params_of_presets():
  for preset, parameters in {
    'qwen3_0p6b': 596_049_920,
    'qwen3_1p7b': 1_720_574_976,
    'qwen3_4b': 4_022_468_096,
    'qwen3_8b': 8_190_735_360,
    'qwen3_14b': 14_768_307_200,
    'qwen3_32b': 32_762_123_264,
    'qwen3_30b_a3b': 30_532_122_624,
    'qwen2_5_0p5b': 494_032_768,
    'gemma2_2b': 2_614_341_888,
    'gemma3_1b': 999_885_952,
    'olmo3_7b': 7_298_011_136,
    'llama3_8b': 8_030_261_248,
    'llama3_70b': 70_553_706_496,
    'mistral_7b': 7_248_023_552,
    'smollm3_3b': 3_075_098_624,
    'granite3_2b': 2_533_539_840,
    'olmo2_1b': 1_484_916_736,
    'phi3_mini': 3_821_079_552,
  }.items():
    assert transformer.num_params(schema.PRESETS[preset]) == parameters


@pytest.mark.parametrize('dims', [(1, 2, 2), (2, 4, 4)])
def test_sharding_rules_match_and_divide(dims):
  sizes = dict(zip(('data', 'fsdp', 'tensor'), dims, strict=True))
  for cfg in (FULL, GEMMA, GEMMA4, SWITCHES, schema.PRESETS['qwen3_0p6b']):
    for path, leaf in paths(shapes(cfg)).items():
      axes = next(
        axes
        for regex, axes in transformer.SHARDING_RULES
        if re.search(regex, path)
      )
      assert len(axes) in (0, leaf.ndim), path  # 0 = whole
      for size, axis in zip(leaf.shape, axes, strict=False):
        assert axis is None or size % sizes[axis] == 0, path


@kinds
def test_packed_segments_equal_separate_rows(cfg):
  # Row 0 packs segments of 5 and 8 tokens; rows 1 and 2 hold one of them.
  tokens, positions, segments = make_tokens(rows=3, length=16)
  positions[0] = [*range(5), *range(8), 0, 0, 0]
  segments[0] = [1] * 5 + [2] * 8 + [0] * 3
  tokens[1, :5], tokens[2, :8] = tokens[0, :5], tokens[0, 5:13]
  segments[1, 5:] = segments[2, 8:] = 0
  out = logits(make_params(cfg), cfg, tokens, positions, segments)
  assert jnp.isfinite(out).all()
  np.testing.assert_allclose(out[0, :5], out[1, :5], atol=1e-5)
  np.testing.assert_allclose(out[0, 5:13], out[2, :8], atol=1e-5)


@kinds
def test_branches_of_a_tree_equal_separate_rows(cfg):
  # Row 0: 5 tokens with branches of 4 and 7. Rows 1 and 2 hold one of them.
  tokens, positions, segments = make_tokens(rows=3, length=16)
  ends = np.zeros_like(tokens)
  ends[0] = [16] * 5 + [9] * 4 + [16] * 7
  ends[1:] = 16
  positions[0] = [*range(9), *range(5, 12)]
  tokens[1, :9] = tokens[0, :9]
  tokens[2, :12] = [*tokens[0, :5], *tokens[0, 9:]]
  out = logits(make_params(cfg), cfg, tokens, positions, segments, ends)
  np.testing.assert_allclose(out[0, :9], out[1, :9], atol=1e-5)
  np.testing.assert_allclose(out[0, 9:], out[2, 5:12], atol=1e-5)


@kinds
def test_decoding_in_chunks_equals_the_full_forward(cfg):
  params, (tokens, positions, segments) = make_params(cfg), make_tokens()
  expected = logits(params, cfg, tokens, positions, segments)

  @jax.jit
  def feed(cache, tokens, positions, segments):
    view = transformer.decode_view(params, cfg)
    cached = layers.Cached(cache)
    hidden, cache = transformer.trunk(
      view, cfg, tokens, positions, segments, cache=cached
    )
    return scoring.next_logits(view, cfg, hidden), cache.slots

  cache, chunks = transformer.empty_cache(cfg, 2, 16), []
  for part in (slice(0, 7), slice(7, 11), slice(11, 12)):
    out, cache = feed(
      cache, *(x[:, part] for x in (tokens, positions, segments))
    )
    chunks.append(out)
  np.testing.assert_allclose(
    np.concatenate(chunks, axis=1), expected, atol=2e-5 * np.abs(expected).max()
  )


LONGROPE = schema.RopeScaling(
  'longrope', 4.0, 16, short_factors=(1.0, 2.0), long_factors=(3.0, 4.0)
)


@pytest.mark.parametrize(
  'scaling, length, expected, gain',
  [
    (schema.RopeScaling(), None, [1.0, 0.1], 1.0),
    (schema.RopeScaling('linear', 4.0), None, [0.25, 0.025], 1.0),
    # 16 tokens are 2.546 turns of the first pair, 0.255 of the second: the
    # first keeps (2.546 - 1) / (4 - 1) = 0.5155 of itself.
    (
      schema.RopeScaling('llama3', 8.0, 16, 1.0, 4.0),
      None,
      [0.57605, 0.0125],
      1.0,
    ),
    # 8 turns are at pair 0.299, 1 turn at 1.202: from 0 to 2, so that the
    # second pair keeps one half of itself.
    (
      schema.RopeScaling('yarn', 4.0, 100, fast_turns=8.0),
      None,
      [1.0, 0.0625],
      1.138629,
    ),
    # theta is 100 (2 * 24 / 8 - 1)^2 = 2500.
    (schema.RopeScaling('dynamic', 2.0, 8), 24, [1.0, 0.02], 1.0),
    (schema.RopeScaling('dynamic', 2.0, 8), None, [1.0, 0.1], 1.0),
    # The gain is the root of 1 + ln 4 / ln 16.
    (LONGROPE, None, [1.0, 0.05], 1.5**0.5),
    (LONGROPE, 17, [1 / 3, 0.025], 1.5**0.5),
  ],
)
def test_rope_frequencies_of_every_scaling(scaling, length, expected, gain):
  cfg = dataclasses.replace(
    CFG, head_dim=4, rope_theta=100.0, rope_scaling=scaling, rope_length=length
  )
  radians, factor = rope.frequencies(cfg, local=False)
  np.testing.assert_allclose(radians, expected, rtol=1e-4)
  np.testing.assert_allclose(factor, gain, rtol=1e-6)
  own = dataclasses.replace(cfg, local_rope_theta=10_000.0)
  radians, factor = rope.frequencies(own, local=True)
  np.testing.assert_allclose(radians, [1.0, 0.01], rtol=1e-6)
  assert factor == 1


def test_layers_of_several_kinds_equal_those_of_one(monkeypatch):
  cfg = dataclasses.replace(GEMMA, layers=4)
  params, inputs = make_params(cfg), make_tokens()
  plain = [('attention', 'mlp')] * 4
  each = [layers.layer(params['layers'], plain, i) for i in range(4)]
  expected = logits(params, cfg, *inputs)
  kinds = tuple(('attention', x) for x in ('mlp', 'twin')) * 2
  monkeypatch.setattr(layers, 'kinds', lambda _: kinds)
  cfg = dataclasses.replace(cfg, remat='block')  # a key of its own in caches
  assert layers.periods(cfg) == {'layers': (kinds[:2], 2)}
  for layer, (_, name) in zip(each, kinds, strict=True):
    layer[name] = layer.pop('mlp')
  params = {**params, 'layers': layers.stack(each, kinds)}
  assert params['layers']['mlp']['up']['kernel'].shape == (2, 32, 64)
  like = jax.tree.map(jnp.shape, shapes(cfg))
  assert like == jax.tree.map(jnp.shape, params)
  out = logits(params, cfg, *inputs)
  np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize(
  'cfg',
  [
    FULL,
    GEMMA,
    *(
      pytest.param(x, marks=[pytest.mark.gate, pytest.mark.slow])
      for x in (SWITCHES, EXPERTS)
    ),
    pytest.param(GEMMA4, marks=pytest.mark.slow),
  ],
  ids=['full', 'gemma', 'switches', 'experts', 'gemma4'],
)
def test_remat_leaves_loss_and_gradients_unchanged(cfg):
  inputs, params = make_tokens(), make_params(cfg)

  def run(remat):
    def loss(p):
      remat_cfg = dataclasses.replace(cfg, remat=remat)
      return jnp.square(logits(p, remat_cfg, *inputs)).mean()

    return jax.jit(jax.value_and_grad(loss))(params)

  expected = run('none')
  for remat in ('attention', 'block'):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
      run(remat),
      expected,
    )
