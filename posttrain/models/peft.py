"""An adapter <-> a directory of the PEFT library, tensor by tensor.

    adapter_config.json         rank, alpha, target modules, the base's name
    adapter_model.safetensors   per adapted matrix lora_A [R, in] and
                                lora_B [out, R]: our A and B, transposed

Names of matrices are those of the base's HuggingFace directory, see `hf`.
"""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from posttrain import schema, tree
from posttrain.models import hf, hf_files, lora, transformer

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
# Keys that would let PEFT compute something else than W + s A B.
_PLAIN = {
    'peft_type': 'LORA', 'bias': 'none', 'fan_in_fan_out': False,
    'use_dora': False, 'lora_bias': False, 'use_qalora': False,
    'modules_to_save': None, 'layers_to_transform': None, 'rank_pattern': {},
    'alpha_pattern': {}, 'target_parameters': None,
    'trainable_token_indices': None,
}  # fmt: skip


def save(
    adapter: lora.Adapter, options: schema.Lora, cfg: schema.Model,
    folder: str | pathlib.Path, base: str,
) -> None:  # fmt: skip
  """Writes a directory that PEFT loads; tensors are float32.

  Args:
    adapter: what was trained.
    options: how it was made.
    cfg: the model, with `vocab_size` resolved.
    folder: a new or an empty one.
    base: name or path of the HuggingFace model that it corrects.

  Raises:
    ValueError: `folder` is not empty.
  """
  folder, leaves = pathlib.Path(folder), tree.flat(adapter)
  hf.check_empty(folder)
  places = _places(cfg, leaves)
  shapes = {
      name: leaves[path].shape[:0:-1] for name, (path, _) in places.items()
  }

  def get(name: str) -> np.ndarray:
    path, layer = places[name]
    return np.asarray(leaves[path][layer], np.float32).T

  folder.mkdir(parents=True, exist_ok=True)
  dtypes = dict.fromkeys(shapes, np.dtype(np.float32))
  hf_files.write_file(folder / WEIGHTS, shapes, dtypes, get)
  alpha = options.alpha
  (folder / CONFIG).write_text(json.dumps({
      'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'inference_mode': True,
      'base_model_name_or_path': base, 'bias': 'none', 'r': options.rank,
      'lora_alpha': int(alpha) if alpha.is_integer() else alpha,
      'use_rslora': options.rslora, 'lora_dropout': 0.0,
      'fan_in_fan_out': False,
      'target_modules': sorted({name.split('.')[-3] for name in shapes}),
  }, indent=2))  # fmt: skip


def read(folder: str | pathlib.Path) -> dict[str, Any]:
  """Returns a directory's adapter_config.json.

  Raises:
    ValueError: it is no plain LoRA; names the key.
  """
  path = pathlib.Path(folder) / CONFIG
  try:
    config = json.loads(path.read_text())
  except json.JSONDecodeError as error:
    raise ValueError(f'{path} must be JSON: {error}') from error
  for key, value in _PLAIN.items():
    if config.get(key) not in (None, value, [], {}):
      raise ValueError(
          f'{path}: {key} must be {value!r}: got {config[key]!r}; merge it '
          'into its base with PEFT first'
      )
  return config


def load(
    folder: str | pathlib.Path, cfg: schema.Model
) -> tuple[lora.Adapter, schema.Lora]:
  """Reads an adapter of a model, and how it was made.

  Args:
    folder: of adapter_config.json and adapter_model.safetensors.
    cfg: the model that it corrects.

  Raises:
    ValueError: it is no plain LoRA, or its tensors are not those of some
      matrices in all layers of this model.
  """
  folder, config = pathlib.Path(folder), read(folder)
  file = folder / WEIGHTS
  theirs = hf_files.names(file)
  targets = sorted({
      path.removesuffix('/a')
      for name, (path, _) in _places(cfg).items() if name in theirs
      and path.endswith('/a')
  })  # fmt: skip
  options = schema.Lora(
      rank=config['r'], alpha=float(config['lora_alpha']),
      rslora=config.get('use_rslora', False),
      targets='^(' + '|'.join(map(re.escape, targets)) + ')$',
  )
  if not targets:
    raise ValueError(
        f'{file} must hold lora_A and lora_B of a matrix of this model: got '
        f'{sorted(theirs)[:3]}, expected some of {list(_places(cfg))[:3]}'
    )
  like = lora.shapes(options, transformer.shapes(cfg))
  leaves = {path: np.zeros(x.shape, np.float32)
            for path, x in tree.flat(like).items()}  # fmt: skip
  places = _places(cfg, leaves)
  shapes = {
      name: leaves[path].shape[:0:-1] for name, (path, _) in places.items()
  }
  hf_files.find(folder, shapes, WEIGHTS)
  for name, (path, layer) in places.items():
    leaves[path][layer] = hf_files.read(file, name).T
  adapter = jax.tree.unflatten(jax.tree.structure(like), leaves.values())
  return adapter, options


def _places(
    cfg: schema.Model, leaves: Mapping[str, Any] | None = None
) -> dict[str, tuple[str, int]]:
  """PEFT's name -> (path of our leaf, layer); of given leaves, or of all."""
  found = {}
  for name, tensor in hf.tensors(cfg).items():
    if tensor.layer is None or not tensor.transposed:
      continue
    for part in 'ab':
      path = f'{tensor.path}/{part}'
      if leaves is None or path in leaves:
        stem = 'base_model.model.' + name.removesuffix('.weight')
        place = path, tensor.layer
        found[f'{stem}.lora_{part.upper()}.weight'] = place
  return found
