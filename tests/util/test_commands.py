"""The command-line parser, and the flags of every command."""

import dataclasses
import importlib
import re
import shlex
import subprocess
import sys

import pytest

from posttrain.util import commands, errors
from tests.fixtures import ROOT

COMMANDS = (
  'posttrain.main',
  'posttrain.generate',
  'posttrain.evaluate',
  'posttrain.make_pairs',
  'posttrain.export',
  'posttrain.serve.__main__',
  'posttrain.envs.__main__',
  'posttrain.envs.sql.__main__',
  'posttrain.report.__main__',
  'experiments.launch.__main__',
  'experiments.examples.replay',
)


@dataclasses.dataclass
class Flags:
  """Flags of each type."""

  config: str = commands.required('FILE', 'The recipe.')
  overrides: list[tuple[str, str]] = commands.overrides()
  port: int = commands.flag(80, 'The port.', least=0, most=65535)
  ids: tuple[int, ...] | None = commands.flag(None, 'Token ids.')
  ops: tuple[str, ...] = commands.flag(('+',), 'Operators.')
  split: str = commands.flag('train', 'The split.', choices=('train', 'eval'))
  dry_run: bool = commands.flag(False, 'Trains nothing.')
  sweep: list[str] = commands.several('KEY=VALUES', 'Some values.')


@dataclasses.dataclass
class Many:
  """Any number of arguments by position."""

  paths: list[str] = commands.required('PATH', 'Paths.', by_position=True)
  dry_run: bool = commands.flag(False, 'Writes nothing.')


PARSER = commands.Parser(
  Flags,
  'The test command.',
  hint=lambda name, _: '--config.a.lr' * (name == 'learning_rate'),
)


@pytest.mark.parametrize(
  ('words', 'name', 'value'),
  [
    ('', 'port', 80),
    ('--port 1 --port=8000', 'port', 8000),
    ('--ids=-1,2', 'ids', (-1, 2)),
    ("--ops=('+','x')", 'ops', ('+', 'x')),
    ('--split eval', 'split', 'eval'),
    ('--dry_run', 'dry_run', True),
    ('--sweep=a=1,2 --sweep b=1', 'sweep', ['a=1,2', 'b=1']),
    (
      '--config.b.lr=-1e-3 --config.a=x=y --config.b.lr -2',
      'overrides',
      [('b.lr', '-1e-3'), ('a', 'x=y'), ('b.lr', '-2')],
    ),
  ],
)
def test_values(words, name, value):
  flags = PARSER.parse(['--config=c.py', *words.split()])
  assert getattr(flags, name) == value and flags.config == 'c.py'


def test_arguments_by_position_stand_anywhere():
  parser = commands.Parser(Many, '')
  assert parser.parse(['a', '--dry_run', 'b']) == Many(['a', 'b'], True)


@pytest.mark.parametrize(
  ('words', 'parts'),
  [
    ('--prt=1', ("'--prt=1'", 'did you mean port?')),
    ('--learning_rate=1', ('did you mean --config.a.lr?',)),
    ('sft.steps=2', ("'sft.steps=2'", 'set by --config.sft.steps=2;')),
    ('--sft.steps 2', ("'--sft.steps'", 'set by --config.sft.steps;')),
    ('--dry-run', ("'--dry-run'", 'did you mean dry_run?')),
    ('--port=70000', ('--port', '65535', '70000')),
    ('--split=test', ('--split', "'test'", 'train', 'eval')),
  ],
)
def test_a_mistake_is_one_line_that_names_the_argument(words, parts, capsys):
  argv = ['--config=c.py', *words.split()]
  assert PARSER.run(lambda _: 0, argv) == errors.USAGE
  out, err = capsys.readouterr()
  (line,) = err.splitlines()
  assert line.startswith('error: ') and not out
  assert all(part in line for part in parts), line


def _raise(error):
  raise error


@pytest.mark.parametrize(
  ('command', 'code'),
  [
    (lambda flags: 75, 75),
    (lambda flags: _raise(KeyboardInterrupt()), 130),
    (lambda flags: _raise(ValueError('x')), 2),
  ],
)
def test_exit_codes(command, code, capsys):
  assert PARSER.run(command, ['--config=c'], __name__) == code
  assert len(capsys.readouterr().err.splitlines()) == (code in (2, 130))


def test_an_option_of_the_schema_has_its_default_and_comment():
  @dataclasses.dataclass
  class Options:
    # The length,
    # in tokens.
    length: int = 3
    other: str = 'x'

  field = commands.option(Options, 'length', least=1)
  assert field.default == 3
  assert field.metadata['flag'] == commands.Flag(
    'The length, in tokens.', least=1
  )


# --- every command ------------------------------------------------------------


def parser(command):
  return importlib.import_module(command).PARSER


def examples(text):
  """Returns the (module, arguments) of the commands in a help text."""
  text = text.replace('\\\n', ' ')
  found = re.findall(r'^ +python -m ([\w.]+) (.*)$', text, re.MULTILINE)
  return [(module, shlex.split(arguments)) for module, arguments in found]


@pytest.mark.parametrize('command', COMMANDS)
def test_examples_of_each_command_parse(command):
  commands = examples(parser(command).parser.format_help())
  assert commands
  for name, argv in commands:
    assert name == command.removesuffix('.__main__')
    flags = parser(command).parse(argv)
    config = getattr(flags, 'config', None)
    if config is not None:
      assert (ROOT / config.partition(':')[0]).is_file()


LIGHT = f"""
import importlib, sys
for name in {COMMANDS[:-1]!r}:
  command = importlib.import_module(name)
  assert command.main(['--help']) == 0
  assert command.main(['--no_such_flag']) == 2
  assert 'jax' not in sys.modules, name
"""


def test_help_and_mistakes_need_no_jax():
  """All commands of posttrain, and the launcher; the replay imports it."""
  done = subprocess.run(
    [sys.executable, '-c', LIGHT], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr


# --- the place of a process ---------------------------------------------------

JAX = {'JAX_COORDINATOR_ADDRESS': 'head:1234', 'JAX_NUM_PROCESSES': '4'}
SLURM = {
  'SLURM_JOB_ID': '7',
  'SLURM_STEP_NODELIST': 'n[1-2]',
  'SLURM_PROCID': '1',
}
NONE = (None, None, None)
ASKS = commands.Place()  # jax asks the launcher


@pytest.mark.parametrize(
  ('flags', 'environ', 'place'),
  [
    (NONE, {}, None),
    (('head:12', 4, 3), {}, commands.Place('head:12', 4, 3)),
    (('head:12', 1, 0), {}, None),
    (('auto', None, None), {}, ASKS),
    (NONE, {**JAX, 'JAX_PROCESS_ID': '2'}, commands.Place('head:1234', 4, 2)),
    (NONE, {**SLURM, 'SLURM_NTASKS': '2'}, ASKS),
    (NONE, {'OMPI_COMM_WORLD_SIZE': '2'}, ASKS),
    (NONE, {'TPU_WORKER_HOSTNAMES': 'a,b'}, ASKS),
  ],
)
def test_the_place(flags, environ, place):
  assert commands.place(*flags, environ) == place


@pytest.mark.parametrize(
  ('flags', 'environ', 'text'),
  [
    (('head:12', 2, 2), {}, "got ['head:12', 2, 2]"),
    (NONE, JAX, 'JAX_PROCESS_ID must be'),
    (NONE, {**JAX, 'JAX_PROCESS_ID': 'x'}, "'4', 'x']"),
  ],
)
def test_a_wrong_place_names_the_flag_or_variable(flags, environ, text):
  with pytest.raises(ValueError) as raised:
    commands.place(*flags, environ)
  assert text in str(raised.value)
