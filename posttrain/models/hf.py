"""Weights of HuggingFace directories <-> our tree, tensor by tensor.

1. A table maps each of our leaves to its tensors: one, or one per layer.
2. `load` checks all names, shapes and dtypes before it reads any weight; then
   it reads tensor by tensor into leaves that are allocated sharded.
3. `save` writes one tensor at a time to files of about a gibibyte, renames
   each file once it is complete, and writes the index and config.json last: an
   incomplete directory cannot be loaded.

Our kernels are [in, out], theirs [out, in]. Only safetensors: no pickle.
"""

import functools
import json
import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from posttrain import processes, schema, sharding, tree
from posttrain.models import hf_config, hf_files, transformer
from posttrain.util import disk, watchdog

SHARD_BYTES = 2**30  # size of a file, unless one tensor is larger
_LAYER = 'model.layers.{}.'
_NAMES = {
  'embed/table': 'model.embed_tokens.weight',
  'final_norm/scale': 'model.norm.weight',
  'head/kernel': 'lm_head.weight',
  'layers/attention_norm/scale': _LAYER + 'input_layernorm.weight',
  **{
    f'layers/attention/{x}/kernel': f'{_LAYER}self_attn.{x}_proj.weight'
    for x in 'qkvo'
  },
  **{
    f'layers/attention/{x}/bias': f'{_LAYER}self_attn.{x}_proj.bias'
    for x in 'qkv'
  },
  **{
    f'layers/attention/{x}_norm/scale': f'{_LAYER}self_attn.{x}_norm.weight'
    for x in 'qk'
  },
  **{
    f'layers/mlp/{x}/kernel': f'{_LAYER}mlp.{x}_proj.weight'
    for x in ('gate', 'up', 'down')
  },
}
# HuggingFace's name of the norm before the MLP, by `post_norms`.
_MLP_NORM = {
  False: {'layers/mlp_norm/scale': 'post_attention_layernorm'},
  True: {
    'layers/attention_post_norm/scale': 'post_attention_layernorm',
    'layers/mlp_norm/scale': 'pre_feedforward_layernorm',
    'layers/mlp_post_norm/scale': 'post_feedforward_layernorm',
  },
}


class Tensor(NamedTuple):
  """A tensor of a HuggingFace model, and its place in our tree."""

  path: str  # of our leaf
  layer: int | None  # index into its leading axis, if it is stacked
  shape: tuple[int, ...]  # in the file

  @property
  def transposed(self) -> bool:
    """Whether our leaf holds the transpose."""
    return self.path.endswith('kernel')


def tensors(cfg: schema.Model) -> dict[str, Tensor]:
  """Returns all tensors of a model by their HuggingFace names."""
  names = _NAMES | {
    path: f'{_LAYER}{name}.weight'
    for path, name in _MLP_NORM[cfg.post_norms].items()
  }
  by_name = {}
  for path, leaf in tree.flat(transformer.shapes(cfg)).items():
    stacked = path.startswith('layers/')
    shape = leaf.shape[1:] if stacked else leaf.shape
    shape = shape[::-1] if path.endswith('kernel') else shape
    for layer in range(cfg.layers) if stacked else (None,):
      by_name[names[path].format(layer)] = Tensor(path, layer, shape)
  return by_name


def load(
  folder: str | pathlib.Path, cfg: schema.Model, like: Any = None
) -> transformer.Params:
  """Reads the weights of a directory into parameters.

  Besides its devices' memory, the host holds at most two copies of one tensor.

  Args:
    folder: a folder with `config.json` and safetensors files.
    cfg: as from `hf_config.read`, with any dtype and remat.
    like: arrays or ShapeDtypeStructs of the parameters, with their dtypes and
      shardings; None = float32 on the default device.

  Raises:
    ValueError: names a tensor that is missing, unknown, of another shape, of
      a dtype other than float32, float16 and bfloat16, or not finite.
  """
  expected, like = tensors(cfg), like or transformer.shapes(cfg)
  files = check(folder, cfg)
  places = jax.tree.map(lambda x: x.sharding, like)

  def zeros():
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

  # Without shardings, the tree of them has no leaves.
  places = places if jax.tree.leaves(places) else None
  params = tree.flat(jax.jit(zeros, out_shardings=places)())
  for file, names in files.items():
    for name in names:  # no variable holds a tensor while the next is read
      path = expected[name].path
      params[path], finite = _fill(
        params[path], expected[name], hf_files.read(file, name)
      )
      watchdog.progress()
      if not finite:
        raise ValueError(
          f'{file}: tensor {name} must be finite in {params[path].dtype}: got '
          'NaN or infinity; download it again, or use other weights'
        )
  return jax.tree.unflatten(jax.tree.structure(like), params.values())


def check(folder: str | pathlib.Path, cfg: schema.Model) -> hf_files.Files:
  """Checks the headers of a directory's weights against a model.

  Returns:
    {file: names of its tensors}.

  Raises:
    ValueError: as `load`, unless a number is not finite.
  """
  return hf_files.find(pathlib.Path(folder), _shapes(tensors(cfg)))


def save(
  params: transformer.Params,
  cfg: schema.Model,
  folder: str | pathlib.Path,
  *,
  like: str | pathlib.Path | None = None,
  dtype: str = 'bfloat16',
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes a directory that HuggingFace tools can load.

  Args:
    params: the parameters; if they are on the devices of several processes,
      all call this, and the first one writes.
    cfg: the model, with `vocab_size` resolved.
    folder: a new or empty folder.
    like: the directory the model came from: its config.json, tokenizer, chat
      template and generation config are copied, and its tensors' dtypes kept.
    dtype: the tensors' dtype without `like`: float32, float16 or bfloat16.
    shard_bytes: size of a file, unless one tensor is larger.

  Raises:
    ValueError: `folder` is not empty, `like` is another model, or no
      architecture of HuggingFace's computes this one.
  """
  folder = pathlib.Path(folder)
  processes.on(0, lambda: check_empty(folder))
  expected, leaves = tensors(cfg), tree.flat(params)
  dtypes = dict.fromkeys(expected, jnp.dtype(dtype))
  if like is None:
    config = hf_config.write(cfg) | {'torch_dtype': dtype}
  else:
    check_like(like, cfg)
    dtypes = hf_files.dtypes(pathlib.Path(like), _shapes(expected))
  processes.on(0, lambda: folder.mkdir(parents=True, exist_ok=True))
  hf_files.write(
    folder,
    _shapes(expected),
    dtypes,
    lambda name: _host(leaves, expected[name], dtypes[name]),
    shard_bytes,
  )
  if not processes.is_first():
    return
  if like is None:
    with disk.replacing(folder / 'config.json') as file:
      json.dump(config, file, indent=2)
  else:
    _copy_rest(pathlib.Path(like), folder)


def check_empty(folder: pathlib.Path) -> None:
  """Raises ValueError unless a folder is new or empty."""
  if folder.exists() and not folder.is_dir():
    raise ValueError(f'{folder} must be a folder: got a file; name another')
  if folder.exists() and any(folder.iterdir()):
    raise ValueError(f'{folder} must be empty: got files; name a new folder')


def _shapes(expected: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
  return {name: tensor.shape for name, tensor in expected.items()}


def _fill(
  leaf: jax.Array, tensor: Tensor, array: np.ndarray
) -> tuple[jax.Array, bool]:
  """Writes a tensor into its leaf, which is donated.

  Returns:
    (leaf, whether all numbers of the tensor are finite in its dtype).
  """
  placed = sharding.put(array, _place(leaf, tensor))
  leaf = _put(leaf, placed, tensor.layer, tensor.transposed)
  finite = hf_files.is_finite(array, leaf.dtype)  # while the device works
  return jax.block_until_ready(leaf), finite


def _place(leaf: jax.Array, tensor: Tensor) -> jax.sharding.Sharding:
  """Returns a tensor's sharding that matches its leaf's."""
  if not isinstance(leaf.sharding, NamedSharding):
    return leaf.sharding
  spec = (*leaf.sharding.spec, *(None,) * leaf.ndim)[: leaf.ndim]
  spec = spec if tensor.layer is None else spec[1:]
  spec = spec[::-1] if tensor.transposed else spec
  return NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _put(leaf, array, layer, transposed):
  array = (array.T if transposed else array).astype(leaf.dtype)
  if layer is None:  # an update, so that the donated memory is reused
    return jax.lax.dynamic_update_slice(leaf, array, (0,) * leaf.ndim)
  return jax.lax.dynamic_update_index_in_dim(leaf, array, layer, 0)


def _host(leaves, tensor: Tensor, dtype) -> np.ndarray:
  """Returns a tensor in HuggingFace's layout, on the host."""
  leaf = leaves[tensor.path]
  place = getattr(leaf, 'sharding', None)
  if isinstance(place, NamedSharding):  # gathered in every process
    place = NamedSharding(place.mesh, PartitionSpec())
  array = _get(leaf, tensor.layer, tensor.transposed, dtype, place)
  return np.asarray(array.addressable_data(0))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _get(leaf, layer, transposed, dtype, place):
  """Slices, transposes and casts in one program, without temporaries."""
  if layer is not None:
    leaf = jax.lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False)
  array = (leaf.T if transposed else leaf).astype(dtype)
  if not isinstance(place, NamedSharding):
    return array
  return jax.lax.with_sharding_constraint(array, place)


def check_like(like: str | pathlib.Path, cfg: schema.Model) -> None:
  """Raises ValueError unless a directory's config.json describes `cfg`."""
  model = hf_config.read(like)
  for field in hf_config.differing(model, cfg):
    raise ValueError(
      f'{like}/config.json must describe the model to be saved: its {field} '
      f'is {getattr(model, field)!r}, expected {getattr(cfg, field)!r}; '
      'name another directory, or none'
    )


def _copy_rest(like: pathlib.Path, folder: pathlib.Path) -> None:
  """Copies the small files: config, tokenizer, templates, license."""
  for path in sorted(like.iterdir()):
    small = path.suffix in ('.json', '.jinja', '.model', '.txt', '.md')
    if path.is_file() and small and path.name != hf_files.INDEX:
      shutil.copyfile(path, folder / path.name)
