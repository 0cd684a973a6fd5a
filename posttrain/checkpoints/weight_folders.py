"""Folders that hold weights: what kind they are, and what they come from.

    WORKDIR, WORKDIR/checkpoints/STAGE, .../STEP   checkpoints of a run
    a HuggingFace directory     config.json, safetensors, tokenizer.json
    a PEFT directory            adapter_config.json, which names the former

`find` resolves a path to a folder: a step's, or the directory. `read` parses
such a folder into a `Checkpoint`. Nothing here reads arrays.
"""

import dataclasses
import json
import os
import pathlib
import sys
from typing import Any, Literal

from posttrain import schema
from posttrain.chat import rendering
from posttrain.checkpoints import reading
from posttrain.data import sources
from posttrain.models import hf_config, peft
from posttrain.schema import base as schema_base
from posttrain.util import disk, errors, hub


def is_hf(path: str) -> bool:
  """Returns whether a path is a HuggingFace directory.

  A workdir has a config.json as well, but without a `model_type`.
  """
  try:
    return 'model_type' in disk.read_json_object(_inside(path, 'config.json'))
  except ValueError:
    return False


def is_peft(path: str) -> bool:
  """Returns whether a path is a PEFT directory."""
  return os.path.isfile(_inside(path, peft.CONFIG))


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
      disk.read_json_object(config)  # raises if it cannot be read
    place = os.path.abspath(os.path.expanduser(path))
    if not os.path.exists(place):
      raise ValueError(
        f'a checkpoint path must exist: got {errors.quote(path)}, but there '
        f'is no {errors.text(place)}; it names a workdir, a folder in it, or '
        f'a HuggingFace or PEFT directory{hub.hint(path)}'
      ) from error
    raise ValueError(
      f'{error}; it is not a HuggingFace directory (a config.json with a '
      'model_type) or a PEFT directory (an adapter_config.json) either'
      f'{hub.hint(path)}'
    ) from error


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """What a folder of weights says of them.

  Attributes:
    folder: the folder, from `find`.
    kind: of a run, or a HuggingFace or PEFT directory.
    model: the options of the whole model. Their `attention` is 'auto': what
      the weights were trained with may not run on this machine.
    origin: the path of the weights that a stage or an adapter started from, or
      'random'; None for a HuggingFace directory.
    host: the `host` dict of a run's step; {} for a directory.
    stage: the options of the stage that saved the step; {} for a directory.
    adapter: the LoRA options of a run's step that holds an adapter alone.
  """

  folder: str
  kind: Literal['run', 'hf', 'peft']
  model: schema.Model
  origin: str | None
  host: dict[str, Any] = dataclasses.field(default_factory=dict)
  stage: dict[str, Any] = dataclasses.field(default_factory=dict)
  adapter: schema.Lora | None = None

  @property
  def is_adapter(self) -> bool:
    """Whether the folder holds an adapter, and no whole weights."""
    return self.kind == 'peft' or self.adapter is not None

  @property
  def selects(self) -> bool:
    """Whether the folder is a step of a stage with `eval.best`.

    Such a stage hands on its averaged weights, if it keeps them: they are those
    that were evaluated. Others hand on the weights that they trained.
    """
    return self.stage.get('eval', {}).get('best') is not None

  def start(self) -> str:
    """Returns the folder of the weights that these started from, or 'random'.

    Raises:
      ValueError: the folder is missing.
    """
    assert self.origin is not None, self.folder
    if self.origin == 'random':
      return self.origin
    try:
      return find(self.origin)
    except ValueError as error:
      raise ValueError(
        f'{self.origin} must hold the weights that {self.folder} started from: '
        'got none; put them, or a link to them, there'
      ) from error

  def renderer(self, variables: str = '{}') -> rendering.Renderer | None:
    """Loads the tokenizer and template that the weights were trained with.

    Args:
      variables: template variables (JSON) for a directory; a run has its own.

    Returns:
      The renderer; None for a directory without a tokenizer.json.

    Raises:
      ValueError: their files are missing, or have changed since.
    """
    if self.kind == 'peft':
      return read(self.start()).renderer(variables)
    if self.kind == 'hf':
      if not os.path.isfile(os.path.join(self.folder, 'tokenizer.json')):
        return None
      return rendering.load(
        schema.Tokenizer(path=self.folder, template_variables=variables)
      )
    options = self.host['config']['tokenizer']
    stored = rendering.load(schema.Tokenizer(**options))
    rendering.check_fingerprint(
      stored.fingerprint,
      self.host['tokenizer'],
      f'the tokenizer {options}',
      self.folder,
    )
    return stored

  def print_named(self) -> None:
    """Prints the folders and files that the folder names, to stderr.

    They are read as data: the base weights of an adapter, and the tokenizer.
    """
    lines = []
    if self.is_adapter:
      folders = [x for x in chain(self.folder)[1:] if x != 'random']
      lines = [f'base weights {x}' for x in folders]
    if self.kind == 'run':
      options = self.host['config']['tokenizer']
      paths = (options.get('path'), options.get('chat_template'))
      lines += [f'tokenizer {x}' for x in paths if x is not None]
    for line in lines:
      named = f'{self.folder} names {errors.text(line)}, read as data'
      print(named, file=sys.stderr)


def read(folder: str) -> Checkpoint:
  """Parses a folder.

  Args:
    folder: a folder from `find`.

  Raises:
    ValueError: its files are damaged, or lack what reading weights needs.
  """
  if is_hf(folder):
    return Checkpoint(folder, 'hf', hf_config.read(folder), None)
  if is_peft(folder):
    base = peft.read(folder).get('base_model_name_or_path') or ''
    if not is_hf(base):
      raise ValueError(
        f'{folder}/{peft.CONFIG}: base_model_name_or_path must be a local '
        f'HuggingFace directory: got {errors.quote(base)}; download it, and '
        'name its folder'
      )
    return Checkpoint(folder, 'peft', read(find(base)).model, base)
  host = reading.read_host(folder)
  try:
    stage = host['config'][host['stage']]
    adapter = schema.Lora(**stage.get('lora', {}))
    schema_base.require_types(adapter)
    model = schema.Model.from_json(host['model'])
    origin = str(host.get('start', 'random'))
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f'the host item of {folder} must have the model and the options of '
      f'its stage: {errors.describe(error)}'
    ) from error
  if origin != 'random':
    origin = os.path.join(pathlib.Path(folder).parents[2], origin)
  return Checkpoint(
    folder,
    'run',
    dataclasses.replace(model, attention='auto'),
    origin,
    host,
    stage,
    adapter if adapter.rank else None,
  )


def chain(folder: str) -> list[str]:
  """Returns a folder and all that it started from, in turn; 'random' is one.

  Raises:
    ValueError: a folder on the way is missing, or comes twice.
  """
  chain = [folder]
  while chain[-1] != 'random' and read(chain[-1]).kind != 'hf':
    chain.append(read(chain[-1]).start())
    if chain[-1] in chain[:-1]:
      raise ValueError(
        f'{folder} must not have started from itself: got {chain[-1]} twice'
      )
  return chain


def model_text(cfg: schema.Model) -> str:
  """Returns a model's options as text, without the kind of its attention."""
  options = dataclasses.asdict(cfg)
  del options['attention']
  return json.dumps(options, sort_keys=True)


def fingerprint(folder: str) -> str:
  """Returns the content hash of a weights folder, with its model's options.

  For a run it uses stored checksums instead of reading arrays. For an adapter
  it includes the hash of the base weights.

  Args:
    folder: a folder from `find`.
  """
  checkpoint = read(folder)
  parts = [model_text(checkpoint.model)]
  if checkpoint.kind == 'run':
    sums = reading.read_sums(folder, checkpoint.selects)
    parts.append(json.dumps(sums, sort_keys=True))
  else:
    path = pathlib.Path(folder)  # PEFT adapters differ by their options too
    files = [*path.glob('*.safetensors'), *path.glob('adapter_config.json')]
    parts += [sources.file_fingerprint(file) for file in sorted(files)]
  if checkpoint.is_adapter:
    parts.append(fingerprint(checkpoint.start()))
  return sources.fingerprint(*(part.encode() for part in parts))


def _inside(path: str, name: str) -> str:
  return os.path.join(os.path.expanduser(path), name)
