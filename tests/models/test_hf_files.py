"""Files of HuggingFace directories: dtypes, shardings, crashes, errors."""

import dataclasses
import json
import pathlib
import shutil
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors
from safetensors import safe_open

from posttrain import schema, tree
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
  path, _ = written
  mesh = jax.make_mesh(
    (1, 1), ('fsdp', 'tensor'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  rules = transformer.SHARDING_RULES
  like = tree.map_with_path(
    lambda name, x: jax.ShapeDtypeStruct(
      x.shape,
      x.dtype,
      sharding=jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(*tree.match(rules, name))
      ),
    ),
    written[1],
  )
  loaded = hf.load(path, GEMMA, like)
  for x, wanted in zip(
    jax.tree.leaves(loaded), jax.tree.leaves(like), strict=True
  ):
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
    assert size % 8 == 0
    header = json.loads(raw[8 : 8 + size])
    for name in header.keys() & MIXED.keys():
      start, end = header[name]['data_offsets']
      assert start % MIXED[name].dtype.itemsize == 0
      assert raw[8 + size :][start:end] == MIXED[name].tobytes()


def test_a_tensor_is_freed_before_the_next_is_written(tmp_path):
  arrays = []

  def get(name):
    assert all(array() is None for array in arrays)
    array = MIXED[name].copy()
    arrays.append(weakref.ref(array))
    return array

  write_mixed(tmp_path, get)
  assert len(arrays) == len(MIXED)


@pytest.mark.parametrize('shape', [(4, 6), (3, 4, 6)])
@pytest.mark.parametrize('transposed', [False, True])
def test_a_leaf_is_filled_in_place(shape, transposed):
  leaf = jnp.zeros(shape)
  address, layer = leaf.unsafe_buffer_pointer(), 1 if len(shape) == 3 else None
  array = np.arange(24, dtype=jnp.bfloat16).reshape(4, 6)
  filled = hf._put(leaf, array.T if transposed else array, layer, transposed)
  assert filled.unsafe_buffer_pointer() == address and leaf.is_deleted()
  expected = np.zeros(shape, np.float32)
  expected[layer if layer is not None else ...] = array
  np.testing.assert_array_equal(filled, expected)


def test_no_file_is_mapped_while_tensors_are_placed(written, monkeypatch):
  maps, fill = pathlib.Path('/proc/self/maps'), hf._fill
  if not maps.exists():
    pytest.skip('needs /proc')

  def watched(*args):
    assert str(written[0]) not in maps.read_text()
    return fill(*args)

  monkeypatch.setattr(hf, '_fill', watched)
  hf.load(written[0], GEMMA)


@pytest.mark.parametrize('shard_bytes', [2000, 2**30])
@pytest.mark.parametrize('whole', [0, 1, 12, -1])
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
  for path in tmp_path.glob('*.safetensors'):  # the completed files
    safetensors.load_file(path)
  with pytest.raises(ValueError, match=r'must hold model\.safetensors: got no'):
    hf.load(tmp_path, SMALL)
  with pytest.raises(ValueError, match=r'must hold a config\.json: got none'):
    hf_config.read(tmp_path)


def edit(path, change):
  """Rewrites the tensors of a directory."""
  tensors = tensors_of(path)
  change(tensors)
  safetensors.save_file(tensors, path / 'model.safetensors')


@pytest.mark.parametrize(
  'change, message',
  [
    (
      lambda t: t.pop('model.norm.weight'),
      r'must hold tensor model\.norm\.weight: got none',
    ),
    (
      lambda t: t.update(extra=np.zeros(3)),
      "tensor 'extra' must belong to the model",
    ),
    (
      lambda t: t.update({'model.norm.weight': np.zeros(17, np.float32)}),
      r'model\.norm\.weight must have shape \(16,\), .*got \(17,\)',
    ),
    (
      lambda t: t.update({'model.norm.weight': np.zeros(16, np.int8)}),
      r'model\.norm\.weight must be of dtype F32, F16, BF16: got I8',
    ),
  ],
)
def test_an_unexpected_tensor_is_refused_by_name(copy, change, message):
  edit(copy, change)
  with pytest.raises(ValueError, match=message) as error:
    hf.load(copy, GEMMA)
  assert str(copy) in str(error.value)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
  'name', ['model.layers.1.mlp.up_proj.weight', 'model.norm.weight']
)
def test_a_tensor_that_is_not_finite_is_named(copy, name, bad):
  def change(tensors):
    tensors[name].reshape(-1)[-1] = bad

  edit(copy, change)
  message = f'{copy}/model.safetensors: tensor {name} must be finite'
  with pytest.raises(ValueError, match=message):
    hf.load(copy, GEMMA)


@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
@pytest.mark.parametrize('place', [0, 3_000, -1])
def test_the_largest_bits_tell_whether_all_are_finite(
  dtype, place, monkeypatch
):
  monkeypatch.setattr(hf_files, '_CACHED', 1000)
  array = np.full(5_000, -1.5).astype(jnp.dtype(dtype))
  assert hf_files.is_finite(array, dtype)
  array[place] = jnp.finfo(dtype).max
  assert hf_files.is_finite(array, dtype)
  assert hf_files.is_finite(array, 'float16') == (dtype == 'float16')
  for bad in (np.nan, -np.nan, np.inf, -np.inf):
    array[place] = bad
    assert not hf_files.is_finite(array, 'float32')
  assert hf_files.is_finite(np.zeros((), dtype), dtype)


@pytest.mark.parametrize(
  'text', ['{', '[]', '{}', '{"weight_map": [1]}', '{"weight_map": {}}']
)
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
    b'',
    b'abc',
    b'\xff' * 100,
    (2**63).to_bytes(8, 'little') + b'{}',
    header(b'hello'),
    header({'a': entry(0, 4), 'b': entry(2, 6)}),  # overlapping
    header({'a': entry(0, 4)}),  # more data than tensors
    header({'a': entry(0, 64)}),  # less
    header({'a': entry(0, 8, (8,), 'Q3')}),
  ],
)
def test_a_damaged_header_is_one_line(copy, content):
  file = copy / 'model.safetensors'
  file.write_bytes(content)
  with pytest.raises(ValueError, match='must ') as error:
    hf.check(copy, GEMMA)
  message = str(error.value)
  assert message.startswith(str(file))


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
    (
      'hidden_activation',
      'relu',
      "activation of a gemma2 must be 'gelu': got 'relu'",
    ),
    ('layer_types', ['full_attention'], 'layer_types must name'),
    ('layer_types', ['full_attention', 'chunked'], 'layer_types must name'),
    ('num_key_value_heads', 3, 'kv_heads must divide heads=2: got 3'),
    ('num_key_value_heads', 0, 'num_key_value_heads: kv_heads must be > 0'),
    ('num_hidden_layers', 10**9, r'layers must be in \[1, 10,000\]'),
    ('num_hidden_layers', 10**400, 'num_hidden_layers: layers must be'),
    ('num_hidden_layers', '2', "layers must be of type int: got '2'"),
    ('num_attention_heads', 0, 'num_attention_heads: heads must be > 0'),
    ('num_attention_heads', [1], 'heads must be of type int'),
    ('vocab_size', 10**12, 'vocab_size must be None or in'),
    ('head_dim', 0, 'head_dim must be > 0: got 0'),
    ('intermediate_size', -5, 'intermediate_size: mlp_dim must be > 0'),
    ('rms_norm_eps', float('nan'), 'rms_norm_eps: norm_eps must be in'),
    ('rope_theta', float('inf'), 'rope_theta must be in'),
    ('rope_theta', None, 'rope_theta must be of type float: got None'),
    (
      'rope_scaling',
      {'rope_type': 'linear', 'factor': 1e300},
      r'factor must be in \[0\.001, 1e\+06\]: got 1e\+300',
    ),
    (
      'rope_scaling',
      {'type': 'linear', 'factor': 2.0, 'partial_rotary_factor': 0.5},
      'partial_rotary_factor must be 1.0: got 0.5',
    ),
    (
      'rope_parameters',
      {'full_attention': {'rope_theta': 5.0}},
      'rope_parameters must be the same for all layers',
    ),
    ('attn_logit_softcapping', 0, 'attention_softcap must be None or in'),
    ('tie_word_embeddings', 'false', "tied_head must be of type bool: got 'f"),
    ('layer_types', 'full', "layer_types must name .*got 'full'"),
    ('sliding_window', 10**12, 'window must be None or in'),
    ('is_causal', False, 'is_causal must be True: got False'),
    ('per_layer_config', {'0': {}}, 'per_layer_config must be None'),
    ('transformers_weights', 'x.safetensors', 'transformers_weights must be'),
  ],
)
def test_an_unsupported_config_is_refused_by_key(copy, key, value, message):
  path = copy / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
  with pytest.raises(ValueError, match=message) as error:
    hf_config.read(copy)
  assert str(path) in str(error.value)


def test_keys_of_patterns_are_checked(written, tmp_path):
  """Those of the families that read them: Gemma 3 and Qwen."""
  gemma3 = dataclasses.replace(GEMMA, qk_norm=True, local_rope_theta=1e4)
  for cfg, key, value in (
    (gemma3, 'sliding_window_pattern', 0),
    (gemma3, 'rope_parameters', {'chunked_attention': {}}),
    (dataclasses.replace(SMALL, qk_norm=True), 'layer_types', ['sliding'] * 2),
  ):
    text = hf_config.write(cfg) | {'layer_types': None, key: value}
    (tmp_path / 'config.json').write_text(json.dumps(text))
    with pytest.raises(ValueError, match=f'config.json: {key} must '):
      hf_config.read(tmp_path)
  # No window, but layers that have one.
  text = hf_config.write(dataclasses.replace(SMALL, qk_norm=True))
  text |= {'layer_types': ['sliding_attention'] * 2}
  (tmp_path / 'config.json').write_text(json.dumps(text))
  with pytest.raises(ValueError, match='use_sliding_window and sliding_windo'):
    hf_config.read(tmp_path)


@pytest.mark.parametrize('text', ['{', '', '[1]'])
def test_a_missing_or_broken_config_is_refused(tmp_path, text):
  with pytest.raises(ValueError, match=r'must hold a config\.json: got none'):
    hf_config.read(tmp_path)
  (tmp_path / 'config.json').write_text(text)
  with pytest.raises(ValueError, match=r'config\.json must (be|hold a) JSON'):
    hf_config.read(tmp_path)


def test_models_that_transformers_would_refuse_or_change_are_not_written():
  for cfg, message in (
    (
      dataclasses.replace(SMALL, local_layers=(0,), window=4),
      r'local_layers must be \(\) to be written as a Llama',
    ),
    (
      dataclasses.replace(SMALL, embed_dim=15),
      r'heads must divide embed_dim=15 to be written as a Llama',
    ),
    (
      dataclasses.replace(
        GEMMA, qk_norm=True, local_rope_theta=1e4, attention_softcap=5.0
      ),
      r'attention_softcap must be None to be written as a Gemma3',
    ),
  ):
    with pytest.raises(ValueError, match=message):
      hf_config.write(cfg)
  # Without local layers, nothing reads their base.
  full = dataclasses.replace(GEMMA, qk_norm=True, local_layers=(), window=None)
  text = hf_config.write(full)
  assert text['sliding_window'] == 4096
  assert set(text['layer_types']) == {'full_attention'}


def test_save_refuses_models_without_an_architecture_and_used_folders(
  written, tmp_path
):
  params = written[1]
  for change, message in (
    ({'post_norms': False}, 'model must be of one architecture'),
    ({'query_scale': None}, r'model\.query_scale must be 8\.0 to be written'),
  ):
    cfg = dataclasses.replace(GEMMA, **change)
    with pytest.raises(ValueError, match=message):
      hf.save(params, cfg, tmp_path / 'out')
  assert not (tmp_path / 'out').exists()
  with pytest.raises(ValueError, match='must be empty: got files'):
    hf.save(params, GEMMA, written[0])
  other = dataclasses.replace(GEMMA, window=5)
  with pytest.raises(ValueError, match='must describe the model to be saved'):
    hf.save(params, other, tmp_path / 'out', like=written[0])
