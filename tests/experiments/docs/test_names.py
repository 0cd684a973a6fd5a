"""The page of other libraries' names: only keys that exist."""

import pytest

from experiments.docs import options
from posttrain import evaluate, export, generate, main, make_pairs
from posttrain.config import names
from posttrain.serve import __main__

KEYS = {x.path for x in options.sections()} | {
  f'{x.path}.{field}'.lstrip('.')
  for x in options.sections()
  for field in x.options.__dataclass_fields__
}
COMMANDS = main, evaluate, export, generate, make_pairs, __main__
FLAGS = {f'--{name}' for x in COMMANDS for name in x.Flags.__dataclass_fields__}


@pytest.mark.parametrize('key', names.NAMES)
def test_every_key_of_a_name_exists(key):
  assert key.partition('=')[0] in (FLAGS if key.startswith('--') else KEYS)
