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
from posttrain.models import hf, hf_config, hf_files, transformer
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
GEMMA3 = dataclasses.replace(GEMMA, qk_norm=True, local_rope_theta=1e4)
QWEN = dataclasses.replace(SMALL, qk_norm=True)


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """A saved directory and its parameters."""
  path = tmp_path_factory.mktemp('ours') / 'model'
  params = transformer.init(jax.random.key(1), GEMMA)
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
  'none': np.zeros((0, 4), np.float32),
  'cube': np.arange(8).reshape(2, 2, 2).astype(jnp.bfloat16),
  'transposed': np.arange(6, dtype=np.float32).reshape(2, 3).T,
  'é"': np.ones(1, np.float32),
}


def write_mixed(folder, get, shard_bytes=2**30):
  shapes = {name: array.shape for name, array in MIXED.items()}
  dtypes = {name: array.dtype for name, array in MIXED.items()}
  hf_files.write(folder, shapes, dtypes, get, shard_bytes)


@pytest.mark.parametrize('shard_bytes, files', [(2**30, 1), (70, 2), (1, 7)])
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
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], 'little')
    header = json.loads(raw[8 : 8 + size])
    for name in header.keys() & MIXED.keys():
      start, _ = header[name]['data_offsets']
      assert start % MIXED[name].dtype.itemsize == size % 8 == 0


def test_a_tensor_is_freed_before_the_next_is_written(tmp_path):
  arrays = []

  def get(name):
    assert all(array() is None for array in arrays)
    array = MIXED[name].copy()
    arrays.append(weakref.ref(array))
    return array

  write_mixed(tmp_path, get)
  assert len(arrays) == len(MIXED)


@pytest.mark.parametrize('shard_bytes', [2000, 2**30])
@pytest.mark.parametrize('whole', [0, 12, -1])
def test_a_directory_of_a_crashed_save_cannot_be_loaded(
  tmp_path, monkeypatch, whole, shard_bytes
):
  host, left = hf._host, [whole % len(hf.tensors(SMALL))]

  def doomed(*args):
    if not left[0]:
      raise KeyboardInterrupt
    left[0] -= 1
    return host(*args)

  monkeypatch.setattr(hf, '_host', doomed)
  params = transformer.init(jax.random.key(1), SMALL)
  with pytest.raises(KeyboardInterrupt):
    hf.save(params, SMALL, tmp_path, shard_bytes=shard_bytes)
  assert not any(tmp_path.glob('*.tmp'))
  tensors_of(tmp_path)  # of the completed files
  for read in (lambda x: hf.load(x, SMALL), hf_config.read):
    with pytest.raises(ValueError, match='must hold .*: got no'):
      read(tmp_path)


def edit(path, change):
  """Rewrites the tensors of a directory."""
  tensors = tensors_of(path)
  change(tensors)
  safetensors.save_file(tensors, path / 'model.safetensors')


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda t: t.pop('model.norm.weight'), 'model.norm.weight: got none'),
    (lambda t: t.update(extra=np.zeros(3)), 'extra'),
    (
      lambda t: t.update({'model.norm.weight': np.zeros(17, np.float32)}),
      r'model\.norm\.weight must have shape \(16,\), .*got \(17,\)',
    ),
    (
      lambda t: t.update({'model.norm.weight': np.zeros(16, np.int8)}),
      'model.norm.weight must be of dtype F32, F16, BF16: got I8',
    ),
  ],
)
def test_an_unexpected_tensor_is_refused_by_name(copy, change, message):
  edit(copy, change)
  with pytest.raises(ValueError, match=message) as error:
    hf.load(copy, GEMMA)
  assert str(copy) in str(error.value)


@pytest.mark.parametrize('bad', [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
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


@pytest.mark.parametrize('text', ['{', '{}', '{"weight_map": {}}'])
def test_a_broken_index_is_named(copy, text):
  (copy / 'model.safetensors').unlink()
  index = copy / hf_files.INDEX
  index.write_text(text)
  with pytest.raises(ValueError, match='must ') as error:
    hf.check(copy, GEMMA)
  assert str(error.value).startswith(str(index))


def test_one_file_precedes_an_index_as_in_transformers(copy):
  (copy / hf_files.INDEX).write_text('{"weight_map": {"x": "y.safetensors"}}')
  assert list(hf.check(copy, GEMMA)) == [copy / 'model.safetensors']


def test_links_of_a_cache_of_downloads_are_followed(copy, tmp_path):
  target = tmp_path / 'blob'
  (copy / 'model.safetensors').rename(target)
  (copy / 'model.safetensors').symlink_to(target)
  assert hf.check(copy, GEMMA)


def header(value, data=b'12345678'):
  text = value if isinstance(value, bytes) else json.dumps(value).encode()
  return len(text).to_bytes(8, 'little') + text + data


def entry(start, end, shape=(1,), dtype='F32'):
  return {'dtype': dtype, 'shape': shape, 'data_offsets': [start, end]}


@pytest.mark.parametrize(
  'content',
  [
    b'abc',
    b'\xff' * 100,
    header(b'hello'),
    header({'a': entry(0, 64)}),  # less data than tensors
    header({'a': entry(0, 8, (8,), 'Q3')}),
  ],
)
def test_a_damaged_header_is_one_line(copy, content):
  file = copy / 'model.safetensors'
  file.write_bytes(content)
  with pytest.raises(ValueError, match='must ') as error:
    hf.check(copy, GEMMA)
  assert str(error.value).startswith(str(file))


def test_a_tied_head_and_rope_tables_are_ignored(copy):
  def change(tensors):
    table = tensors['model.embed_tokens.weight']
    tensors['lm_head.weight'] = table.copy()
    tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.ones(4)

  before = hf.load(copy, GEMMA)
  edit(copy, change)
  jax.tree.map(np.testing.assert_array_equal, before, hf.load(copy, GEMMA))


def test_pickles_are_not_read(copy):
  (copy / 'model.safetensors').rename(copy / 'pytorch_model.bin')
  with pytest.raises(ValueError, match='must hold model.safetensors: got'):
    hf.load(copy, GEMMA)


@pytest.mark.parametrize(
  'key, value, message',
  [
    ('model_type', 'mamba', "model_type must be one of .*got 'mamba'"),
    ('architectures', ['Gemma2Model'], r"architectures \['Gemma2Model'\]"),
    ('hidden_size', None, 'hidden_size must be given: got none'),
    ('attention_bias', True, 'attention_bias must be False: got True'),
    ('quantization_config', {'bits': 4}, 'quantization_config must be None'),
    ('rope_scaling', {'rope_type': 'yarn'}, "rope_type must be .*got 'yarn'"),
    ('rope_scaling', {'rope_type': 'linear'}, 'factor must be given: got n'),
    ('hidden_activation', 'relu', "gemma2 must be 'gelu': got 'relu'"),
    ('layer_types', ['full_attention', 'chunked'], 'layer_types must name'),
    ('num_key_value_heads', 3, 'kv_heads must divide heads=2: got 3'),
    ('num_hidden_layers', '2', "layers must be of type int: got '2'"),
    ('vocab_size', 10**12, 'vocab_size must be None or in'),
    ('rms_norm_eps', float('nan'), 'rms_norm_eps: norm_eps must be in'),
    ('rope_theta', None, 'rope_theta must be of type float: got None'),
    (
      'rope_parameters',
      {'full_attention': {'rope_theta': 5.0}},
      'rope_parameters must be the same for all layers',
    ),
    ('is_causal', False, 'is_causal must be True: got False'),
  ],
)
def test_an_unsupported_config_is_refused_by_key(copy, key, value, message):
  path = copy / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
  with pytest.raises(ValueError, match=message) as error:
    hf_config.read(copy)
  assert str(path) in str(error.value)


@pytest.mark.parametrize(
  'cfg, key, value',
  [
    (GEMMA3, 'sliding_window_pattern', 0),
    (GEMMA3, 'rope_parameters', {'chunked_attention': {}}),
    (QWEN, 'layer_types', ['sliding'] * 2),
    (QWEN, 'layer_types', ['sliding_attention'] * 2),  # without a window
  ],
)
def test_keys_of_patterns_are_checked(cfg, key, value, tmp_path):
  """Those of the families that read them: Gemma 3 and Qwen."""
  text = hf_config.write(cfg) | {'layer_types': None, key: value}
  (tmp_path / 'config.json').write_text(json.dumps(text))
  with pytest.raises(ValueError, match=f'config.json: .*{key}'):
    hf_config.read(tmp_path)


@pytest.mark.parametrize('text', [None, '{', '[1]'])
def test_a_missing_or_broken_config_is_refused(tmp_path, text):
  if text:
    (tmp_path / 'config.json').write_text(text)
  with pytest.raises(ValueError, match=r'config\.json'):
    hf_config.read(tmp_path)


@pytest.mark.parametrize(
  'cfg, key',
  [
    (dataclasses.replace(SMALL, local_layers=(0,), window=4), 'local_layers'),
    (dataclasses.replace(SMALL, embed_dim=15), 'heads'),
    (dataclasses.replace(GEMMA3, attention_softcap=5.0), 'attention_softcap'),
    (dataclasses.replace(GEMMA, query_scale=None), 'query_scale'),
    (dataclasses.replace(GEMMA, post_norms=False), 'model'),
  ],
)
def test_models_of_no_architecture_are_not_written(cfg, key):
  with pytest.raises(ValueError, match=rf'{key} must '):
    hf_config.write(cfg)


def test_save_refuses_models_without_an_architecture_and_used_folders(
  written, tmp_path
):
  path, params = written
  with pytest.raises(ValueError, match='must be empty: got files'):
    hf.save(params, GEMMA, path)
  other = dataclasses.replace(GEMMA, window=5)
  with pytest.raises(ValueError, match='must describe the model to be saved'):
    hf.save(params, other, tmp_path / 'out', like=path)
