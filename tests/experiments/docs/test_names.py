"""The page of other libraries' names: every alias, and only keys that exist."""

import pathlib
import re

import pytest

from experiments.docs import names, options
from posttrain import main
from posttrain.config import aliases

PAGE = pathlib.Path(__file__).parents[3] / 'docs' / 'names.md'
SECTIONS = {(x.path, x.kind) for x in options.sections()}
PATHS = {path for path, _ in SECTIONS}
KEYS = PATHS | {
  f'{x.path}.{field}'.lstrip('.')
  for x in options.sections()
  for field in x.options.__dataclass_fields__
}
ROOTS = {key.partition('.')[0] for key in KEYS}
FLAGS = {f'--{name}' for name in main.Flags.__dataclass_fields__}


def _rows(text):
  """Returns the cells of each row of the tables in a text."""
  lines = [x for x in text.splitlines() if x.startswith('| ')]
  return [
    re.split(r' ?(?<!\\)\| ?', line)[1:-1]
    for line in lines
    if not line.startswith(('| ours', '| ---'))
  ]


def test_every_alias_is_in_a_row_with_its_key():
  rows = _rows(names.section())
  assert len(rows) == len(aliases.ROWS) > 80
  for (ours, *theirs), entry in zip(rows, aliases.ROWS, strict=True):
    assert f'`{entry.key}`' in ours
    assert ours.startswith('none') != entry.equal
    codes = re.findall('`(.+?)`', ' '.join(theirs))
    expected = [x for text in entry.names.values() for x in text.split()]
    assert sorted(codes) == sorted(expected)


@pytest.mark.parametrize('key', sorted({x.key for x in aliases.ROWS}))
def test_every_key_of_an_alias_exists(key):
  assert key in (FLAGS if key.startswith('--') else KEYS)


def test_every_key_in_the_rows_written_by_hand_exists():
  _, _, text = PAGE.read_text().partition('\n## Values')
  text, _, _ = text.partition('\n## ')
  rows = _rows(text)
  assert len(rows) > 25
  for ours, *_ in rows:
    codes = re.findall('`(.+?)`', ours)
    for key, _, value in (code.partition('=') for code in codes):
      if key.partition('.')[0] not in ROOTS:
        continue
      assert key in KEYS, key
      if value and key in PATHS:
        assert (key, value) in SECTIONS, f'{key}={value}'
