"""Weights by path: a run's, a HuggingFace directory's, a PEFT adapter's.

    WORKDIR, WORKDIR/checkpoints/STAGE, .../STEP   checkpoints of a run
    a HuggingFace directory     config.json, safetensors, tokenizer.json
    a PEFT directory            adapter_config.json, which names the former

1. `find` resolves a path to a folder: a step's, or the directory.
2. `model` and `renderer` read the folder's model options and tokenizer.
3. `check` compares the folder with a given model; it reads no weights.
4. `load` reads the weights. A checkpoint of a stage with LoRA, and a PEFT
   directory, hold an adapter only; it is merged into its base weights.
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
  """Returns whether a path is a HuggingFace directory.

  A workdir has a config.json as well, but without a `model_type`.
  """
  file = pathlib.Path(path).expanduser() / 'config.json'
  try:
    return 'model_type' in json.loads(file.read_text())
  except (OSError, ValueError):
    return False


def is_peft(path: str) -> bool:
  """Returns whether a path is a PEFT directory."""
  return (pathlib.Path(path).expanduser() / peft.CONFIG).is_file()


def is_run(folder: str) -> bool:
  """Returns whether a folder from `find` is a step of a run."""
  return not (is_hf(folder) or is_peft(folder))


def find(path: str) -> str:
  """Resolves a path to a step's folder, or a HuggingFace or PEFT directory.

  Raises:
    ValueError: the path is neither.
  """
  if is_hf(path) or is_peft(path):
    return os.path.realpath(os.path.expanduser(path))
  try:
    return str(store.find(path))
  except ValueError as error:
    raise ValueError(
      f'{error}; it is not a HuggingFace directory (a config.json with a '
      'model_type) or a PEFT directory (an adapter_config.json) either'
    ) from error


def model(folder: str) -> schema.Model:
  """Returns the options of the model whose weights a folder holds.

  Args:
    folder: a folder from `find`.
  """
  if is_hf(folder):
    return hf_config.read(folder)
  if is_peft(folder):
    return model(start(folder))
  return schema.Model.from_json(store.read_host(folder)['model'])


def renderer(folder: str, variables: str = '{}') -> chat.Renderer | None:
  """Loads the tokenizer and template that the weights were trained with.

  Args:
    folder: a folder from `find`.
    variables: template variables (JSON) for a directory; a run has its own.

  Returns:
    The renderer; None for a directory without a tokenizer.json.

  Raises:
    ValueError: their files are missing, or have changed since.
  """
  if is_hf(folder):
    if not os.path.isfile(os.path.join(folder, 'tokenizer.json')):
      return None
    cfg = schema.Tokenizer(path=folder, template_variables=variables)
    return chat.load(cfg)
  if is_peft(folder):
    return renderer(start(folder), variables)
  host = store.read_host(folder)
  options = host['config']['tokenizer']
  stored = chat.load(schema.Tokenizer(**options))
  chat.check_fingerprint(
    stored.fingerprint, host['tokenizer'], f'the tokenizer {options}', folder
  )
  return stored


def check(
  folder: str, cfg: schema.Model, tokens: chat.Renderer, *, reward: bool = False
) -> None:
  """Checks a folder's weights against a model; reads none of them.

  Args:
    folder: a folder from `find`.
    cfg: the expected model options.
    tokens: the expected renderer.
    reward: whether a reward model is expected instead of a policy.

  Raises:
    ValueError: the weights belong to another model, tokenizer or kind.
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
    start(folder)  # raises if the base weights are missing
  actual = model(folder)
  remedy = 'use the model it was saved with'
  if is_hf(folder):
    remedy = f'--config.model={folder} sets all model options'
  for field in hf_config.differing(actual, cfg):
    raise ValueError(
      f'{folder} must hold weights of this model: its {field} is '
      f'{getattr(actual, field)!r}, and config.model.{field} is '
      f'{getattr(cfg, field)!r}; {remedy}'
    )


def check_kind(folder: str, *, reward: bool = False) -> None:
  """Checks whether a folder holds a reward model or a policy, as expected.

  Raises:
    ValueError: it holds the other kind.
  """
  is_reward = is_run(folder) and _stage(folder).get('kind') == 'ranking'
  if is_reward != reward:
    kinds = 'a policy', "a reward model (kind 'ranking')"
    raise ValueError(
      f'{folder} must hold {kinds[reward]}: got {kinds[is_reward]}; name '
      'another stage'
    )


def load(folder: str, like: Params, *, average: bool = False) -> Params:
  """Reads weights into the shapes, dtypes and shardings of `like`.

  Args:
    folder: a folder from `find`.
    like: arrays or ShapeDtypeStructs of the folder's model.
    average: whether to read the moving average, if the run kept one.

  Raises:
    ValueError: the weights are missing, damaged, or of other shapes; or the
      base weights of an adapter have changed; or only one of folder and
      `like` is a reward model.
  """
  check_kind(folder, reward='reward' in like)
  if is_hf(folder):
    return hf.load(folder, model(folder), like)
  correction = adapter(folder, like, average=average)
  if correction is None:
    stored = jax.tree.map(  # checkpoints hold float32
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
  params, options = correction
  return lora.absorb(base, params, lora.scale(options))


def adapter(
  folder: str, like: Params | None = None, *, average: bool = False
) -> tuple[lora.Adapter, schema.Lora] | None:
  """Reads a folder's LoRA adapter and its options.

  Args:
    folder: a folder from `find`.
    like: the whole weights, whose devices the adapter is placed on; None = the
      first device.
    average: whether to read the moving average, if the run kept one.

  Returns:
    (float32 adapter, options); None if the folder holds whole weights.
  """
  if is_hf(folder):
    return None
  if is_peft(folder):
    params, options = peft.load(folder, model(folder))
    shapes = _adapter_like(options, folder, like)
    params = jax.tree.map(
      lambda x, y: jax.device_put(x, y.sharding), params, shapes
    )
    return params, options
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
  """Returns a run's LoRA options; None if it trained all weights."""
  options = _stage(folder).get('lora')  # absent in older runs
  return schema.Lora(**options) if options and options['rank'] else None


def _adapter_like(options: schema.Lora, folder: str, like: Params | None):
  """Returns an adapter's shapes, on the mesh of the base weights."""
  shapes = lora.shapes(options, transformer.shapes(model(folder)))
  spec = jax.tree.leaves(like)[0].sharding if like is not None else None
  if not isinstance(spec, jax.sharding.NamedSharding):
    return shapes
  return sharding.placed(shapes, transformer.SHARDING_RULES, spec.mesh)


def base_sums(base: Params) -> dict[str, Any]:
  """Returns the dtypes and checksums of frozen weights, for `check_base`."""
  dtypes = {path: x.dtype.name for path, x in tree.flat(base).items()}
  return {'dtypes': dtypes, 'sums': tree.checksums(base)}


def check_base(folder: str, base: Params) -> None:
  """Checks that base weights are those that an adapter was trained on.

  Args:
    folder: a step's folder of a run with LoRA.
    base: the weights at the stage's start path. Leaves of a narrower dtype
      than the trained ones are not checked.

  Raises:
    ValueError: the weights have changed; names the first that differs.
  """
  stored = store.read_host(folder).get('base')
  for path, leaf in tree.flat(base).items() if stored else ():
    dtype = jnp.dtype(stored['dtypes'][path])
    if leaf.dtype.itemsize < dtype.itemsize:
      continue
    (total,) = tree.checksums([leaf.astype(dtype)]).values()
    if total != stored['sums'][path]:
      raise ValueError(
        f'{start(folder)} must hold the base weights of {folder}: {path} has '
        'changed since the adapter was trained; put the old files back'
      )


def start(folder: str) -> str:
  """Returns the weights folder a stage or adapter started from, or 'random'.

  Raises:
    ValueError: the folder is missing.
  """
  if is_peft(folder):
    name = peft.read(folder).get('base_model_name_or_path') or ''
    if not is_hf(name):
      raise ValueError(
        f'{folder}/{peft.CONFIG}: base_model_name_or_path must be a local '
        f'HuggingFace directory: got {name!r}; download it, and name its folder'
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
      f'{path} must hold the weights that {folder} started from: got none; '
      'put them, or a link to them, there'
    ) from error


def origin(folder: str) -> str | None:
  """Returns the HuggingFace directory at the root of a chain of runs.

  None if the first run started from random weights.

  Raises:
    ValueError: a folder on the way is missing.
  """
  while not (is_hf(folder) or folder == 'random'):
    folder = start(folder)
  return None if folder == 'random' else folder


def _stage(folder: str) -> dict[str, Any]:
  """Returns the options of a checkpoint's stage."""
  host = store.read_host(folder)
  return host['config'][host['stage']]


def _has_average(folder: str) -> bool:
  return _stage(folder)['optim']['average'] is not None
