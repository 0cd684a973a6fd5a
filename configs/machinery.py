"""The full ConfigDict of a run, and the argument after a recipe's name.

Every key of the schema exists in the ConfigDict, once, with its default. The
ConfigDict is locked, so a misspelt key is an error and not a new key.
"""

import dataclasses
import os
import types
import typing
from typing import Any

import ml_collections

from posttrain import schema
from posttrain.util import hub, tfds_names

# How names of files of rows end, see `posttrain.data.row_files`.
ROW_FILES = ('.jsonl', '.parquet', '.arrow', '.feather', '.csv')


def config_dict(run: schema.Run) -> ml_collections.ConfigDict:
  """Returns the locked ConfigDict of a run.

  `run.stages` becomes the tuple `stages` (names, in order) and one subtree
  per stage under its own name.

  Raises:
    ValueError: a stage has the name of a shared key.
  """
  config = _node(run)
  del config['stages']
  config['stages'] = tuple(run.stages)
  for name, stage in run.stages.items():
    if name in config:
      raise ValueError(
        f'a stage must not be named like a shared key: got {name!r}'
      )
    config[name] = _node(stage)
  return config.lock()


def node(options: Any) -> ml_collections.ConfigDict:
  """Returns one dataclass of the schema as a locked ConfigDict."""
  return _node(options).lock()


def unset(config: ml_collections.ConfigDict, key: str) -> None:
  """Sets an optional key to None; the key keeps its type."""
  config.get_ref(key).set(None)


def check_argument(argument: str, *known: str) -> None:
  """Checks the one word after a recipe's name; '' is always allowed.

  Raises:
    ValueError: any other word.
  """
  if argument not in ('', *known):
    *first, last = map(repr, ('', *known))
    raise ValueError(
      f'the argument of --config=FILE.py:ARGUMENT must be {", ".join(first)} '
      f'or {last}: got {argument!r}'
    )


def parse_argument(
  argument: str, known: tuple[str, ...]
) -> tuple[str | None, set[str]]:
  """Splits `DIR`, `WORD` or `DIR,WORD,WORD` after a recipe's name.

  Args:
    argument: the text after the colon.
    known: the allowed words.

  Returns:
    The HuggingFace directory, None if there is none, and the words.

  Raises:
    ValueError: the directory does not exist, a word is unknown, or `lora`
      comes without a directory whose weights it could adapt.
  """
  words = argument.split(',')
  folder = None if words[0] in known else words.pop(0)
  exists = folder and os.path.isdir(os.path.expanduser(folder))
  random = folder is None and 'lora' not in words
  if set(words) - set(known) or not (exists or random):
    raise ValueError(
      "the argument after the recipe's name must be a HuggingFace directory "
      f'that exists, then words of {known}, as in FILE:DIR,lora: '
      f'got {argument!r}'
    )
  return folder, set(words)


@dataclasses.dataclass(frozen=True)
class Own:
  """What a user names after a recipe for own data."""

  folder: str | None  # HuggingFace directory; None = a preset's random weights
  preset: str  # of schema.PRESETS, without a folder
  data: str | None  # a path, or tfds:NAME; None = the recipe's example
  held_out: str | None  # None = a tenth of the data
  functions: tuple[str, ...]  # import paths of reward functions
  words: frozenset[str]  # of 'lora' and 'tiny'


def parse_own(argument: str, functions: bool = False, lora: bool = True) -> Own:
  """Reads `DIR,data.jsonl`, and more, after a recipe's name, in any order.

  An existing directory, or OWNER/NAME in the hub's cache, is the model; or the
  name of a preset. A name that ends as a file of rows does, or begins with
  tfds:, is the data, a second one the held-out data. Anything else that
  contains a colon is a reward function.

  Args:
    argument: the text after the colon, parts with commas between them.
    functions: whether the recipe takes reward functions, and needs one.
    lora: whether the recipe can train a LoRA.

  Raises:
    ValueError: a part is nothing of these or does not exist, or one is
      missing that `tiny` does not replace.
  """
  expected = _expected(functions, lora)
  kinds: dict[str, list[str]] = {}
  for part in argument.split(',') if argument else ():
    kinds.setdefault(_kind_of(part, expected, functions), []).append(part)
  folders, files = kinds.get('folder', []), kinds.get('file', [])
  presets, words = kinds.get('preset', []), frozenset(kinds.get('word', []))
  needed = 'tiny' not in words
  problems = (
    (len(folders) + len(presets) > 1, 'one model'),
    (len(files) > 2, 'two data sets at most'),
    ('lora' in words and not lora, 'no lora, whose head could not train'),
    ('lora' in words and not folders, 'a directory, whose weights lora adapts'),
    (needed and not folders + presets, 'a model'),
    (needed and not files, 'data'),
    (needed and functions and 'function' not in kinds, 'a reward function'),
  )
  for is_wrong, text in problems:
    if is_wrong:
      raise ValueError(f'{expected}, with {text}: got {argument!r}')
  paths = [_data(x) for x in files]
  return Own(
    folder=os.path.expanduser(folders[0]) if folders else None,
    preset=(*presets, 'tiny')[0],
    data=(*paths, None)[0],
    held_out=(*paths, None, None)[1],
    functions=tuple(kinds.get('function', ())),
    words=words,
  )


def _data(part: str) -> str:
  """Returns a file's path, or a TFDS name with the version that is here."""
  if tfds_names.is_name(part):
    return tfds_names.with_version(part)
  return os.path.abspath(os.path.expanduser(part))


def _kind_of(part: str, expected: str, functions: bool) -> str:
  """Returns the kind of one part of an argument."""
  path = os.path.expanduser(part)
  if part in ('lora', 'tiny'):  # a directory of this name is ./tiny
    return 'word'
  if os.path.isdir(path) or hub.folder(part) is not None:
    return 'folder'
  if tfds_names.is_name(part):
    return 'file'
  if part.lower().endswith(ROW_FILES):
    if not os.path.isfile(path):
      raise ValueError(
        f'a file of data must exist: got {part!r}, but there is no file '
        f'{os.path.abspath(path)}'
      )
    return 'file'
  if part in schema.PRESETS:
    return 'preset'
  if ':' in part and functions:
    return 'function'
  what = 'no directory' if '/' in part else 'none of these'
  raise ValueError(f'{expected}: got {part!r}, which is {what}{hub.hint(part)}')


def _expected(functions: bool, lora: bool) -> str:
  example = 'FILE:DIR,data.jsonl'
  if functions:
    example += ',module:function'
  return (
    "the argument after the recipe's name must be a HuggingFace directory that "
    f'exists (or a preset, such as small), a file of data ('
    f'{", ".join(ROW_FILES)}) or tfds:NAME, a second one that is held out,'
    f'{" reward functions," if functions else ""}{" lora" if lora else ""} or '
    f'tiny, as in {example}'
  )


def _node(options: Any) -> ml_collections.ConfigDict:
  """Returns a dataclass as a ConfigDict; None becomes a typed placeholder."""
  hints = typing.get_type_hints(type(options))
  config = ml_collections.ConfigDict()
  for field in dataclasses.fields(options):
    value = getattr(options, field.name)
    if value is None:
      kind = _type(hints[field.name])
      config[field.name] = ml_collections.config_dict.placeholder(kind)
    elif dataclasses.is_dataclass(value):
      config[field.name] = _node(value)
    elif isinstance(value, dict):
      config[field.name] = ml_collections.ConfigDict(
        {
          key: _node(child) if dataclasses.is_dataclass(child) else child
          for key, child in value.items()
        }
      )
    else:
      config[field.name] = value
  return config


def _type(hint: Any) -> type:
  """Returns the type of an optional field's values other than None."""
  assert isinstance(hint, types.UnionType), hint
  kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
  plain = [kind for kind in kinds if not dataclasses.is_dataclass(kind)]
  return plain[0] if plain else ml_collections.ConfigDict
