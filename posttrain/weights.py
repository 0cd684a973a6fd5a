"""Weights by path: a run's, or those of HuggingFace's tools.

    WORKDIR, WORKDIR/checkpoints/STAGE, .../STEP   what a run has trained
    a HuggingFace directory     config.json, safetensors, tokenizer.json
    a PEFT directory            adapter_config.json, which names such a one

1. `find` turns such a path into the folder it means now.
2. `model` and `renderer` read what that says of itself.
3. `check` refuses what cannot stand for a given model; no weight is read.
4. `load` reads the weights. A checkpoint of a stage with LoRA, and a PEFT
   directory, hold a correction alone; it is merged into what it corrects.
"""

import json
import os
import pathlib
from typing import Any

import jax

from posttrain import checkpoint, schema
from posttrain.chat import pretrained
from posttrain.chat import renderer as chat
from posttrain.models import hf, hf_config, lora, peft, transformer

Params = Any


def is_hf(path: str) -> bool:
  """Whether a path is a HuggingFace directory (a workdir's config is ours)."""
  file = pathlib.Path(path).expanduser() / 'config.json'
  try:
    return 'model_type' in json.loads(file.read_text())
  except (OSError, ValueError):
    return False


def is_peft(path: str) -> bool:
  """Whether a path is a directory of the PEFT library."""
  return (pathlib.Path(path).expanduser() / peft.CONFIG).is_file()


def is_run(folder: str) -> bool:
  """Whether a folder, of `find`, is a step of a run."""
  return not (is_hf(folder) or is_peft(folder))


def find(path: str) -> str:
  """Returns the step folder, or the directory, that a path means.

  Raises:
    ValueError: it is none.
  """
  if is_hf(path) or is_peft(path):
    return os.path.realpath(os.path.expanduser(path))
  try:
    return str(checkpoint.find(path))
  except ValueError as error:
    raise ValueError(
        f'{error}; nor is it a HuggingFace or PEFT directory, with a '
        'config.json that says model_type, or an adapter_config.json'
    ) from error


def model(folder: str) -> schema.Model:
  """The model whose weights a folder holds; of `find`, as are those below."""
  if is_hf(folder):
    return hf_config.read(folder)
  if is_peft(folder):
    return model(start(folder))
  return schema.Model.from_json(checkpoint.read_host(folder)['model'])


def renderer(folder: str) -> chat.Renderer | None:
  """Tokenizer and template of whoever wrote the folder.

  None for a directory without a tokenizer.json.

  Raises:
    ValueError: they are gone, or other ones by now.
  """
  if is_hf(folder):
    if not os.path.isfile(os.path.join(folder, 'tokenizer.json')):
      return None
    return chat.load(schema.Tokenizer(path=folder))
  if is_peft(folder):
    return renderer(start(folder))
  host = checkpoint.read_host(folder)
  options = host['config']['tokenizer']
  made = chat.load(schema.Tokenizer(**options))
  chat.check_fingerprint(
      made.fingerprint, host['tokenizer'], f'the tokenizer {options}', folder
  )
  return made


def check(folder: str, cfg: schema.Model, tokens: chat.Renderer) -> None:
  """Refuses weights that cannot stand for a model; reads none of them.

  Raises:
    ValueError: they are of another model, or of other tokens.
  """
  if is_peft(folder):
    check(start(folder), cfg, tokens)
    return
  if is_hf(folder):
    pretrained.check(folder, tokens.tokenizer)
  else:
    chat.check_fingerprint(
        tokens.fingerprint, checkpoint.read_host(folder)['tokenizer'],
        'config.tokenizer', f'the checkpoint {folder}',
    )  # fmt: skip
  theirs = model(folder)
  for field in hf_config.differing(theirs, cfg):
    raise ValueError(
        f'{folder} must hold weights of this model: its {field} is '
        f'{getattr(theirs, field)!r}, and config.model.{field} is '
        f'{getattr(cfg, field)!r}; --config.model={folder} takes all of its '
        'model'
    )


def load(folder: str, like: Params, *, average: bool = False) -> Params:
  """Reads weights into the shapes, dtypes and shardings of `like`.

  Args:
    folder: of `find`.
    like: arrays or ShapeDtypeStructs, of the folder's model.
    average: the moving average, where a run kept one.

  Raises:
    ValueError: the weights are missing, damaged, or of other shapes.
  """
  if is_hf(folder):
    return hf.load(folder, model(folder), like)
  found = adapter(folder, average=average)
  if found is None:
    params = checkpoint.restore_params(
        folder, _stored(like), average=average and _has_average(folder)
    )
    return _cast(params, like)
  base = load(start(folder), like)
  attached = lora.Base(base, lora.scale(found[1])).attach(found[0])
  merged = jax.jit(lora.merge, out_shardings=_places(like))(attached)
  return _cast(merged, like)


def adapter(
    folder: str, *, average: bool = False
) -> tuple[lora.Adapter, schema.Lora] | None:
  """What a folder corrects its start by, and how that was made.

  Args:
    folder: of `find`.
    average: the moving average, where a run kept one.

  Returns:
    (float32 adapter, options); None if the folder holds whole weights.
  """
  if is_hf(folder):
    return None
  if is_peft(folder):
    return peft.load(folder, model(folder))
  options = _stage(folder).get('lora') or {'rank': 0}
  if not options['rank']:
    return None
  options = schema.Lora(**options)
  like = lora.shapes(options, transformer.shapes(model(folder)))
  average = average and _has_average(folder)
  return checkpoint.restore_params(folder, like, average=average), options


def start(folder: str) -> str:
  """What a stage, or an adapter, began with: a folder, or 'random'."""
  if is_peft(folder):
    name = peft.read(folder).get('base_model_name_or_path') or ''
    if not is_hf(name):
      raise ValueError(
          f'{folder}/{peft.CONFIG}: base_model_name_or_path must be a local '
          f'HuggingFace directory: got {name!r}; download it, and name it there'
      )
    return find(name)
  name = checkpoint.read_host(folder)['start']
  workdir = pathlib.Path(folder).parents[2]
  return name if name == 'random' else find(os.path.join(workdir, name))


def origin(folder: str) -> str | None:
  """The HuggingFace directory that all began with; None if random weights."""
  while not (is_hf(folder) or folder == 'random'):
    folder = start(folder)
  return None if folder == 'random' else folder


def _stage(folder: str) -> dict[str, Any]:
  """Options of the stage that a checkpoint is of."""
  host = checkpoint.read_host(folder)
  return host['config'][host['stage']]


def _has_average(folder: str) -> bool:
  return _stage(folder)['optim']['average'] is not None


def _stored(like: Params) -> Params:
  """As checkpoints hold them: in float32."""
  return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, 'float32', sharding=x.sharding),
      like,
  )


def _places(like: Params) -> Params | None:
  places = jax.tree.map(lambda x: x.sharding, like)
  return places if jax.tree.leaves(places) else None


def _cast(params: Params, like: Params) -> Params:
  """Parameters in the dtypes of `like`; those that have them stay."""
  return jax.tree.map(lambda x, y: x.astype(y.dtype), params, like)
