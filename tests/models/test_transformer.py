import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema
from posttrain.models import transformer

CFG = schema.Model(
    vocab_size=48, layers=2, embed_dim=32, heads=4, kv_heads=2, head_dim=8,
    mlp_dim=64,
)
FULL = dataclasses.replace(CFG, qk_norm=True, qkv_bias=True, tied_head=False)


def make_tokens(rows=2, length=12, seed=0):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, 48, (rows, length)).astype(np.int32)
  positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
  return tokens, positions, np.ones_like(tokens)


@functools.partial(jax.jit, static_argnames='cfg')
def logits(params, cfg, *inputs):
  hidden, _ = transformer.trunk(params, cfg, *inputs)
  weight, softcap = transformer.head(params, cfg)
  assert softcap is None
  return jnp.dot(hidden, weight, preferred_element_type=jnp.float32)


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


def test_tree():
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
  assert type(params) is dict
  count = sum(x.size for x in jax.tree.leaves(params))
  assert transformer.num_params(FULL) == count
  tied = shapes(CFG)
  assert 'head' not in tied and 'bias' not in tied['layers']['attention']['q']


def test_init_scales():
  cfg = schema.Model(vocab_size=500, layers=4, embed_dim=128, mlp_dim=384)
  params = paths(transformer.init(jax.random.key(0), cfg))
  residual = 8**-0.5
  for path, fan_in, scale in [
      ('attention/q', 128, 1.0), ('attention/o', 128, residual),
      ('mlp/up', 128, 1.0), ('mlp/down', 384, residual),
  ]:
    kernel = params[f'layers/{path}/kernel']
    np.testing.assert_allclose(kernel.std(), scale * fan_in**-0.5, rtol=0.02)
    assert not (kernel[0] == kernel[1]).any()


def test_num_params_of_a_preset():
  # Qwen3-0.6B's published 0.6 B, of which 0.44 B are not embeddings.
  assert transformer.num_params(schema.PRESETS['qwen3_0p6b']) == 596_049_920


@pytest.mark.parametrize('dims', [(1, 2, 2), (2, 4, 4)])
def test_sharding_rules_match_and_divide(dims):
  sizes = dict(zip(('data', 'fsdp', 'tensor'), dims, strict=True))
  for cfg in (FULL, schema.PRESETS['qwen3_0p6b']):
    for path, leaf in paths(shapes(cfg)).items():
      axes = next(
          axes for regex, axes in transformer.SHARDING_RULES
          if re.search(regex, path)
      )
      assert len(axes) == leaf.ndim, path
      for size, axis in zip(leaf.shape, axes, strict=True):
        assert axis is None or size % sizes[axis] == 0, path


def test_causal():
  params = make_params(CFG)
  tokens, *rest = make_tokens()
  changed = tokens.copy()
  changed[:, 7:] = (changed[:, 7:] + 1) % 48
  a, b = (logits(params, CFG, x, *rest) for x in (tokens, changed))
  np.testing.assert_array_equal(a[:, :7], b[:, :7])
  assert (a[:, 7:] != b[:, 7:]).any(-1).all()


def test_packed_equals_separate():
  # Row 0 packs segments of 5 and 8 tokens; rows 1 and 2 hold one of them.
  tokens, positions, segments = make_tokens(rows=3, length=16)
  positions[0] = [*range(5), *range(8), 0, 0, 0]
  segments[0] = [1] * 5 + [2] * 8 + [0] * 3
  tokens[1, :5], tokens[2, :8] = tokens[0, :5], tokens[0, 5:13]
  segments[1, 5:] = segments[2, 8:] = 0
  out = logits(make_params(FULL), FULL, tokens, positions, segments)
  assert jnp.isfinite(out).all()
  np.testing.assert_allclose(out[0, :5], out[1, :5], atol=1e-5)
  np.testing.assert_allclose(out[0, 5:13], out[2, :8], atol=1e-5)


def test_remat_changes_nothing():
  inputs, params = make_tokens(), make_params(CFG)

  def run(remat):
    cfg = dataclasses.replace(CFG, remat=remat)
    def loss(p):
      return jnp.square(logits(p, cfg, *inputs)).mean()
    return jax.jit(jax.value_and_grad(loss))(params)

  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
      run('none'), run('block'),
  )


def test_bfloat16():
  cfg = dataclasses.replace(FULL, dtype='bfloat16')
  params, inputs = make_params(FULL), make_tokens()
  hidden, _ = jax.eval_shape(
      lambda: transformer.trunk(params, cfg, *inputs)
  )
  assert hidden.dtype == jnp.bfloat16
  ours, exact = (logits(params, c, *inputs) for c in (cfg, FULL))
  assert ours.dtype == jnp.float32
  assert float(jnp.abs(ours - exact).max()) < 0.05 * float(jnp.abs(exact).max())


PEERS = {
    'Llama': {'attention_bias': False},
    'Qwen2': {'use_sliding_window': False},
    'Qwen3': {'use_sliding_window': False},
}


@pytest.mark.parametrize(
    'name, tied',
    [('Llama', False), ('Qwen2', True), ('Qwen3', True), ('Qwen3', False)],
)
def test_parity_with_transformers(name, tied):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  cfg = dataclasses.replace(
      CFG, tied_head=tied, rope_theta=5000.0, norm_eps=1e-5,
      qk_norm=name == 'Qwen3', qkv_bias=name == 'Qwen2',
  )
  torch.manual_seed(0)
  peer_cfg = getattr(transformers, f'{name}Config')(
      vocab_size=cfg.vocab_size, hidden_size=cfg.embed_dim,
      num_hidden_layers=cfg.layers, num_attention_heads=cfg.heads,
      num_key_value_heads=cfg.kv_heads, head_dim=cfg.head_dim,
      intermediate_size=cfg.mlp_dim, rms_norm_eps=cfg.norm_eps,
      rope_parameters={'rope_type': 'default', 'rope_theta': cfg.rope_theta},
      tie_word_embeddings=tied, initializer_range=0.3,
      attn_implementation='eager', **PEERS[name],
  )
  peer = getattr(transformers, f'{name}ForCausalLM')(peer_cfg).eval()
  for _key, value in peer.named_parameters():  # norms and biases off 1 and 0
    if value.ndim == 1:
      value.data += 0.2 * torch.randn_like(value)
  params = from_peer(peer.state_dict(), cfg)
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes(cfg))
  tokens, *rest = make_tokens(length=20)
  with torch.no_grad():
    expected = peer(torch.tensor(tokens).long()).logits.numpy()
  ours = logits(params, cfg, tokens, *rest)
  assert np.abs(ours - expected).max() <= 2e-4 * np.abs(expected).max()


def from_peer(state, cfg):
  """Our tree from a transformers state dict (kernels transposed, stacked)."""
  def stacked(name):
    layers = [state[f'model.layers.{i}.{name}'] for i in range(cfg.layers)]
    return np.stack([x.numpy().T for x in layers])

  def attention(part):
    out = {'kernel': stacked(f'self_attn.{part}_proj.weight')}
    if cfg.qkv_bias and part != 'o':
      out['bias'] = stacked(f'self_attn.{part}_proj.bias')
    return out

  layers = {
      'attention': {part: attention(part) for part in 'qkvo'},
      'mlp': {
          part: {'kernel': stacked(f'mlp.{part}_proj.weight')}
          for part in ('gate', 'up', 'down')
      },
      'attention_norm': {'scale': stacked('input_layernorm.weight')},
      'mlp_norm': {'scale': stacked('post_attention_layernorm.weight')},
  }
  if cfg.qk_norm:
    for part in ('q_norm', 'k_norm'):
      scale = stacked(f'self_attn.{part}.weight')
      layers['attention'][part] = {'scale': scale}
  params = {
      'embed': {'table': state['model.embed_tokens.weight'].numpy()},
      'layers': layers,
      'final_norm': {'scale': state['model.norm.weight'].numpy()},
  }
  if not cfg.tied_head:
    params['head'] = {'kernel': state['lm_head.weight'].numpy().T}
  return params
