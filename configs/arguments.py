"""The argument after a recipe's name, as in `grpo:DIR,data.jsonl`.

It is a word (`check_word`), a HuggingFace directory and words (`parse_folder`),
or a user's own model, data and rewards (`parse_own`).
"""

import dataclasses
import glob
import os
import re
from collections.abc import Iterator, Sequence

from posttrain import schema
from posttrain.data import row_files
from posttrain.util import errors, hub

NAME = "the argument after the recipe's name"
_REWARD = 'reward='  # begins the part of a reward model's run
_TEACHER = 'teacher='  # begins that of a teacher


def check_word(argument: str, *known: str) -> None:
  """Checks the one word after a recipe's name; '' is always allowed.

  Raises:
    ValueError: any other word.
  """
  if argument not in ('', *known):
    *first, last = map(repr, ('', *known))
    raise ValueError(
      f'the argument of --config=RECIPE:ARGUMENT must be {", ".join(first)} '
      f'or {last}: got {argument!r}'
    )


def parse_folder(
  argument: str, known: tuple[str, ...]
) -> tuple[str | None, set[str]]:
  """Splits `DIR`, `WORD` or `DIR,WORD,WORD` after a recipe's name.

  Args:
    argument: the text after the colon. A path that exists may have commas.
    known: the allowed words.

  Returns:
    The HuggingFace directory, None if there is none, and the words.

  Raises:
    ValueError: the directory does not exist, a word is unknown, or `lora`
      comes without a directory whose weights it could adapt.
  """
  words = list(_parts(argument)) or ['']
  _check_filled(words, argument)
  folder = None if words[0] in known else words.pop(0)
  exists = folder and os.path.isdir(os.path.expanduser(folder))
  random = folder is None and 'lora' not in words
  if set(words) - set(known) or not (exists or random):
    raise ValueError(
      f'{NAME} must be a HuggingFace directory that exists, then words of '
      f'{known}, as in RECIPE:DIR,lora: got {argument!r}'
      f'{errors.near_path(folder) if folder and not exists else ""}'
    )
  return folder, set(words)


@dataclasses.dataclass(frozen=True)
class Own:
  """What a user names after a recipe for own data."""

  folder: str | None  # HuggingFace directory; None = a preset's random weights
  preset: str  # of schema.PRESETS, without a folder
  data: str | None  # a path, or tfds:NAME; None = the recipe's example
  held_out: str | None  # None = a tenth of the data
  rewards: dict[str, schema.RewardFn]  # by name
  words: frozenset[str]  # of 'lora' and 'tiny'
  teacher: schema.Reference | None = None
  epochs: float | None = None  # None = the recipe's number of steps


def parse_own(
  argument: str,
  rewards: bool = False,
  lora: bool = True,
  data: bool = True,
  teacher: bool = False,
) -> Own:
  """Reads `DIR,data.jsonl`, and more, after a recipe's name, in any order.

  An existing directory, of a run too, or OWNER/NAME in the hub's cache, is the
  model; or the name of a preset. A name that ends as a file of rows does, or
  begins with tfds:, is the data, a second one the held-out data. `reward=PATH`
  is the run of a reward model, `teacher=` a model or the address of a server,
  `epochs=NUMBER` the passes over the data; anything else that contains a colon
  is a reward function.

  Args:
    argument: the text after the colon, parts with commas between them. A path
      that exists may have commas of its own.
    rewards: whether the recipe takes reward functions and models.
    lora: whether the recipe can train a LoRA.
    data: whether there must be data; if not, an environment may replace them.
    teacher: whether the recipe needs a teacher.

  Raises:
    ValueError: a part is nothing of these or does not exist, or one is
      missing that `tiny` does not replace.
  """
  form = _form(rewards, lora, teacher)
  kinds: dict[str, list[str]] = {}
  parts = list(_parts(argument))
  _check_filled(parts, argument)
  for part in parts:
    kinds.setdefault(_kind_of(part, rewards, teacher, form), []).append(part)
  folders, files = kinds.get('folder', []), _joined(kinds.get('file', []))
  teachers, epochs = kinds.get('teacher', []), kinds.get('epochs', [])
  presets, words = kinds.get('preset', []), frozenset(kinds.get('word', []))
  needed = 'tiny' not in words
  passes = float(epochs[0].partition('=')[2]) if epochs else None
  problems = (
    (len(folders) + len(presets) > 1, 'one model'),
    (
      len(files) > 2,
      'two data sets at most (of several files: a folder, or x-*.jsonl)',
    ),
    ('lora' in words and not lora, 'no lora: its head could not train'),
    ('lora' in words and not folders, 'a directory, whose weights lora adapts'),
    (needed and not folders + presets, 'a model'),
    (needed and data and not files, 'data'),
    (needed and len(teachers) != teacher, 'one teacher'),
    (len(epochs) > 1 or (epochs and not files), 'data, and epochs= once'),
    (passes == 0, 'epochs= above 0'),
  )
  for is_wrong, text in problems:
    if is_wrong:
      raise ValueError(f'{NAME} must have {text}: got {argument!r}; {form}')
  paths = [_data(x) for x in files]
  _check_apart(paths)
  if len(paths) == 1 and not row_files.is_tfds(paths[0]):  # a folder of splits
    held_out = row_files.files(paths[0], 'eval')
    paths *= 1 + bool(held_out and held_out != row_files.files(paths[0]))
  return Own(
    folder=os.path.expanduser(folders[0]) if folders else None,
    preset=(*presets, 'tiny')[0],
    data=(*paths, None)[0],
    held_out=(*paths, None, None)[1],
    rewards=_rewards(kinds.get('function', []), kinds.get('reward model', [])),
    words=words,
    teacher=_teacher(*teachers[:1]),
    epochs=passes,
  )


def _teacher(part: str = '') -> schema.Reference | None:
  """Returns the model, or the model on a server, that a part names."""
  path = part.removeprefix(_TEACHER)
  if '://' not in path:
    return absolute(hub.folder(path) or path) if path else None
  address, _, name = path.partition('#')
  return schema.Endpoint(name=name, base_url=address)


def _parts(argument: str) -> Iterator[str]:
  """Splits an argument at its commas, but not within a path that exists.

  Spaces around a part are left out, unless a path that exists has them.
  """
  words = argument.split(',') if argument else []
  while words:
    count = len(words)
    while count > 1 and not os.path.exists(_path(','.join(words[:count]))):
      count -= 1
    part = ','.join(words[:count])
    yield part if os.path.exists(_path(part)) else part.strip()
    words = words[count:]


def _check_filled(parts: Sequence[str], argument: str) -> None:
  """Refuses an argument with an empty part between, before or after commas."""
  if argument and '' in parts:
    raise ValueError(
      f'{NAME} must have no empty part: got {argument!r}; leave out the '
      'extra comma'
    )


def _path(part: str) -> str:
  path = part.removeprefix(_REWARD).removeprefix(_TEACHER)
  return os.path.expanduser(path)


def _joined(files: Sequence[str]) -> list[str]:
  """Returns data sets; files whose names differ in numbers alone are one."""
  if len({*files}) < len(files):  # is refused, or a TFDS data set's splits
    return [*files]
  joined: dict[str, list[str]] = {}
  for file in files:
    key = file if row_files.is_tfds(file) else re.sub(r'\d+', '0', file)
    joined.setdefault(key, []).append(file)
  return [','.join(group) for group in joined.values()]


def _data(part: str) -> str:
  """Returns a file's path, or a TFDS name with the version that is here."""
  if row_files.is_tfds(part):
    return row_files.find_tfds(part)[1]
  return (
    absolute(part)
    if os.path.exists(part)
    else ','.join(map(absolute, part.split(',')))
  )


def absolute(path: str) -> str:
  return os.path.abspath(os.path.expanduser(path))


def _check_apart(paths: Sequence[str]) -> None:
  """Refuses held-out rows that are those to train on.

  A TFDS data set without a split is `train`, and where it is held out another.
  """
  if len(paths) < 2:
    return
  data, held_out = paths
  if row_files.is_tfds(data):
    is_same = data == held_out and row_files.parse_tfds(data)['split']
  else:
    is_same = row_files.files(data) == row_files.files(held_out, 'eval')
  if is_same:
    raise ValueError(
      "the second data set after the recipe's name, which is held out, must "
      f'be another than the first: got {data!r} twice; without a second one a '
      'tenth is held out'
    )


def _rewards(
  functions: Sequence[str], models: Sequence[str]
) -> dict[str, schema.RewardFn]:
  """Returns rewards by name: of functions, and `learned` of a model.

  Where several would have one name, each has its module's before it, or its
  folder's.
  """
  entries = []
  for path in functions:
    module, _, name = path.rpartition(':')
    name = name.removeprefix('KEPT.')  # a function of this process
    entries.append((module, name, schema.RewardFn(fn=path)))
  for part in models:
    path = os.path.abspath(_path(part))
    name = os.path.basename(path)
    entries.append((name, 'learned', schema.RewardFn(model=path)))
  short = [name for _, name, _ in entries]
  rewards: dict[str, schema.RewardFn] = {}
  for where, name, reward in entries:
    name = name if short.count(name) == 1 else f'{where}_{name}'
    name = re.sub(r'[^A-Za-z0-9_-]', '_', name)
    if name in rewards:
      path = reward.fn or reward.model
      raise ValueError(
        f'{NAME} must have rewards with names of their own: got {path!r} '
        f'beside another reward that is named {name!r}; leave it out, or '
        'rename one'
      )
    rewards[name] = reward
  return rewards


def _kind_of(part: str, rewards: bool, teacher: bool, form: str) -> str:
  """Returns the kind of one part of an argument."""
  path = _path(part)
  if part in ('lora', 'tiny'):  # a directory of this name is ./tiny
    return 'word'
  if part.startswith(_REWARD) and rewards:
    if os.path.isdir(path):
      return 'reward model'
  elif part.startswith(_TEACHER) and teacher:
    if os.path.isdir(path) or hub.folder(path) or '://' in path:
      return 'teacher'
  elif re.fullmatch(r'epochs=(\d+\.?\d*|\.\d+)', part):
    return 'epochs'
  elif os.path.isdir(path) and not os.path.exists(f'{path}/config.json'):
    return 'file' if row_files.files(path) else 'folder'
  elif os.path.isdir(path) or hub.folder(part) is not None:
    return 'folder'
  elif row_files.is_tfds(part):
    return 'file'
  elif part.lower().endswith(row_files.ENDINGS):
    if glob.glob(path):
      return 'file'
  elif part in schema.PRESETS:
    return 'preset'
  elif rewards and ':' in part and '' not in part.split(':'):
    return 'function'
  near = errors.nearest(part, ['lora', 'tiny', *schema.PRESETS])
  near = near or errors.near_path(path)
  if not part.lower().endswith(row_files.ENDINGS):
    near = near or hub.hint(part)
  if '://' in part and not part.startswith('teacher='):
    near = '; an address is not read: download it first'
  raise ValueError(
    f'{NAME} must have parts that exist: got {part!r}{near}; {form}'
  )


def _form(rewards: bool, lora: bool, teacher: bool) -> str:
  """Returns what an argument consists of, for errors."""
  words = ' or '.join(('lora', 'tiny') if lora else ('tiny',))
  functions = (
    f', module:function or {_REWARD}PATH of a reward model' if rewards else ''
  )
  functions += f', {_TEACHER}DIR|RUN|http://HOST:PORT/v1' if teacher else ''
  return (
    'its parts are a HuggingFace directory or the workdir of a run (or a '
    f'preset, such as small), data ({", ".join(row_files.ENDINGS)}, '
    "tfds:NAME, or a folder; of files in .json a pattern, 'FOLDER/*.json'), "
    f'others that are held out{functions}, epochs=N, {words}, as in '
    f'RECIPE:DIR,data.jsonl{",module:function" if rewards else ""}'
  )
