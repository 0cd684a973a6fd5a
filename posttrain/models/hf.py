"""HuggingFace directories <-> our tree, tensor by tensor.

config.json                        the model: `hf_config`
model.safetensors, or model-00001-of-00002.safetensors, ...
model.safetensors.index.json       the file of each tensor, if several

1. A table maps each of our leaves to its tensors: one, or one per layer.
2. `load` compares the files' headers with the model before it reads any weight
   (`find`); then it reads tensor by tensor into leaves that are allocated
   sharded.
3. `save` writes one tensor at a time to files of about a gibibyte, renames
   each file once it is complete, and writes the index and config.json last: an
   incomplete directory cannot be loaded.

Our kernels are [in, out], theirs [out, in]. Only safetensors: no pickle. Of
packed tensors MXFP4 is read, as bfloat16.
"""

import contextlib
import functools
import json
import math
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax.sharding import NamedSharding, PartitionSpec

from posttrain import processes, schema, sharding, tree
from posttrain.models import families, hf_config, layers, lora, transformer
from posttrain.ops import quantized
from posttrain.util import disk, errors, hub, watchdog

SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
DTYPES = {'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16'}
# Tensors of an MXFP4 matrix [E, in, out]: pairs of numbers u8[E, out, G, 16],
# the first one in the low bits, and exponents u8[E, out, G], with G = in / 32.
BLOCKS, SCALES = '_blocks', '_scales'
# The numbers of 4 bits, 1 + 2 + 1.
_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SHARD_BYTES = 2**30  # size of a file, unless one tensor is larger
Shapes = Mapping[str, tuple[int, ...]]
Dtypes = Mapping[str, np.dtype]


class Tensor(NamedTuple):
  """A tensor of a HuggingFace model, and its place in our tree."""

  # Our leaves; with several, the tensor has their outputs one after the other.
  paths: tuple[str, ...]
  index: tuple[int, ...]  # into their leading axes, if they are stacked
  shape: tuple[int, ...]  # in the file
  # The output of ours, all leaves together, that each of the file's is; None =
  # they have one order.
  order: np.ndarray | None = None
  transposed: bool = False  # whether our leaves hold the transpose

  @property
  def outputs(self) -> int:
    """The axis of outputs in the file."""
    return -2 if self.transposed else -1


Folder = str | pathlib.Path | None


def tensors(
  cfg: schema.Model, reward: bool = False, folder: Folder = None
) -> dict[str, Tensor]:
  """Returns all tensors of a model by their HuggingFace names.

  Args:
    cfg: the model.
    reward: whether it is a reward model, without a language model's head.
    folder: a directory, whose family names them; None = the family as which
      the model is written.
  """
  all_shapes = transformer.reward_shapes if reward else transformer.shapes
  family = hf_config.family_of(folder) if folder else hf_config.best_family(cfg)
  names = {
    **families.NAMES,
    **families.NORMS[cfg.pre_norms, cfg.post_norms],
    **family.names,
  }
  if folder and family.joined:
    files = filter(pathlib.Path.is_file, _paths(folder, SINGLE))
    known = {re.sub(r'\d+', '{}', x) for y in files for x in tensor_names(y)}
    if known & {*family.joined.values()}:
      names |= family.joined
  by_name, kinds, order = {}, layers.kinds(cfg), [*names]
  for path, leaf in tree.flat(all_shapes(cfg)).items():
    # Layers of several sizes have the same names.
    named, places = re.sub('(global|query)_', '', path), [((), ())]
    if path.startswith('layers/'):
      owners = layers.owners(kinds, path.split('/')[1])
      places = [((place,), (i,)) for place, i in enumerate(owners)]
      if names[named].count('{}') > 1:
        places = [
          ((*place, expert), (*numbers, expert))
          for place, numbers in places
          for expert in range(leaf.shape[1])
        ]
    shape = leaf.shape[len(places[0][0]) :]
    transposed = path.endswith(('kernel', 'taps')) and len(shape) > 1
    transposed &= not (family.alternates and len(shape) > 2)
    if transposed:
      shape = (*shape[:-2], shape[-1], shape[-2])
    shape = (shape[0], 1, shape[1]) if path.endswith('taps') else shape
    shape = (1, *shape) if path == 'reward/kernel' else shape
    for index, numbers in places:
      name = names[named].format(*numbers)
      paths, whole = (path,), list(shape)
      axis = 0 if path.endswith('taps') else -2 if transposed else -1
      if name in by_name:
        before = by_name[name]
        paths = tuple(sorted((*before.paths, path), key=order.index))
        whole[axis] += before.shape[axis]
      rows = _order(cfg, paths, whole[axis], family.alternates)
      by_name[name] = Tensor(paths, index, tuple(whole), rows, transposed)
  return by_name


def _order(
  cfg: schema.Model, paths: tuple[str, ...], size: int, alternates: bool
) -> np.ndarray | None:
  """Returns `Tensor.order`: ours is by key heads in a delta layer's leaves.

  A tensor of several leaves has for each key head its part of each leaf. One of
  all queries, keys and values has one after the other. With `alternates`, gate
  and up of experts take turns.
  """
  sizes, every = cfg.delta, np.arange(size)
  if alternates and len(paths) > 1:
    return every.reshape(2, -1).T.reshape(-1)
  if not paths[0].startswith('layers/delta/'):
    return None
  if len(paths) > 1:  # the leaves are qkv and z, or b and a
    values = sizes.value_heads * sizes.value_dim
    first = size - values if paths[0].endswith('qkv/kernel') else size // 2
    parts = (x.reshape(sizes.key_heads, -1) for x in np.split(every, [first]))
    return np.concatenate([*parts], axis=1).reshape(-1)
  if not paths[0].endswith(('qkv/kernel', 'taps')):
    return None
  heads = every.reshape(sizes.key_heads, -1)
  parts = np.split(heads, (sizes.key_dim, 2 * sizes.key_dim), axis=1)
  return np.concatenate([x.reshape(-1) for x in parts])


def shapes(
  cfg: schema.Model, reward: bool = False, folder: Folder = None
) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of `tensors` by their names."""
  return {x: tensor.shape for x, tensor in tensors(cfg, reward, folder).items()}


def load(
  folder: str | pathlib.Path, cfg: schema.Model, like: Any = None
) -> transformer.Params:
  """Reads the weights of a directory into parameters.

  Besides its devices' memory, the host holds at most two copies of one tensor.

  Args:
    folder: a folder with `config.json` and safetensors files.
    cfg: as from `hf_config.read`, with any dtype and remat.
    like: arrays or ShapeDtypeStructs of the parameters, with their dtypes and
      shardings; quantized ones are quantized tensor by tensor; None = float32
      on the default device.

  Raises:
    ValueError: as `find`; or a number is not finite.
  """
  expected, like = tensors(cfg, folder=folder), like or transformer.shapes(cfg)
  files = find(folder, shapes(cfg, folder=folder))
  places = jax.tree.map(lambda x: x.sharding, like)
  zeros = functools.partial(jax.tree.map, jnp.zeros_like, like)
  # Without shardings, the tree of them has no leaves.
  places = places if jax.tree.leaves(places) else None
  params = lora.matrices(jax.jit(zeros, out_shardings=places)())
  for name, (file, _) in files.items():
    tensor = expected[name]
    # No variable holds a tensor while the next one is read.
    finite = _put(params, tensor, read_tensor(file, name))
    watchdog.progress()
    if not finite:
      raise ValueError(
        f'{file}: tensor {name} must be finite in '
        f'{params[tensor.paths[0]].dtype}: got NaN or '
        'infinity'
      )
  structure = jax.tree.structure(like, is_leaf=lora.is_matrix)
  return jax.tree.unflatten(structure, params.values())


def _put(params: dict[str, Any], tensor: Tensor, array: np.ndarray) -> bool:
  """Writes a tensor into its leaves, by path; returns whether all is finite."""
  lead, flags = len(tensor.index), []
  if tensor.paths[0].endswith('taps'):
    array = array.squeeze(1)
  if tensor.order is not None:
    array = np.take(array, np.argsort(tensor.order), tensor.outputs)
  ends = np.cumsum([params[path].shape[-1] for path in tensor.paths])[:-1]
  parts = np.split(array, ends, tensor.outputs)
  for path, part in zip(tensor.paths, parts, strict=True):
    leaf = params[path]
    # The tensor is placed as its slice of the leaf is.
    place = leaf.sharding
    if isinstance(place, NamedSharding):
      spec = (*place.spec, *(None,) * leaf.ndim)[lead : leaf.ndim]
      if tensor.transposed:
        spec = *spec[:-2], spec[-1], spec[-2]
      place = NamedSharding(place.mesh, PartitionSpec(*spec))
    part = sharding.put(part, place)
    args = leaf, part, tensor.index, tensor.transposed
    params[path], finite = _update(*args)
    flags.append(finite)
  return all(flags)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _update(leaf, array, index, transposed):
  """Writes a matrix into a leaf; returns it and whether all is finite."""
  array = array.mT if transposed else array
  array = quantized.cast(array, leaf)
  finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(array)]
  start = (*index, *(0,) * (leaf.ndim - len(index)))

  def write(leaf, array):
    array = array.reshape((1,) * len(index) + array.shape)
    return jax.lax.dynamic_update_slice(leaf, array, start)

  return jax.tree.map(write, leaf, array), jnp.stack(finite).all()


def save(
  params: transformer.Params,
  cfg: schema.Model,
  folder: str | pathlib.Path,
  *,
  like: str | pathlib.Path | None = None,
  dtype: str = 'bfloat16',
  shard_bytes: int = SHARD_BYTES,
  pad_id: int | None = None,
) -> None:
  """Writes a directory that HuggingFace tools can load.

  A reward model becomes a sequence classification with one label, its value at
  the last token.

  Args:
    params: the parameters; if they are on the devices of several processes,
      all call this, and the first one writes.
    cfg: the model, with `vocab_size` resolved.
    folder: a new or empty folder.
    like: the directory the model came from: its config.json, tokenizer, chat
      template and generation config are copied, and its tensors' dtypes kept.
    dtype: the tensors' dtype without `like`: float32, float16 or bfloat16.
    shard_bytes: size of a file, unless one tensor is larger.
    pad_id: the id after the last token of a reward model's row.

  Raises:
    ValueError: `folder` is not empty, `like` is another model, or no
      architecture of HuggingFace's computes this one.
  """
  folder = pathlib.Path(folder)
  processes.on(0, lambda: check_empty(folder))
  reward, leaves = 'reward' in params, tree.flat(params)
  # A reward model has the text's part of a nested config alone.
  if reward and like is not None and hf_config.family_of(like).nested:
    check_like(like, cfg)
    like = None
  expected = tensors(cfg, reward, like)
  dtypes, kept, files = dict.fromkeys(expected, jnp.dtype(dtype)), {}, {}
  if like is None:
    config = hf_config.write(cfg) | {'torch_dtype': dtype}
  else:
    check_like(like, cfg)
    kept = {} if reward else others(like)
    files = find(like, shapes(cfg, folder=like) | kept)
    dtypes |= {x: jnp.dtype(DTYPES[code]) for x, (_, code) in files.items()}
  processes.on(0, lambda: folder.mkdir(parents=True, exist_ok=True))

  def get(name):
    """Returns a tensor in HuggingFace's layout, on the host."""
    if name in kept:
      return read_tensor(files[name][0], name)
    tensor, parts = expected[name], []
    for leaf in map(leaves.get, tensor.paths):
      mesh = getattr(getattr(leaf, 'sharding', None), 'mesh', None)
      # Gathered in every process.
      place = mesh and NamedSharding(mesh, PartitionSpec())
      array = _get(leaf, tensor.index, tensor.transposed, dtypes[name], place)
      parts.append(np.asarray(array.addressable_data(0)))
    axis = tensor.outputs
    array = np.concatenate(parts, axis) if len(parts) > 1 else parts[0]
    if tensor.order is not None:
      array = np.take(array, tensor.order, axis)
    return array.reshape(tensor.shape)

  all_shapes = shapes(cfg, reward, like) | kept
  write_shards(folder, all_shapes, dtypes, get, shard_bytes)
  if not processes.is_first():
    return
  if like is not None:
    # The small files: config, tokenizer, templates, license.
    for path in sorted(pathlib.Path(like).iterdir()):
      small = path.suffix in ('.json', '.jinja', '.model', '.txt', '.md')
      if path.is_file() and small and path.name != INDEX:
        shutil.copyfile(path, folder / path.name)
    config = disk.read_json_object(folder / 'config.json')
    if config.pop('quantization_config', None) is None and not reward:
      return
  if reward:
    (kind,) = config['architectures']
    text = 'Text' * config['model_type'].endswith('_text')
    kind = kind.replace('ForCausalLM', f'{text}ForSequenceClassification')
    config |= {'architectures': [kind], 'id2label': {'0': 'LABEL_0'}}
    config['pad_token_id'] = pad_id
  with disk.replacing(folder / 'config.json') as file:
    json.dump(config, file, indent=2)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _get(leaf, index, transposed, dtype, place):
  """Slices, transposes and casts in one program, without temporaries."""
  for i in index:
    leaf = jax.lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False)
  array = leaf.mT if transposed else leaf
  array = array.astype(dtype)
  return jax.lax.with_sharding_constraint(array, place) if place else array


def check_empty(folder: pathlib.Path) -> None:
  """Raises ValueError unless a folder is new or empty."""
  if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
    raise ValueError(f'{folder} must be a new or empty folder: got files')


def check_like(like: str | pathlib.Path, cfg: schema.Model) -> None:
  """Raises ValueError unless a directory's config.json describes `cfg`."""
  what = f'{like}/config.json must describe the model to be saved'
  hf_config.check_same(hf_config.read(like), cfg, what)


def find(
  folder: str | pathlib.Path, shapes: Shapes, single: str = SINGLE
) -> dict[str, tuple[pathlib.Path, str]]:
  """Returns {name: (file, code of its dtype)} of the tensors in a directory.

  Reads headers only. A tied head and RoPE's table are redundant and left out,
  and so are `others`.

  Args:
    folder: the directory.
    shapes: all tensors of the model, and no other.
    single: name of the one file; that of a model may be several, in an index.

  Raises:
    ValueError: names the file or the tensor that is missing, unknown,
      of another shape or of a dtype that is not in `DTYPES`.
  """
  files = {}
  for path in _paths(folder, single):
    if not path.is_file():
      raise ValueError(
        f'{path} must be there'
        f'{f", as {INDEX} lists it" * (path.name != single)}: got no such '
        'file, as after an interrupted download; `hf download '
        f'{hub.id_of(str(folder)) or f"OWNER/NAME --local-dir {folder}"}` '
        'fetches the rest'
      )
    with _open(path) as file:
      for name in file.keys():
        if name not in shapes and re.search(families.UNUSED, name):
          continue
        part = file.get_slice(name)
        shape, dtype = tuple(part.get_shape()), part.get_dtype()
        stem = name.removesuffix(BLOCKS)
        if stem != name and dtype == 'U8' and shape[3:] == (16,):
          name, dtype = stem, 'BF16'
          shape = shape[0], 32 * shape[2], shape[1]
        elif name.removesuffix(SCALES) in shapes and dtype == 'U8':
          continue
        if shape != shapes.get(name) or dtype not in DTYPES:
          raise ValueError(
            f'{path}: tensor {name} must have the shape of the model in '
            f'config.json, {shapes.get(name)}, and a dtype of {[*DTYPES]}: got '
            f'{shape} of {dtype}'
          )
        files[name] = path, dtype
  if missing := [name for name in shapes if name not in files]:
    raise ValueError(
      f'{folder} must hold all tensors of the model in config.json: '
      f'{len(missing)} are missing, such as {missing[0]}'
    )
  return files


def others(folder: str | pathlib.Path) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of a directory's tensors that are not the model's."""
  shapes = {}
  for path in _paths(folder, SINGLE):
    with _open(path) as file:
      for name in file.keys():
        if re.match(families.OTHERS, name):
          shapes[name] = tuple(file.get_slice(name).get_shape())
  return shapes


def _paths(folder: str | pathlib.Path, single: str) -> list[pathlib.Path]:
  """Returns the files of a directory's tensors, which may be missing."""
  folder = pathlib.Path(folder)
  index = folder / INDEX
  if single == SINGLE and not (folder / single).is_file() and index.is_file():
    parts = disk.read_json_object(index).get('weight_map', {}).values()
    return [folder / part for part in sorted({*parts})]
  return [folder / single]


def tensor_names(path: pathlib.Path) -> list[str]:
  """Returns the names of the tensors in a file."""
  with _open(path) as file:
    return list(file.keys())


def read_tensor(path: pathlib.Path, name: str) -> np.ndarray:
  """Returns a tensor of a file.

  It opens the file anew: the library maps an open file into memory, and pages
  once read stay there until it is closed.
  """
  with _open(path) as file:
    if name in file.keys():
      return file.get_tensor(name)
    blocks = file.get_tensor(name + BLOCKS)
  index, place = path.with_name(INDEX), path
  if index.is_file():
    files = disk.read_json_object(index)['weight_map']
    place = path.with_name(files[name + SCALES])
  with _open(place) as file:
    scales = file.get_tensor(name + SCALES)
  return unpack(blocks, scales)


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Returns an MXFP4 matrix, see `BLOCKS`, as bfloat16 [E, in, out]: exact."""
  values = np.concatenate((_FP4, -_FP4)).astype(jnp.bfloat16)
  pairs = np.stack((values[blocks & 15], values[blocks >> 4]), axis=-1)
  factors = np.ldexp(np.float32(1), scales[..., None].astype(np.int32) - 127)
  rows = pairs.reshape(*scales.shape, 32) * factors.astype(jnp.bfloat16)
  return rows.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


@contextlib.contextmanager
def _open(path: pathlib.Path):
  """Opens a file; errors of the library name it."""
  try:
    with safetensors.safe_open(path, 'numpy') as file:
      yield file
  except (safetensors.SafetensorError, OSError) as error:
    raise ValueError(
      f'{path} must be a whole safetensors file: {error}{errors.pointer(path)}'
    ) from error


def write_shards(
  folder: pathlib.Path,
  shapes: Shapes,
  dtypes: Dtypes,
  get: Callable[[str], np.ndarray],
  shard_bytes: int,
) -> None:
  """Writes all tensors, one at a time, and then the index if there is one.

  Args:
    folder: the directory.
    shapes: all tensors, in their order.
    dtypes: each tensor's dtype: float32, float16 or bfloat16.
    get: returns a tensor by name; called once for each.
    shard_bytes: size of a file, unless one tensor is larger.
  """
  shards, total, room = [], 0, 0
  for name, shape in shapes.items():
    size = math.prod(shape) * dtypes[name].itemsize
    if not shards or size > room:
      shards.append([])
      room = shard_bytes
    shards[-1].append(name)
    total, room = total + size, room - size
  index = {}
  for number, names in enumerate(shards, 1):
    file = f'model-{number:05}-of-{len(shards):05}.safetensors'
    file = file if len(shards) > 1 else SINGLE
    # Larger dtypes first, as the library does: each number is then aligned to
    # its size.
    names.sort(key=lambda name: -dtypes[name].itemsize)
    write_file(folder / file, {x: shapes[x] for x in names}, dtypes, get)
    index |= dict.fromkeys(names, file)
  if len(shards) > 1 and processes.is_first():
    text = {'metadata': {'total_size': total}, 'weight_map': index}
    with disk.replacing(folder / INDEX) as file:
      json.dump(text, file, indent=2)


def write_file(
  path: pathlib.Path,
  shapes: Shapes,
  dtypes: Dtypes,
  get: Callable[[str], np.ndarray],
) -> None:
  """Writes a safetensors file, under another name until it is complete.

      u64 n | n bytes of JSON, with spaces up to a multiple of 8 | the buffers

  All is little-endian, as are the machines that jax runs on.

  Args:
    path: the file.
    shapes: its tensors, in their order.
    dtypes: each tensor's dtype.
    get: returns a tensor by name; called once for each, by all processes of a
      run, of which the first one writes.
  """
  if not processes.is_first():
    for name in shapes:
      get(name)
    return
  codes = {jnp.dtype(dtype): code for code, dtype in DTYPES.items()}
  header, end = {'__metadata__': {'format': 'pt'}}, 0
  for name, shape in shapes.items():
    start, end = end, end + math.prod(shape) * dtypes[name].itemsize
    header[name] = {
      'dtype': codes[dtypes[name]],
      'shape': list(shape),
      'data_offsets': [start, end],
    }
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)
  with disk.replacing(path, 'xb') as file:
    file.write(len(text).to_bytes(8, 'little') + text)
    for name, shape in shapes.items():
      array = get(name)
      assert (array.shape, array.dtype) == (shape, dtypes[name]), name
      # As bytes: bfloat16 has no buffer protocol.
      file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
      del array  # frees it before the next `get`
