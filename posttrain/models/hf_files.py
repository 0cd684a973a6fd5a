"""The tensors of a HuggingFace directory: found, checked, read one by one.

    config.json                        the model: `hf_config`
    model.safetensors, or model-00001-of-00002.safetensors, ...
    model.safetensors.index.json       which file has which tensor, if several
"""

import json
import pathlib
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np
import safetensors

INDEX = 'model.safetensors.index.json'
DTYPES = {'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16'}

Shapes = Mapping[str, tuple[int, ...]]
Files = dict[pathlib.Path, list[str]]


def find(folder: pathlib.Path, shapes: Shapes) -> Files:
  """Returns which tensors of which file to read; no weight is read yet.

  Args:
    folder: the directory.
    shapes: all tensors that the model has, and no other.

  Raises:
    ValueError: names the file or the tensor that is missing, unknown, of
      another shape or of an odd dtype.
  """
  index = folder / INDEX
  paths = [folder / 'model.safetensors']
  if index.is_file():
    weight_map = json.loads(index.read_text())['weight_map']
    paths = [folder / file for file in sorted(set(weight_map.values()))]
  files = {}
  for path in paths:
    if not path.is_file():
      raise ValueError(
          f'{folder} must hold {path.name}: got none; download all safetensors '
          'files (other formats are not read)'
      )
    with safetensors.safe_open(path, 'numpy') as file:
      files[path] = [x for x in file.keys() if not _ignored(x, shapes)]
      for name in files[path]:
        _check(path, name, file.get_slice(name), shapes)
  found = {name for names in files.values() for name in names}
  missing = [name for name in shapes if name not in found]
  if missing:
    raise ValueError(
        f'{folder} must hold tensor {missing[0]}: got none, nor '
        f'{len(missing) - 1} others of the model that config.json describes'
    )
  return files


def read(files: Files) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the tensors, one at a time."""
  for path, names in files.items():
    with safetensors.safe_open(path, 'numpy') as file:
      for name in names:
        yield name, file.get_tensor(name)


def dtypes(folder: pathlib.Path, shapes: Shapes) -> dict[str, np.dtype]:
  """Returns the dtype of each tensor; raises as `find` does."""
  found = {}
  for path, names in find(folder, shapes).items():
    with safetensors.safe_open(path, 'numpy') as file:
      for name in names:
        found[name] = jnp.dtype(DTYPES[file.get_slice(name).get_dtype()])
  return found


def _ignored(name: str, shapes: Shapes) -> bool:
  """Whether a tensor says what config.json says already."""
  tied_head = name == 'lm_head.weight' and name not in shapes
  return tied_head or name.endswith('rotary_emb.inv_freq')


def _check(path: pathlib.Path, name: str, part, shapes: Shapes) -> None:
  if name not in shapes:
    raise ValueError(
        f'{path}: tensor {name} must belong to the model that config.json '
        'describes: it does not'
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
