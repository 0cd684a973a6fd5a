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
import jax.numpy as jnp

from posttrain import schema, sharding, tree
from posttrain.chat import pretrained
from posttrain.chat import renderer as chat
from posttrain.checkpoints import store
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
    return str(store.find(path))
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
  return schema.Model.from_json(store.read_host(folder)['model'])


def renderer(folder: str, variables: str = '{}') -> chat.Renderer | None:
  """Tokenizer and template of whoever wrote the folder.

  None for a directory without a tokenizer.json, whose template is shown the
  variables (JSON); a run has its own.

  Raises:
    ValueError: they are gone, or other ones by now.
  """
  if is_hf(folder):
    if not os.path.isfile(os.path.join(folder, 'tokenizer.json')):
      return None
    made = schema.Tokenizer(path=folder, template_variables=variables)
    return chat.load(made)
  if is_peft(folder):
    return renderer(start(folder), variables)
  host = store.read_host(folder)
  options = host['config']['tokenizer']
  made = chat.load(schema.Tokenizer(**options))
  chat.check_fingerprint(
    made.fingerprint, host['tokenizer'], f'the tokenizer {options}', folder
  )
  return made


def check(
  folder: str, cfg: schema.Model, tokens: chat.Renderer, *, reward: bool = False
) -> None:
  """Refuses weights that cannot stand for a model; reads none of them.

  Raises:
    ValueError: they are of another model, or of other tokens; or of a reward
      model, unless `reward` wants one.
  """
  check_kind(folder, reward=reward)
  if is_peft(folder):
    check(start(folder), cfg, tokens)
    return
  if is_hf(folder):
    pretrained.check(folder, tokens.tokenizer)
  else:
    chat.check_fingerprint(
      tokens.fingerprint,
      store.read_host(folder)['tokenizer'],
      'config.tokenizer',
      f'the checkpoint {folder}',
    )
  if is_run(folder) and adapter_options(folder):
    start(folder)  # it must be there, too
  theirs = model(folder)
  remedy = 'use the model it was saved with'
  if is_hf(folder):
    remedy = f'--config.model={folder} takes all of its model'
  for field in hf_config.differing(theirs, cfg):
    raise ValueError(
      f'{folder} must hold weights of this model: its {field} is '
      f'{getattr(theirs, field)!r}, and config.model.{field} is '
      f'{getattr(cfg, field)!r}; {remedy}'
    )


def check_kind(folder: str, *, reward: bool = False) -> None:
  """Refuses a reward model where a policy is wanted, and the reverse.

  Raises:
    ValueError: it is the other one.
  """
  ranks = is_run(folder) and _stage(folder).get('kind') == 'ranking'
  if ranks != reward:
    kinds = 'a model that speaks', "a reward model (kind 'ranking')"
    raise ValueError(
      f'{folder} must hold {kinds[reward]}: got {kinds[ranks]}; name '
      'another stage'
    )


def load(folder: str, like: Params, *, average: bool = False) -> Params:
  """Reads weights into the shapes, dtypes and shardings of `like`.

  Args:
    folder: of `find`.
    like: arrays or ShapeDtypeStructs, of the folder's model.
    average: the moving average, where a run kept one.

  Raises:
    ValueError: the weights are missing, damaged, or of other shapes; or what
      a correction was made for has changed; or it is a reward model, and
      `like` has no such head.
  """
  check_kind(folder, reward='reward' in like)
  if is_hf(folder):
    return hf.load(folder, model(folder), like)
  found = adapter(folder, like, average=average)
  if found is None:
    stored = jax.tree.map(  # in float32, as checkpoints hold them
      lambda x: jax.ShapeDtypeStruct(x.shape, 'float32', sharding=x.sharding),
      like,
    )
    params = store.restore_params(
      folder, stored, average=average and _has_average(folder)
    )
    return jax.tree.map(lambda x, y: x.astype(y.dtype), params, like)
  base = load(start(folder), like)
  if is_run(folder):
    check_base(folder, base)
  return lora.absorb(base, found[0], lora.scale(found[1]))


def adapter(
  folder: str, like: Params | None = None, *, average: bool = False
) -> tuple[lora.Adapter, schema.Lora] | None:
  """What a folder corrects its start by, and how that was made.

  Args:
    folder: of `find`.
    like: the whole weights', whose devices it shall lie on; None = the first.
    average: the moving average, where a run kept one.

  Returns:
    (float32 adapter, options); None if the folder holds whole weights.
  """
  if is_hf(folder):
    return None
  if is_peft(folder):
    made, options = peft.load(folder, model(folder))
    places = _adapter_like(options, folder, like)
    return jax.tree.map(
      lambda x, y: jax.device_put(x, y.sharding), made, places
    ), options
  options = adapter_options(folder)
  if options is None:
    return None
  params = store.restore_params(
    folder,
    _adapter_like(options, folder, like),
    average=average and _has_average(folder),
  )
  return params, options


def adapter_options(folder: str) -> schema.Lora | None:
  """How a run's adapter was made; None if it trained all weights."""
  options = _stage(folder).get('lora')  # older runs have none
  return schema.Lora(**options) if options and options['rank'] else None


def _adapter_like(options: schema.Lora, folder: str, like: Params | None):
  """Shapes of an adapter, on the mesh of the weights that it is to correct."""
  shapes = lora.shapes(options, transformer.shapes(model(folder)))
  place = jax.tree.leaves(like)[0].sharding if like is not None else None
  if not isinstance(place, jax.sharding.NamedSharding):
    return shapes
  return sharding.placed(shapes, transformer.SHARDING_RULES, place.mesh)


def base_sums(base: Params) -> dict[str, Any]:
  """What tells frozen weights from others: their dtypes, and checksums."""
  dtypes = {path: x.dtype.name for path, x in tree.flat(base).items()}
  return {'dtypes': dtypes, 'sums': tree.checksums(base)}


def check_base(folder: str, base: Params) -> None:
  """Refuses to correct other weights than a correction was trained on.

  Args:
    folder: a step of a run with LoRA.
    base: what lies now where its stage began, in any dtype as wide as those
      that were corrected; a narrower one is not checked.

  Raises:
    ValueError: they have changed; names the first.
  """
  known = store.read_host(folder).get('base')
  for path, leaf in tree.flat(base).items() if known else ():
    dtype = jnp.dtype(known['dtypes'][path])
    if leaf.dtype.itemsize < dtype.itemsize:
      continue
    (total,) = tree.checksums([leaf.astype(dtype)]).values()
    if total != known['sums'][path]:
      raise ValueError(
        f'{start(folder)} must hold the weights that {folder} corrects: '
        f'{path} has changed since it was trained; put the old files back'
      )


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
  name = store.read_host(folder)['start']
  if name == 'random':
    return name
  path = os.path.join(pathlib.Path(folder).parents[2], name)
  try:
    return find(path)
  except ValueError as error:
    raise ValueError(
      f'{folder} began with {path}, where that must still be: got nothing '
      'like it; put it, or a link to it, there'
    ) from error


def origin(folder: str) -> str | None:
  """The HuggingFace directory that all began with; None if random weights.

  Raises:
    ValueError: something on the way is gone.
  """
  while not (is_hf(folder) or folder == 'random'):
    folder = start(folder)
  return None if folder == 'random' else folder


def _stage(folder: str) -> dict[str, Any]:
  """Options of the stage that a checkpoint is of."""
  host = store.read_host(folder)
  return host['config'][host['stage']]


def _has_average(folder: str) -> bool:
  return _stage(folder)['optim']['average'] is not None
