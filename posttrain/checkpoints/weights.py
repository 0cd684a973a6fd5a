"""Weights by path: a run's, a HuggingFace directory's, a PEFT adapter's.

    WORKDIR, WORKDIR/checkpoints/STAGE, .../STEP   checkpoints of a run
    a HuggingFace directory     config.json, safetensors, tokenizer.json
    a PEFT directory            adapter_config.json, which names the former

1. `find` resolves a path to a folder: a step's, or the directory.
2. `model` and `renderer` read the folder's model options and tokenizer.
3. `check` compares the folder, and the headers of its weights, with a given
   model; it reads no weights.
4. `load` reads the weights. A checkpoint of a stage with LoRA, and a PEFT
   directory, hold an adapter only; it is merged into its base weights.
"""

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from posttrain import schema, sharding, tree
from posttrain.chat import pretrained
from posttrain.chat import renderer as chat
from posttrain.checkpoints import store
from posttrain.models import hf, hf_config, lora, peft, reward_head, transformer
from posttrain.schema import base as schema_base
from posttrain.util import foreign, json_files

Params = Any


def is_hf(path: str) -> bool:
  """Returns whether a path is a HuggingFace directory.

  A workdir has a config.json as well, but without a `model_type`.
  """
  try:
    return 'model_type' in json_files.read_object(_inside(path, 'config.json'))
  except ValueError:
    return False


def is_peft(path: str) -> bool:
  """Returns whether a path is a PEFT directory."""
  return os.path.isfile(_inside(path, peft.CONFIG))


def _inside(path: str, name: str) -> str:
  return os.path.join(os.path.expanduser(path), name)


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
    config = _inside(path, 'config.json')
    if os.path.isfile(config):
      json_files.read_object(config)  # raises if it cannot be read
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
  return schema.Model.from_json(read_host(folder)['model'])


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
  host = read_host(folder)
  options = host['config']['tokenizer']
  stored = chat.load(_options(schema.Tokenizer, options, folder, 'tokenizer'))
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
    ValueError: the weights belong to another model, tokenizer or kind, or a
      file or an array of them is missing or of another shape or dtype.
  """
  check_kind(folder, reward=reward)
  if is_peft(folder):
    check(start(folder), cfg, tokens)
    peft.check(folder, cfg)
    return
  if is_hf(folder):
    pretrained.check(folder, tokens.tokenizer)
  else:
    chat.check_fingerprint(
      tokens.fingerprint,
      read_host(folder)['tokenizer'],
      'config.tokenizer',
      f'the checkpoint {folder}',
    )
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
  _check_headers(folder, actual, reward)


def _check_headers(folder: str, cfg: schema.Model, reward: bool) -> None:
  """Checks names, shapes and dtypes of a folder's weights, and of its base."""
  if folder == 'random':
    return
  if is_hf(folder):
    hf.check(folder, cfg)
    return
  options = adapter_options(folder)
  like = transformer.shapes(cfg)
  if options is not None:
    like = lora.shapes(options, like)
  elif reward:
    sums = store.read_sums(folder)
    has_lm_head = any(path.startswith('params/head/') for path in sums)
    like = reward_head.shapes(cfg, has_lm_head)
  store.check_params(folder, like)
  if options is not None:
    _chain(folder)  # refuses one that started from itself
    _check_headers(start(folder), cfg, reward=False)


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
    params = jax.tree.map(lambda x, y: x.astype(y.dtype), params, like)
    _check_finite(params, folder)
    return params
  _chain(folder)  # refuses one that started from itself
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
  _check_finite(params, folder)
  return params, options


def _check_finite(params: Params, folder: str) -> None:
  """Raises ValueError for an array with NaN or infinity; names it."""
  for path in tree.not_finite(params)[:1]:
    raise ValueError(
      f'{folder} must hold finite weights: got NaN or infinity in {path}; name '
      'another step'
    )


def adapter_options(folder: str) -> schema.Lora | None:
  """Returns a run's LoRA options; None if it trained all weights."""
  options = _stage(folder).get('lora')  # absent in older runs
  if not options:
    return None
  lora_options = _options(schema.Lora, options, folder, 'lora')
  return lora_options if lora_options.rank else None


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
  stored = read_host(folder).get('base')
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
        f'HuggingFace directory: got {foreign.quote(name)}; download it, and '
        'name its folder'
      )
    return find(name)
  name = read_host(folder).get('start')
  if not isinstance(name, str):
    raise ValueError(
      f'the host item of {folder} must have start, a str: got '
      f'{foreign.quote(name)}'
    )
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
  *_, first = _chain(folder)
  return None if first == 'random' else first


def named_folders(folder: str) -> list[str]:
  """Returns lines with the folders and files that a folder's weights name.

  They are read as data: the base weights of an adapter, and the tokenizer.

  Args:
    folder: a folder from `find`.
  """
  lines = []
  is_adapter = is_peft(folder) or (
    is_run(folder) and adapter_options(folder) is not None
  )
  if is_adapter:
    folders = [x for x in _chain(folder)[1:] if x != 'random']
    lines = [f'base weights {x}' for x in folders]
  if is_run(folder):
    options = read_host(folder)['config']['tokenizer']
    paths = (options.get('path'), options.get('chat_template'))
    lines += [f'tokenizer {x}' for x in paths if x is not None]
  return [foreign.text(line) for line in lines]


def read_host(folder: str) -> dict[str, Any]:
  """Returns the `host` dict of a run's step, of any origin.

  Raises:
    ValueError: it lacks what reading weights needs; names that.
  """
  host = store.read_host(folder)
  config, stage = host.get('config'), host.get('stage')
  options = config if isinstance(config, dict) else {}
  node = options.get(stage) if isinstance(stage, str) else None
  node = node if isinstance(node, dict) else {}
  needed: dict[str, tuple[Any, type]] = {
    'model': (host.get('model'), dict),
    'tokenizer': (host.get('tokenizer'), str),
    'config.tokenizer': (options.get('tokenizer'), dict),
    'config.<stage>.optim': (node.get('optim'), dict),
    'config.<stage>.eval': (node.get('eval'), dict),
  }
  for name, (value, kind) in needed.items():
    if not isinstance(value, kind):
      raise ValueError(
        f'the host item of {folder} must have {name}, a {kind.__name__}: got '
        f'{foreign.quote(value)}'
      )
  return host


def _chain(folder: str) -> list[str]:
  """Returns a folder and all that it started from, in turn.

  Raises:
    ValueError: a folder on the way is missing, or comes twice.
  """
  chain = [folder]
  while not (is_hf(chain[-1]) or chain[-1] == 'random'):
    chain.append(start(chain[-1]))
    if chain[-1] in chain[:-1]:
      raise ValueError(
        f'{folder} must not have started from itself: got {chain[-1]} twice'
      )
  return chain


def _options(kind: type, values: Any, folder: str, name: str) -> Any:
  """Returns options that a checkpoint holds as their class."""
  try:
    options = kind(**values)
    schema_base.require_types(options)
    return options
  except (AttributeError, TypeError, ValueError) as error:
    raise ValueError(
      f'the host item of {folder} must have options of {name}: '
      f'{foreign.error(error)}'
    ) from error


def _stage(folder: str) -> dict[str, Any]:
  """Returns the options of a checkpoint's stage."""
  host = read_host(folder)
  return host['config'][host['stage']]


def _has_average(folder: str) -> bool:
  return _stage(folder)['optim'].get('average') is not None
