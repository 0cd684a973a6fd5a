"""Weights of HuggingFace directories <-> our tree, tensor by tensor.

1. A table gives each of our leaves its tensors: one, or one per layer.
2. `load` checks all names, shapes and dtypes before it reads any weight; then
   each tensor goes alone to its place in a leaf that lies sharded already.
3. `save` makes one tensor at a time for files of about a gibibyte, which have
   their names once they are whole, and writes the index and config.json last:
   a directory that is not whole is not loadable.

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

from posttrain import schema, tree
from posttrain.models import hf_config, hf_files, transformer

SHARD_BYTES = 2**30  # of a file that `save` writes, unless one tensor is larger
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
# The norm before the MLP is called after what stands before it, or after what
# stands behind it where attention has a norm of its own behind.
_MLP_NORM = {
  False: {'layers/mlp_norm/scale': 'post_attention_layernorm'},
  True: {
    'layers/attention_post_norm/scale': 'post_attention_layernorm',
    'layers/mlp_norm/scale': 'pre_feedforward_layernorm',
    'layers/mlp_post_norm/scale': 'post_feedforward_layernorm',
  },
}


class Tensor(NamedTuple):
  """One of theirs, and where it lies in ours."""

  path: str  # of our leaf
  layer: int | None  # index into its leading axis, if it is stacked
  shape: tuple[int, ...]  # theirs

  @property
  def transposed(self) -> bool:
    return self.path.endswith('kernel')


def tensors(cfg: schema.Model) -> dict[str, Tensor]:
  """Returns all tensors of a model by their HuggingFace names."""
  names = _NAMES | {
    path: f'{_LAYER}{name}.weight'
    for path, name in _MLP_NORM[cfg.post_norms].items()
  }
  found = {}
  for path, leaf in tree.flat(transformer.shapes(cfg)).items():
    stacked = path.startswith('layers/')
    shape = leaf.shape[1:] if stacked else leaf.shape
    shape = shape[::-1] if path.endswith('kernel') else shape
    for layer in range(cfg.layers) if stacked else (None,):
      found[names[path].format(layer)] = Tensor(path, layer, shape)
  return found


def load(
  folder: str | pathlib.Path, cfg: schema.Model, like: Any = None
) -> transformer.Params:
  """Reads the weights of a directory into parameters.

  At any time the host holds one tensor, twice at most, besides what lies on its
  own devices.

  Args:
    folder: of `config.json` and safetensors files.
    cfg: as `hf_config.read` gives it, with any dtype and remat.
    like: arrays or ShapeDtypeStructs of the parameters, with their dtypes and
      shardings; None = float32 on the default device.

  Raises:
    ValueError: names a tensor that is missing, unknown, of another shape, or
      of a dtype other than float32, float16 and bfloat16.
  """
  expected, like = tensors(cfg), like or transformer.shapes(cfg)
  files = hf_files.find(pathlib.Path(folder), _theirs(expected))
  places = jax.tree.map(lambda x: x.sharding, like)

  def zeros():
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

  # A tree without a sharding has no leaves: it says nothing.
  places = places if jax.tree.leaves(places) else None
  params = tree.flat(jax.jit(zeros, out_shardings=places)())
  for file, names in files.items():
    for name in names:  # no variable keeps one tensor while the next is read
      path = expected[name].path
      params[path] = _fill(
        params[path], expected[name], hf_files.read(file, name)
      )
  return jax.tree.unflatten(jax.tree.structure(like), params.values())


def save(
  params: transformer.Params,
  cfg: schema.Model,
  folder: str | pathlib.Path,
  *,
  like: str | pathlib.Path | None = None,
  dtype: str = 'bfloat16',
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes a directory that HuggingFace tools load.

  Args:
    params: the parameters.
    cfg: the model, with `vocab_size` resolved.
    folder: a new or an empty one.
    like: the directory the model came from: its config.json, tokenizer, chat
      template and generation config are copied, and its tensors' dtypes kept.
    dtype: of the tensors, without `like`: float32, float16 or bfloat16.
    shard_bytes: of a file, unless one tensor is larger.

  Raises:
    ValueError: `folder` is not empty, `like` is another model, or no
      architecture computes this one.
  """
  folder = pathlib.Path(folder)
  check_empty(folder)
  expected, leaves = tensors(cfg), tree.flat(params)
  dtypes = dict.fromkeys(expected, jnp.dtype(dtype))
  if like is None:
    config = hf_config.write(cfg) | {'torch_dtype': dtype}
  else:
    check_like(like, cfg)
    dtypes = hf_files.dtypes(pathlib.Path(like), _theirs(expected))
  folder.mkdir(parents=True, exist_ok=True)
  hf_files.write(
    folder,
    _theirs(expected),
    dtypes,
    lambda name: _host(leaves, expected[name], dtypes[name]),
    shard_bytes,
  )
  if like is None:
    (folder / 'config.json').write_text(json.dumps(config, indent=2))
  else:
    _copy_rest(pathlib.Path(like), folder)


def check_empty(folder: pathlib.Path) -> None:
  """Raises ValueError if there is something to be overwritten."""
  if folder.exists() and not folder.is_dir():
    raise ValueError(f'{folder} must be a folder: got a file; name another')
  if folder.exists() and any(folder.iterdir()):
    raise ValueError(f'{folder} must be empty: got files; name a new folder')


def _theirs(expected: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
  return {name: tensor.shape for name, tensor in expected.items()}


def _fill(leaf: jax.Array, tensor: Tensor, array: np.ndarray) -> jax.Array:
  """Puts a tensor into its leaf, which is given up."""
  array = jax.device_put(array, _place(leaf, tensor))
  return jax.block_until_ready(
    _put(leaf, array, tensor.layer, tensor.transposed)
  )


def _place(leaf: jax.Array, tensor: Tensor) -> jax.sharding.Sharding | None:
  """How a tensor has to lie to be put into its leaf without moving."""
  if not isinstance(leaf.sharding, NamedSharding):
    return leaf.sharding
  spec = (*leaf.sharding.spec, *(None,) * leaf.ndim)[: leaf.ndim]
  spec = spec if tensor.layer is None else spec[1:]
  spec = spec[::-1] if tensor.transposed else spec
  return NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _put(leaf, array, layer, transposed):
  array = (array.T if transposed else array).astype(leaf.dtype)
  if layer is None:  # an update too: the leaf's memory serves the result
    return jax.lax.dynamic_update_slice(leaf, array, (0,) * leaf.ndim)
  return jax.lax.dynamic_update_index_in_dim(leaf, array, layer, 0)


def _host(leaves, tensor: Tensor, dtype) -> np.ndarray:
  """A tensor as they want it."""
  leaf = leaves[tensor.path]
  return np.asarray(_get(leaf, tensor.layer, tensor.transposed, dtype))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _get(leaf, layer, transposed, dtype):
  """One program, so that nothing between leaf and result is ever stored."""
  if layer is not None:
    leaf = jax.lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False)
  return (leaf.T if transposed else leaf).astype(dtype)


def check_like(like: str | pathlib.Path, cfg: schema.Model) -> None:
  """Raises ValueError unless a directory is of this model."""
  theirs = hf_config.read(like)
  for field in hf_config.differing(theirs, cfg):
    raise ValueError(
      f'{like}/config.json must describe the model to be saved: its {field} '
      f'is {getattr(theirs, field)!r}, expected {getattr(cfg, field)!r}; '
      'name another directory, or none'
    )


def _copy_rest(like: pathlib.Path, folder: pathlib.Path) -> None:
  """Copies the small files: config, tokenizer, templates, licence."""
  for path in sorted(like.iterdir()):
    small = path.suffix in ('.json', '.jinja', '.model', '.txt', '.md')
    if path.is_file() and small and path.name != hf_files.INDEX:
      shutil.copyfile(path, folder / path.name)
