"""Names of TFDS data sets that are on this machine; downloads none.

    tfds:NAME[/CONFIG][:VERSION][:SPLIT]      tfds:gsm8k:1.0.0:train[10%:]

`find` looks for a name in the folder of the variable TFDS_DATA_DIR, or in
~/tensorflow_datasets, where TFDS writes what it prepares. The code of a data
set is neither needed nor run.
"""

import dataclasses
import os
import pathlib
import re

PREFIX = 'tfds:'
_NAME = re.compile(
  r'tfds:(?P<name>\w+)(/(?P<config>\w[\w.+-]*))?'
  r'(:(?P<version>\d+\.\d+\.\d+))?(:(?P<split>[A-Za-z]\w*(\[[^\[\]]*\])?))?',
  re.ASCII,
)
_VERSION = re.compile(r'\d+\.\d+\.\d+', re.ASCII)


@dataclasses.dataclass(frozen=True)
class Name:
  """The parts of a name; None = not given."""

  name: str
  config: str | None
  version: str | None  # None = the newest one
  split: str | None  # with a slice, perhaps, as in train[10%:]


def is_name(path: str | os.PathLike[str]) -> bool:
  return os.fspath(path).startswith(PREFIX)


def parse(text: str) -> Name:
  """Returns the parts of a name.

  Raises:
    ValueError: the text has another form.
  """
  parts = _NAME.fullmatch(text)
  if not parts:
    raise ValueError(
      'the name of a TFDS data set must have the form '
      'tfds:NAME[/CONFIG][:VERSION][:SPLIT], as in tfds:gsm8k:1.0.0:train: '
      f'got {text!r:.200}'
    )
  return Name(**parts.groupdict())


def find(text: str) -> str:
  """Returns the folder of a name: of its version, or of the newest one.

  Raises:
    ValueError: there is none; names the folder in which it was looked for.
  """
  wanted, root = parse(text), _root()
  known = _versions(root / wanted.name)
  fitting = [
    (config, version)
    for config, version in known
    if wanted.config in (None, config) and wanted.version in (None, version)
  ]
  configs = {config for config, _ in fitting}
  if len(configs) == 1:
    config, version = max(fitting, key=lambda x: _number(x[1]))
    return str(root / wanted.name / (config or '') / version)
  if not known:
    name = '/'.join(filter(None, (wanted.name, wanted.config)))
    raise ValueError(
      f'{text!s:.200} must be a TFDS data set in {root}: got none of '
      'that name; nothing is downloaded: prepare it where tensorflow is '
      f'installed, by `tfds build {name} --file_format=array_record`, or set '
      'TFDS_DATA_DIR'
    )
  shown = sorted(':'.join(filter(None, parts)) for parts in known)
  raise ValueError(
    f'{text!s:.200} must name one data set in {root / wanted.name}: got '
    f'{len(configs)} that fit, of {shown}; name CONFIG and VERSION'
  )


def with_version(text: str) -> str:
  """Returns a name with the config and version that `find` finds now."""
  wanted, folder = parse(text), pathlib.Path(find(text))
  *config, version = folder.relative_to(_root() / wanted.name).parts
  parts = ('/'.join((wanted.name, *config)), version, wanted.split)
  return PREFIX + ':'.join(filter(None, parts))


def _root() -> pathlib.Path:
  folder = os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'
  return pathlib.Path(folder).expanduser().absolute()


def _versions(folder: pathlib.Path) -> list[tuple[str | None, str]]:
  """Returns (config or None, version) of the data sets in a folder."""
  found = []
  for pattern in ('*', '*/*'):
    for file in folder.glob(f'{pattern}/dataset_info.json'):
      *config, version = file.parent.relative_to(folder).parts
      if _VERSION.fullmatch(version):
        found.append((*config, None)[:1] + (version,))
  return found


def _number(version: str) -> tuple[int, ...]:
  return tuple(map(int, version.split('.')))
