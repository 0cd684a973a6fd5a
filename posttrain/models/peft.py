"""LoRA adapters <-> directories of the PEFT library, tensor by tensor.

    adapter_config.json         rank, alpha, target modules, the base's name
    adapter_model.safetensors   per adapted matrix lora_A [R, in] and
                                lora_B [out, R]: our A and B, transposed;
                                lora_magnitude_vector [out], of DoRA

Names of matrices are those of the base's HuggingFace directory, see `hf`.
"""

import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from posttrain import schema, tree
from posttrain.models import hf, lora, transformer
from posttrain.util import disk

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
# Keys that may have any value: they do not change W', or are read.
_FREE = (
  'auto_mapping base_model_name_or_path eva_config exclude_modules '
  'inference_mode layers_pattern lora_alpha lora_dropout megatron_config '
  'megatron_core peft_version qalora_group_size r revision runtime_config '
  'target_modules task_type use_dora use_rslora'
).split()
# Values of other keys that leave the base weights as they are.
_PLAIN = {
  'peft_type': ('LORA',),
  'init_lora_weights': (None, True, False, 'gaussian', 'orthogonal', 'eva'),
}

# PEFT's names of an adapter's leaves.
_PARTS = {
  'a': 'lora_A.weight',
  'b': 'lora_B.weight',
  'column_scale': 'lora_magnitude_vector',
}


def save(
  adapter: lora.Adapter,
  options: schema.Lora,
  cfg: schema.Model,
  folder: str | pathlib.Path,
  base: str,
) -> None:
  """Writes a directory that PEFT loads; tensors are float32.

  Args:
    adapter: the trained adapter.
    options: its LoRA options.
    cfg: the model, with `vocab_size` resolved.
    folder: a new or empty folder.
    base: name or path of the base model, in HuggingFace's format.

  Raises:
    ValueError: `folder` is not empty; or one tensor of the base has several of
      the adapted matrices (Phi-3).
  """
  folder, leaves = pathlib.Path(folder), tree.flat(adapter)
  hf.check_empty(folder)
  places = _places(cfg, leaves, base if os.path.isdir(base) else None)
  shapes = {
    name: leaves[path].shape[len(index) :][::-1]
    for name, (path, index, _) in places.items()
  }

  def get(name: str) -> np.ndarray:
    path, index, order = places[name]
    return np.asarray(leaves[path][index], np.float32).T[order]

  folder.mkdir(parents=True, exist_ok=True)
  dtypes = dict.fromkeys(shapes, np.dtype(np.float32))
  hf.write_file(folder / WEIGHTS, shapes, dtypes, get)
  alpha = options.alpha
  config = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'inference_mode': True,
    'base_model_name_or_path': base,
    'bias': 'none',
    'r': options.rank,
    'lora_alpha': int(alpha) if alpha.is_integer() else alpha,
    'use_rslora': options.rslora,
    'use_dora': options.dora,
    'lora_dropout': 0.0,
    'fan_in_fan_out': False,
    'target_modules': sorted(
      {x.split('.')[-3] for x in shapes if x.endswith('A.weight')}
    ),
  }
  with disk.replacing(folder / CONFIG) as file:
    json.dump(config, file, indent=2)


def read(folder: str | pathlib.Path) -> dict[str, Any]:
  """Returns a directory's adapter_config.json.

  Raises:
    ValueError: the adapter is no plain LoRA; names the key.
  """
  path = pathlib.Path(folder) / CONFIG
  config = disk.read_json_object(path)
  for key, value in {'peft_type': None, **config}.items():
    plain = _PLAIN.get(key, (None, False, [], {}, '', 'none'))
    if key not in _FREE and value not in plain:
      raise ValueError(
        f'{path}: {key} must be one of {plain}: got {value!r}; merge '
        'an adapter that is no plain LoRA into its base with PEFT'
      )
  return config


def load(
  folder: str | pathlib.Path, cfg: schema.Model, base: str | None = None
) -> tuple[lora.Adapter, schema.Lora]:
  """Reads an adapter and its LoRA options.

  Args:
    folder: a folder with adapter_config.json and adapter_model.safetensors.
    cfg: the base model.
    base: its directory, whose family names the matrices, as in `save`.

  Returns:
    (float32 adapter, options).

  Raises:
    ValueError: the adapter is no plain LoRA, or its tensors are not those of
      some matrices in all layers of this model, or not finite.
  """
  folder = pathlib.Path(folder)
  options, like = headers(folder, cfg, base)
  leaves = {
    path: np.zeros(x.shape, np.float32) for path, x in tree.flat(like).items()
  }
  for name, (path, index, order) in _places(cfg, leaves, base).items():
    leaves[path][index].T[order] = hf.read_tensor(folder / WEIGHTS, name)
    if not np.isfinite(leaves[path][index]).all():
      raise ValueError(
        f'{folder / WEIGHTS}: tensor {name} must be finite: got NaN or infinity'
      )
  adapter = jax.tree.unflatten(jax.tree.structure(like), leaves.values())
  return adapter, options


def headers(
  folder: str | pathlib.Path, cfg: schema.Model, base: str | None = None
) -> tuple[schema.Lora, lora.Adapter]:
  """Returns an adapter's options and shapes, by its config and headers.

  Raises:
    ValueError: as `load`, unless a number is not finite.
  """
  folder = pathlib.Path(folder)
  config, known = read(folder), _places(cfg, base=base)
  names = hf.tensor_names(folder / WEIGHTS)
  kernels = {known[x][0].rpartition('/')[0] for x in names if x in known}
  try:
    options = schema.Lora(
      rank=config['r'],
      alpha=float(config['lora_alpha']),
      rslora=bool(config.get('use_rslora')),
      dora=bool(config.get('use_dora')),
      targets='^(' + '|'.join(map(re.escape, sorted(kernels))) + ')$',
    )
    like = lora.shapes(options, transformer.shapes(cfg))
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f'{folder / CONFIG}: {error}') from error
  flat = tree.flat(like)
  shapes = {
    name: flat[path].shape[len(index) :][::-1]
    for name, (path, index, _) in _places(cfg, flat, base).items()
  }
  hf.find(folder, shapes, WEIGHTS)
  return options, like


def _places(
  cfg: schema.Model,
  leaves: Mapping[str, Any] | None = None,
  base: str | None = None,
) -> dict[str, tuple[str, tuple[int, ...], Any]]:
  """Returns {PEFT's name: (leaf's path, index, rows)}, of given leaves or all.

  `rows` of our transposed matrix are those of PEFT's.
  """
  places = {}
  for name, tensor in hf.tensors(cfg, folder=base).items():
    if not tensor.index and tensor.paths != ('head/kernel',):
      continue
    if len(tensor.paths) > 1 or len(tensor.shape) > 2:
      for path in tensor.paths:
        if f'{path}/a' in (leaves or ()):
          raise ValueError(
            f'lora.targets must leave out {tensor.paths} for PEFT, as they are '
            f'one tensor {name}: got {path}; export with --format=hf'
          )
      continue
    if not tensor.transposed:
      continue
    stem = 'base_model.model.' + name.removesuffix('.weight')
    for part, theirs in _PARTS.items():
      path = f'{tensor.paths[0]}/{part}'
      if leaves is None or path in leaves:
        order = None if part == 'a' else tensor.order
        rows = slice(None) if order is None else order
        places[f'{stem}.{theirs}'] = path, tensor.index, rows
  return places
