"""Files of HuggingFace directories: dtypes, shardings, crashes, errors."""

import dataclasses
import json
import shutil
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors
from safetensors import safe_open

from posttrain import schema, sharding, tree
from posttrain.models import hf, hf_config, transformer
from tests import fixtures
from tests.models import test_transformer
from tests.models.test_hf import tensors_of

SMALL = schema.Model(
  vocab_size=40,
  layers=2,
  embed_dim=16,
  heads=2,
  kv_heads=1,
  head_dim=8,
  mlp_dim=24,
)
GEMMA = dataclasses.replace(
  SMALL,
  norm_offset=True,
  post_norms=True,
  scale_embeddings=True,
  activation='gelu',
  local_layers=(0,),
  window=4,
  query_scale=8.0,
)


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """A saved directory and its parameters."""
  path = tmp_path_factory.mktemp('ours') / 'model'
  params = fixtures.params(GEMMA)
  hf.save(params, GEMMA, path)
  return path, params


@pytest.fixture
def copy(written, tmp_path):
  return shutil.copytree(written[0], tmp_path / 'copy')


def test_saving_as_bfloat16_rounds_once(written):
  path, params = written
  assert hf_config.read(path) == GEMMA
  loaded = hf.load(path, GEMMA)
  for (name, a), b in zip(
    tree.flat(params).items(), jax.tree.leaves(loaded), strict=True
  ):
    rounded = a.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(rounded, b, err_msg=name)
  assert all(x.dtype == jnp.bfloat16 for x in tensors_of(path).values())


def test_loaded_leaves_have_the_shardings_of_like(written):
  path, params = written
  mesh = sharding.make_mesh(schema.Mesh(), jax.devices()[:1])
  like = sharding.placed(params, transformer.SHARDING_RULES, mesh)
  loaded = hf.load(path, GEMMA, like)
  for x, wanted in zip(*map(jax.tree.leaves, (loaded, like)), strict=True):
    assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)
  jax.tree.map(np.testing.assert_array_equal, loaded, hf.load(path, GEMMA))


MIXED = {
  'odd': np.arange(3).astype(jnp.bfloat16),
  'matrix': np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5),
  'scalar': np.array(1.5, np.float16),
  'transposed': np.arange(6, dtype=np.float32).reshape(2, 3).T,
  'é"': np.ones(1, np.float32),
}


def write_mixed(folder, get, shard_bytes=2**30):
  shapes, dtypes = (
    {name: getattr(array, key) for name, array in MIXED.items()}
    for key in ('shape', 'dtype')
  )
  hf.write_shards(folder, shapes, dtypes, get, shard_bytes)


@pytest.mark.parametrize('shard_bytes, files', [(70, 2), (1, 5)])
def test_safetensors_reads_written_files(tmp_path, shard_bytes, files):
  write_mixed(tmp_path, MIXED.get, shard_bytes)
  tensors = tensors_of(tmp_path)
  assert tensors.keys() == MIXED.keys()
  for name, array in MIXED.items():
    assert tensors[name].dtype == array.dtype
    np.testing.assert_array_equal(tensors[name], array, strict=True)
  paths = sorted(tmp_path.glob('*.safetensors'))
  assert len(paths) == files
  for path in paths:
    with safe_open(path, 'numpy') as file:
      assert file.metadata() == {'format': 'pt'}


def test_a_tensor_is_freed_before_the_next_is_written(tmp_path):
  arrays = []

  def get(name):
    assert all(array() is None for array in arrays)
    array = MIXED[name].copy()
    arrays.append(weakref.ref(array))
    return array

  write_mixed(tmp_path, get)
  assert len(arrays) == len(MIXED)


@pytest.mark.parametrize('whole', [0, len(hf.tensors(SMALL)) - 1])
def test_a_directory_of_a_crashed_save_cannot_be_loaded(
  tmp_path, monkeypatch, whole
):
  get, left = hf._get, [whole]

  def doomed(*args):
    if not left[0]:
      raise KeyboardInterrupt
    left[0] -= 1
    return get(*args)

  monkeypatch.setattr(hf, '_get', doomed)
  params = fixtures.params(SMALL)
  with pytest.raises(KeyboardInterrupt):
    hf.save(params, SMALL, tmp_path, shard_bytes=2000)
  assert not any(tmp_path.glob('*.tmp'))
  tensors_of(tmp_path)  # of the completed files
  for read in (lambda x: hf.load(x, SMALL), hf_config.read):
    with pytest.raises(ValueError, match=f'{tmp_path}.* must '):
      read(tmp_path)


def edit(path, change):
  """Rewrites the tensors of a directory."""
  tensors = tensors_of(path)
  change(tensors)
  safetensors.save_file(tensors, path / 'model.safetensors')


NORM = 'model.norm.weight'


@pytest.mark.parametrize(
  'name, value',
  [
    (NORM, None),
    ('extra', np.zeros(3)),
    (NORM, np.zeros(17, np.float32)),
    (NORM, np.zeros(16, np.int8)),
  ],
)
def test_an_unexpected_tensor_is_refused_by_name(copy, name, value):
  def change(tensors):
    tensors[name] = value
    if value is None:
      del tensors[name]

  edit(copy, change)
  with pytest.raises(ValueError, match=f'{copy}.* {name}'):
    hf.load(copy, GEMMA)


@pytest.mark.parametrize(
  ('dtype', 'bad'),
  [('float32', np.nan), ('float16', -np.inf), ('bfloat16', np.nan)],
)
def test_a_tensor_that_is_not_finite_is_named(copy, dtype, bad):
  name = 'model.layers.1.mlp.up_proj.weight'

  def change(tensors):
    tensors[name] = tensors[name].astype(jnp.dtype(dtype))
    tensors[name][0, 0] = jnp.finfo(dtype).max
    tensors[name].reshape(-1)[-1] = bad

  edit(copy, change)
  message = f'{copy}/model.safetensors: tensor {name} must be finite'
  with pytest.raises(ValueError, match=message):
    hf.load(copy, GEMMA)


@pytest.mark.parametrize('name', ['model.safetensors', hf.INDEX])
def test_a_damaged_file_is_named(copy, name):
  (copy / 'model.safetensors').unlink()
  file = copy / name
  file.write_bytes(b'abc')
  with pytest.raises(ValueError, match=f'{file} must '):
    hf.load(copy, GEMMA)


def test_a_missing_shard_is_named(copy):
  (copy / 'model.safetensors').unlink()
  text = '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'
  (copy / hf.INDEX).write_text(text)
  message = f'00002.safetensors must .*{hf.INDEX}.*--local-dir {copy}'
  with pytest.raises(ValueError, match=message):
    hf.load(copy, GEMMA)


def test_a_tied_head_and_rope_tables_are_ignored(copy):
  def change(tensors):
    table = tensors['model.embed_tokens.weight']
    tensors['lm_head.weight'] = table.copy()
    tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.ones(4)

  before = hf.load(copy, GEMMA)
  edit(copy, change)
  jax.tree.map(np.testing.assert_array_equal, before, hf.load(copy, GEMMA))


@pytest.mark.parametrize(
  'key, value',
  [
    ('model_type', 'mamba'),
    ('architectures', ['Gemma2Model']),
    ('hidden_size', None),
    ('quantization_config', {'bits': 4}),
    ('rope_scaling', {'rope_type': 'proportional'}),
    ('partial_rotary_factor', 0.5),
    ('mlp_bias', True),
    ('rope_parameters', {'full_attention': {'rope_theta': 5.0}}),
  ],
)
def test_an_unsupported_config_is_refused_by_key(copy, key, value):
  path = copy / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
  named = {'rope_scaling': 'rope_type'}.get(key, key)
  with pytest.raises(ValueError, match=f'{path}: .*{named}.* must '):
    hf_config.read(copy)


@pytest.mark.parametrize(
  'key, value',
  [
    ('hidden_size', 32),  # as it is
    ('enable_moe_block', True),
    ('use_bidirectional_attention', 'all'),
    ('num_kv_shared_layers', 3),
    ('global_head_dim', 11),
  ],
)
def test_variants_of_gemma4_are_refused_by_key(tmp_path, key, value):
  cfg, path = test_transformer.GEMMA4, tmp_path / 'config.json'
  path.write_text(json.dumps(hf_config.write(cfg) | {key: value}))
  if key == 'hidden_size':
    assert hf_config.read(tmp_path) == cfg
    return
  with pytest.raises(ValueError, match=f'{path}: .*{key}.* must '):
    hf_config.read(tmp_path)


@pytest.mark.parametrize('each', [{}, None, {'1': {'head_dim': 6}}])
def test_sizes_of_gemma4_in_version_5(tmp_path, each):
  text = hf_config.write(test_transformer.GEMMA4)
  del text['global_head_dim'], text['num_global_key_value_heads']
  text['per_layer_config'] = each
  (tmp_path / 'config.json').write_text(json.dumps(text))
  cfg = hf_config.read(tmp_path)
  assert cfg.global_head_dim == (6 if each else cfg.head_dim)
  assert cfg.global_kv_heads is None


@pytest.mark.parametrize(
  'cfg, key',
  [
    (
      dataclasses.replace(
        SMALL, local_layers=(0,), window=4, local_rope_theta=50.0
      ),
      'local_rope_theta',
    ),
    (dataclasses.replace(GEMMA, post_norms=False), 'model'),
  ],
)
def test_models_of_no_architecture_are_not_written(cfg, key):
  with pytest.raises(ValueError, match=rf'{key} must '):
    hf_config.write(cfg)


def test_a_mistral_with_a_window_in_some_layers_is_refused(tmp_path):
  cfg = dataclasses.replace(SMALL, local_layers=(0, 1), window=4)
  text = hf_config.write(cfg)
  assert text['model_type'] == 'mistral'
  text['layer_types'] = ['sliding_attention', 'full_attention']
  (tmp_path / 'config.json').write_text(json.dumps(text))
  with pytest.raises(ValueError, match='layer_types must '):
    hf_config.read(tmp_path)


def test_save_refuses_used_folders_and_other_models(written, tmp_path):
  path, params = written
  with pytest.raises(ValueError, match=f'{path} must '):
    hf.save(params, GEMMA, path)
  other = dataclasses.replace(GEMMA, window=5)
  with pytest.raises(ValueError, match='must describe the model to be saved'):
    hf.save(params, other, tmp_path / 'out', like=path)
