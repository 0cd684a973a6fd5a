"""The page of other libraries' names: only keys that exist."""

import pathlib

import pytest

from experiments.docs import options
from posttrain import main
from posttrain.config import names

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


@pytest.mark.parametrize('key', names.NAMES)
def test_every_key_of_a_name_exists(key):
  assert key.partition('=')[0] in (FLAGS if key.startswith('--') else KEYS)
