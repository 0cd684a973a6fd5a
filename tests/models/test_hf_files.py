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
  assert any(tmp_path.glob('*.partial'))
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
      'tensor extra must belong to the model',
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
  ],
)
def test_an_unsupported_config_is_refused_by_key(copy, key, value, message):
  path = copy / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
  with pytest.raises(ValueError, match=message) as error:
    hf_config.read(copy)
  assert str(path) in str(error.value)


def test_a_missing_or_broken_config_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r'must hold a config\.json: got none'):
    hf_config.read(tmp_path)
  (tmp_path / 'config.json').write_text('{')
  with pytest.raises(ValueError, match=r'config\.json must be JSON'):
    hf_config.read(tmp_path)


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
