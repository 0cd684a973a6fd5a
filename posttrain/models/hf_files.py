"""Tensor files of HuggingFace directories: checks, reads, writes.

config.json                        the model: `hf_config`
model.safetensors, or model-00001-of-00002.safetensors, ...
model.safetensors.index.json       the file of each tensor, if several

Headers are compared with the model before a weight is read.
"""

import contextlib
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from posttrain import processes
from posttrain.util import disk

SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
DTYPES = {'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16'}
HEAD = 'lm_head.weight'
_CACHED = 2**18  # numbers whose copy stays in the processor's cache

Shapes = Mapping[str, tuple[int, ...]]
Dtypes = Mapping[str, np.dtype]
Files = dict[pathlib.Path, list[str]]


def find(folder: pathlib.Path, shapes: Shapes, single: str = SINGLE) -> Files:
  """Returns {file: names of its tensors} of a model; reads headers only.

  Args:
    folder: the directory.
    shapes: all tensors of the model, and no other.
    single: name of the one file; that of a model may be several, in an index.

  Raises:
    ValueError: names the file or the tensor that is missing, unknown,
      of another shape or of an unknown dtype.
  """
  paths, index = [folder / single], folder / INDEX
  if single == SINGLE and not paths[0].is_file() and index.is_file():
    files = disk.read_json_object(index).get('weight_map')
    if not isinstance(files, dict) or not files:
      raise ValueError(
        f"{index} must have a 'weight_map' of tensors to files: got {files!r}"
      )
    paths = [folder / file for file in sorted(set(files.values()))]
  files, present = {}, set()
  for path in paths:
    if not path.is_file():
      raise ValueError(
        f'{folder} must hold {path.name}: got none; download all safetensors '
        'files (other formats are not read)'
      )
    with _open(path) as file:
      # A tied head and RoPE's table are redundant.
      files[path] = [
        x
        for x in file.keys()
        if not (x == HEAD and x not in shapes)
        and not x.endswith('rotary_emb.inv_freq')
      ]
      for name in files[path]:
        _check(path, name, file.get_slice(name), shapes)
        present.add(name)
  missing = [name for name in shapes if name not in present]
  if missing:
    raise ValueError(
      f'{folder} must hold tensor {missing[0]}: got none, nor '
      f'{len(missing) - 1} others of the model that config.json describes'
    )
  return files


def names(path: pathlib.Path) -> set[str]:
  """Returns the names of the tensors in a file; none if there is no file."""
  if not path.is_file():
    return set()
  with _open(path) as file:
    return set(file.keys())


def read(path: pathlib.Path, name: str) -> np.ndarray:
  """Returns a tensor of a file.

  It opens the file anew: the library maps an open file into memory, and pages
  once read stay there until it is closed.
  """
  with _open(path) as file:
    return file.get_tensor(name)


def is_finite(array: np.ndarray, dtype: Any) -> bool:
  """Returns whether all numbers of a tensor are finite in a dtype.

  Without their signs, the bits of floats are ordered as their absolute values
  are, with infinity and then NaN above all: the largest decides.

  Args:
    array: float32, float16 or bfloat16, in one piece of memory.
    dtype: the dtype that the tensor is used in.
  """
  bits = array.reshape(-1).view(f'u{array.itemsize}')
  unsigned = np.asarray(np.iinfo(bits.dtype).max >> 1, bits.dtype)
  chunks = range(0, bits.size, _CACHED)
  largest = max(np.max(bits[i : i + _CACHED] & unsigned) for i in chunks)
  with np.errstate(over='ignore'):
    largest = np.asarray(largest, bits.dtype).view(array.dtype).astype(dtype)
  return bool(np.isfinite(largest))


def dtypes(folder: pathlib.Path, shapes: Shapes) -> dict[str, np.dtype]:
  """Returns the dtype of each tensor; raises as `find` does."""
  by_name = {}
  for path, names in find(folder, shapes).items():
    with _open(path) as file:
      for name in names:
        by_name[name] = jnp.dtype(DTYPES[file.get_slice(name).get_dtype()])
  return by_name


def write(
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
  size = {
    name: math.prod(shape) * dtypes[name].itemsize
    for name, shape in shapes.items()
  }
  index, shards = {}, list(_shards(size, shard_bytes))
  for number, names in enumerate(shards, 1):
    file = f'model-{number:05}-of-{len(shards):05}.safetensors'
    file = file if len(shards) > 1 else SINGLE
    # Larger dtypes first, as the library does: each number is then aligned to
    # its size.
    names.sort(key=lambda name: -dtypes[name].itemsize)
    write_file(folder / file, {x: shapes[x] for x in names}, dtypes, get)
    index |= dict.fromkeys(names, file)
  if len(shards) > 1:
    total = {'total_size': sum(size.values())}
    text = {'metadata': total, 'weight_map': index}
    if not processes.is_first():
      return
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


@contextlib.contextmanager
def _open(path: pathlib.Path):
  """Opens a file; errors of the library name it."""
  try:
    with safetensors.safe_open(path, 'numpy') as file:
      yield file
  except (safetensors.SafetensorError, OSError) as error:
    raise ValueError(
      f'{path} must be a whole safetensors file: {error}; download it again'
    ) from error


def _shards(size: Mapping[str, int], shard_bytes: int) -> Iterator[list[str]]:
  """Yields the tensors of each file, in order."""
  names, total = [], 0
  for name, nbytes in size.items():
    if names and total + nbytes > shard_bytes:
      yield names
      names, total = [], 0
    names.append(name)
    total += nbytes
  yield names


def _check(path: pathlib.Path, name: str, part, shapes: Shapes) -> None:
  if name not in shapes:
    raise ValueError(
      f'{path}: tensor {name!r} must belong to the model: '
      'config.json describes one without it'
    )
  shape, dtype = tuple(part.get_shape()), part.get_dtype()
  if shape != shapes[name]:
    raise ValueError(
      f'{path}: tensor {name} must have shape {shapes[name]}, by '
      f'config.json: got {shape}'
    )
  if dtype not in DTYPES:
    raise ValueError(
      f'{path}: tensor {name} must be of dtype {", ".join(DTYPES)}: got '
      f'{dtype}; quantized weights are not read'
    )
