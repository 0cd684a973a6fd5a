"""Folders that hold weights: what kind they are, and what they come from.

    WORKDIR, WORKDIR/checkpoints/STAGE, .../STEP   checkpoints of a run
    a HuggingFace directory     config.json, safetensors, tokenizer.json
    a PEFT directory            adapter_config.json, which names the former

`find` resolves a path to a folder: a step's, or the directory. All others take
such a folder. Nothing here reads arrays.
"""

import dataclasses
import os
import pathlib
import sys
from typing import Any

from posttrain import schema
from posttrain.chat import rendering
from posttrain.checkpoints import reading
from posttrain.models import hf_config, peft
from posttrain.schema import base as schema_base
from posttrain.util import foreign, hub, json_files


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


def is_run(folder: str) -> bool:
  """Returns whether a folder from `find` is a step of a run."""
  return not (is_hf(folder) or is_peft(folder))


def find(path: str) -> str:
  """Resolves a path to a step's folder, or a HuggingFace or PEFT directory.

  The id of a model in the hub's cache is the directory of its commit.

  Raises:
    ValueError: the path is neither.
  """
  path = hub.folder(path) or path
  if is_hf(path) or is_peft(path):
    return os.path.realpath(os.path.expanduser(path))
  try:
    return str(reading.find(path))
  except ValueError as error:
    config = _inside(path, 'config.json')
    if os.path.isfile(config):
      json_files.read_object(config)  # raises if it cannot be read
    place = os.path.abspath(os.path.expanduser(path))
    if not os.path.exists(place):
      raise ValueError(
        f'a checkpoint path must exist: got {foreign.quote(path)}, but there '
        f'is no {foreign.text(place)}; it names a workdir, a folder in it, or '
        f'a HuggingFace or PEFT directory{hub.hint(path)}'
      ) from error
    raise ValueError(
      f'{error}; it is not a HuggingFace directory (a config.json with a '
      'model_type) or a PEFT directory (an adapter_config.json) either'
      f'{hub.hint(path)}'
    ) from error


def model(folder: str) -> schema.Model:
  """Returns the options of the model whose weights a folder holds.

  Their `attention` is 'auto': what the weights were trained with may not run
  on this machine.

  Args:
    folder: a folder from `find`.
  """
  if is_hf(folder):
    return hf_config.read(folder)
  if is_peft(folder):
    return model(start(folder))
  stored = schema.Model.from_json(read_host(folder)['model'])
  return dataclasses.replace(stored, attention='auto')


def renderer(folder: str, variables: str = '{}') -> rendering.Renderer | None:
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
    return rendering.load(cfg)
  if is_peft(folder):
    return renderer(start(folder), variables)
  host = read_host(folder)
  options = host['config']['tokenizer']
  stored = rendering.load(
    _options(schema.Tokenizer, options, folder, 'tokenizer')
  )
  rendering.check_fingerprint(
    stored.fingerprint, host['tokenizer'], f'the tokenizer {options}', folder
  )
  return stored


def adapter_options(folder: str) -> schema.Lora | None:
  """Returns a run's LoRA options; None if it trained all weights."""
  options = stage_options(folder).get('lora')  # absent in older runs
  if not options:
    return None
  lora_options = _options(schema.Lora, options, folder, 'lora')
  return lora_options if lora_options.rank else None


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
  *_, first = chain(folder)
  return None if first == 'random' else first


def print_named(folder: str) -> None:
  """Prints the folders and files that a folder's weights name, to stderr.

  They are read as data: the base weights of an adapter, and the tokenizer.

  Args:
    folder: a folder from `find`.
  """
  lines = []
  is_adapter = is_peft(folder) or (
    is_run(folder) and adapter_options(folder) is not None
  )
  if is_adapter:
    folders = [x for x in chain(folder)[1:] if x != 'random']
    lines = [f'base weights {x}' for x in folders]
  if is_run(folder):
    options = read_host(folder)['config']['tokenizer']
    paths = (options.get('path'), options.get('chat_template'))
    lines += [f'tokenizer {x}' for x in paths if x is not None]
  for line in lines:
    print(f'{folder} names {foreign.text(line)}, read as data', file=sys.stderr)


def chain(folder: str) -> list[str]:
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


def read_host(folder: str) -> dict[str, Any]:
  """Returns the `host` dict of a run's step, of any origin.

  Raises:
    ValueError: it lacks what reading weights needs; names that.
  """
  host = reading.read_host(folder)
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


def stage_options(folder: str) -> dict[str, Any]:
  """Returns the options of a checkpoint's stage."""
  host = read_host(folder)
  return host['config'][host['stage']]


def selects(folder: str) -> bool:
  """Returns whether a folder is a step of a stage with `eval.best`.

  Such a stage hands on its averaged weights, if it keeps them: they are those
  that were evaluated. Others hand on the weights that they trained.
  """
  return (
    is_run(folder) and stage_options(folder)['eval'].get('best') is not None
  )


def has_average(folder: str) -> bool:
  return stage_options(folder)['optim'].get('average') is not None


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


def _inside(path: str, name: str) -> str:
  return os.path.join(os.path.expanduser(path), name)
