"""The command-line parser, and the flags of every command."""

import dataclasses
import importlib
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from posttrain.util import flags as flags_lib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
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

  config: str = flags_lib.required('FILE', 'The recipe.')
  overrides: list[tuple[str, str]] = flags_lib.overrides()
  prompt: str | None = flags_lib.flag(None, 'A text.', empty=True)
  name: str = flags_lib.flag('', 'A name.')
  port: int = flags_lib.flag(80, 'The port.', least=0, most=65535)
  steps: int | None = flags_lib.flag(
    None, 'Number of steps.', least=1, also=('iterations',)
  )
  temperature: float = flags_lib.flag(1.0, 'The temperature.')
  ids: tuple[int, ...] | None = flags_lib.flag(None, 'Token ids.')
  ops: tuple[str, ...] = flags_lib.flag(('+',), 'Operators.')
  split: str = flags_lib.flag('train', 'The split.', choices=('train', 'eval'))
  dry_run: bool = flags_lib.flag(False, 'Trains nothing.')
  sweep: list[str] = flags_lib.several('KEY=VALUES', 'Some values.')
  file: str | None = flags_lib.flag(
    None, 'A file.', only_with=('config', 'port')
  )


@dataclasses.dataclass
class Folders:
  """Two arguments by position."""

  source: str = flags_lib.required('SOURCE', 'The source.', by_position=True)
  target: str = flags_lib.required('TARGET', 'The target.', by_position=True)
  dry_run: bool = flags_lib.flag(False, 'Writes nothing.')


@dataclasses.dataclass
class Many:
  """Any number of arguments by position."""

  paths: list[str] = flags_lib.required(
    'PATH', 'Paths.', by_position=True, also=('folder',)
  )
  dry_run: bool = flags_lib.flag(False, 'Writes nothing.')


PARSER = flags_lib.Parser(
  Flags,
  'The test command.',
  hint=lambda name: 'lr is --config.a.lr' if name == 'lr' else '',
)
FOLDERS = flags_lib.Parser(Folders, 'The copy command.')


def parse(*argv):
  return PARSER.parse(['--config=c.py', *argv])


def test_a_flag_that_takes_several_has_all_values_in_order():
  words = ['--sweep=a=1,2', '--sweep', 'b=-1', '--sweep=--x=y']
  assert parse(*words).sweep == ['a=1,2', 'b=-1', '--x=y']
  assert parse().sweep == []
  with pytest.raises(ValueError, match='--sweep must not be empty'):
    parse('--sweep=')
  assert '  --sweep KEY=VALUES\n' in PARSER.help()


@pytest.mark.parametrize(
  ('name', 'text', 'value'),
  [
    ('prompt', 'hello = 1', 'hello = 1'),
    ('prompt', '-1', '-1'),
    ('prompt', '-x', '-x'),
    ('prompt', '', ''),
    ('name', '', ''),
    ('port', '8000', 8000),
    ('temperature', '-1', -1.0),
    ('temperature', '1e-3', 1e-3),
    ('ids', '1,2,3', (1, 2, 3)),
    ('ids', '-1,2', (-1, 2)),
    ('ops', "('+', 'x')", ('+', 'x')),
    ('split', 'eval', 'eval'),
    ('dry_run', 'true', True),
    ('dry_run', 'False', False),
  ],
)
def test_a_value_may_follow_an_equals_sign_or_a_space(name, text, value):
  assert getattr(parse(f'--{name}={text}'), name) == value
  assert getattr(parse(f'--{name}', text), name) == value


def test_flags_that_are_not_given_have_their_defaults():
  assert parse() == Flags('c.py')
  assert PARSER.parse(['--config', 'c.py']) == Flags('c.py')


def test_a_bool_without_a_value_is_true():
  assert parse('--dry_run').dry_run
  assert parse('--dry_run', '--port=1') == Flags('c.py', dry_run=True, port=1)
  assert FOLDERS.parse(['--dry_run', 'a', 'b']) == Folders('a', 'b', True)


def test_overrides_keep_their_order_and_their_text():
  flags = parse(
    '--config.b.lr=-1e-3',
    '--config.a=x=y',
    '--port=1',
    '--config.b.lr',
    '-2',
    "--config.envs={'a': 1}",
  )
  assert flags.overrides == [
    ('b.lr', '-1e-3'),
    ('a', 'x=y'),
    ('b.lr', '-2'),
    ('envs', "{'a': 1}"),
  ]
  assert flags.config == 'c.py' and flags.port == 1
  parse().overrides.append(('a', '1'))
  assert parse().overrides == []


def test_the_last_of_two_values_counts():
  assert parse('--port=1', '--port', '2').port == 2
  assert parse('--config=d.py').config == 'd.py'


def test_several_arguments_by_position_are_a_list():
  parser = flags_lib.Parser(Many, '')
  flags = parser.parse(['a', '-b', '--dry_run'])
  assert (flags.paths, flags.dry_run) == (['a', '-b'], True)
  assert parser.parse(['a', '--dry_run', '-b']) == flags
  with pytest.raises(ValueError, match='PATH must be given'):
    parser.parse(['--dry_run'])
  assert '\n  PATH\n' in parser.help()
  message = "got '--folder=a'; PATH is given alone, without a name"
  with pytest.raises(ValueError, match=message):
    parser.parse(['--folder=a'])


def test_arguments_by_position_come_in_the_order_of_fields():
  expected = Folders('a', '-b', dry_run=True)
  assert FOLDERS.parse(['a', '--dry_run', '-b']) == expected


@pytest.mark.parametrize(
  ('argv', 'message'),
  [
    (['--prt=1'], "got '--prt=1'; did you mean --port?"),
    (['--dry-run'], "got '--dry-run'; did you mean --dry_run?"),
    (['--temp=1'], "got '--temp=1'; did you mean --temperature?"),
    (['--hepl'], "got '--hepl'; did you mean --help?"),
    (['--iterations=1'], "'--iterations=1'; did you mean --steps=N?"),
    (['--lr=1'], "got '--lr=1'; lr is --config.a.lr; --help lists all"),
    (['--x=1'], "'--x=1'; options of the config are --config.KEY=VALUE;"),
    (['--confg.a.lr=1'], "'--confg.a.lr=1'; did you mean --config.a.lr?"),
    (['--overrides=1'], "arguments must be flags of this command: got '--ov"),
    (['--config.=1'], "got '--config.=1'"),
    (['port=1'], "got 'port=1'; did you mean --port?"),
    (['-port=1'], "got '-port=1'; did you mean --port?"),
    (['--'], "got '--'"),
    ([''], "got ''"),
    (['--port'], "--port must have a value: got '--port'; write --port=N"),
    (
      ['--prompt', '--dry_run'],
      "--prompt must have a value: got '--prompt'; '--dry_run' is the next "
      'flag; write --prompt=TEXT',
    ),
    (['--config.a='], "--config.a must not be empty: got ''"),
    (['--config.a'], "'--config.a'; write --config.a=VALUE"),
    (['extra'], "got 'extra'; --help lists all"),
    (['--no_such_flag'], "flag'; options of the config are --config.KEY=VAL"),
    (['--prompt', '--x y'], "got '--x y'; options of"),
    (['--config='], "--config must not be empty: got ''"),
    (['--port='], "--port must be a whole number: got ''"),
    (['--port=1.5'], "--port must be a whole number: got '1.5'"),
    (['--port=-1'], '--port must be at least 0: got -1'),
    (['--port', '-1'], '--port must be at least 0: got -1'),
    (['--port=70000'], '--port must be at most 65535: got 70000'),
    (['--steps=0'], '--steps must be at least 1: got 0'),
    (['--temperature=hot'], "--temperature must be a number: got 'hot'"),
    (['--ids=1,,2'], '--ids must be whole numbers with commas between them'),
    (['--ops=+'], "--ops must be a tuple of texts, as in ('a', 'b'): got '+'"),
    (['--split=test'], "--split must be one of ('train', 'eval'): got 'test'"),
    (['--dry_run=1'], "--dry_run must be true or false: got '1'"),
    (['--dry_run', '1'], "got '1'"),
    (
      ['--file=x', '--steps=2', '--config.a=1', '--port=1'],
      '--file=TEXT must be given with --config=FILE and --port=N alone: got '
      '--steps --config.a too, which nothing would read',
    ),
  ],
)
def test_a_mistake_is_one_line_that_names_the_argument(argv, message, capsys):
  assert PARSER.run(lambda _: 0, ['--config=c.py', *argv]) == 2
  out, err = capsys.readouterr()
  (line,) = err.splitlines()
  assert line.startswith('error: ') and message in line and not out


def test_a_missing_flag_is_named():
  with pytest.raises(ValueError, match='^--config=FILE must be given$'):
    PARSER.parse(['--dry_run'])
  with pytest.raises(ValueError, match='^--config=FILE must be given$'):
    PARSER.parse([])
  with pytest.raises(ValueError, match='^TARGET must be given$'):
    FOLDERS.parse(['a'])
  with pytest.raises(ValueError, match="got 'c'"):
    FOLDERS.parse(['a', 'b', 'c'])


def _raise(error):
  raise error


@pytest.mark.parametrize(
  ('command', 'code'),
  [
    (lambda flags: None, 0),
    (lambda flags: 75, 75),
    (lambda flags: _raise(KeyboardInterrupt()), 130),
    (lambda flags: _raise(ValueError('x must be y: got z')), 2),
    (lambda flags: _raise(RuntimeError('x failed')), 1),
  ],
)
def test_exit_codes(command, code, capsys):
  assert PARSER.run(command, ['--config=c'], __name__) == code
  assert len(capsys.readouterr().err.splitlines()) == (code in (1, 2, 130))


def test_errors_of_other_code_are_raised():
  argv = ['--config=c']
  with pytest.raises(ValueError, match='a bug'):
    PARSER.run(lambda flags: _raise(ValueError('a bug')), argv)
  with pytest.raises(ZeroDivisionError):
    PARSER.run(lambda flags: 1 // 0, argv, __name__)


def test_the_arguments_of_the_process_are_the_default(monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['program', '--config=c', '--port=7'])
  assert PARSER.run(lambda flags: flags.port) == 7


@pytest.mark.parametrize('word', ['--help', '-h'])
def test_help_comes_before_mistakes(word, capsys):
  assert PARSER.run(lambda flags: 1, ['--prot=1', word]) == 0
  assert capsys.readouterr().out == PARSER.help() + '\n'


def test_help_gives_the_default_and_the_meaning_of_each_flag():
  text = PARSER.help()
  assert text.startswith('The test command.\n\nFlags (')
  for line in (
    '--config FILE\n      The recipe. (required)\n',
    '--config.KEY VALUE\n      Sets a key of the config;',
    '--prompt TEXT\n      A text. (default: none)\n',
    "--name TEXT\n      A name. (default: '')\n",
    '--port N\n      The port. (default: 80)\n',
    '--temperature X\n      The temperature. (default: 1.0)\n',
    '--ids N,N,...\n      Token ids. (default: none)\n',
    "--ops TUPLE\n      Operators. (default: ('+',))\n",
    '--split train|eval\n      The split. (default: train)\n',
    '--dry_run [true|false]\n      Trains nothing. (default: false)\n',
  ):
    assert f'  {line}' in text
  assert '  SOURCE\n      The source. (required)\n' in FOLDERS.help()


def test_an_option_of_the_schema_has_its_default_and_comment():
  @dataclasses.dataclass
  class Options:
    # The length,
    # in tokens.
    length: int = 3
    other: str = 'x'

  field = flags_lib.option(Options, 'length', least=1)
  assert field.default == 3
  assert field.metadata['flag'] == flags_lib.Flag(
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
def test_help_of_each_command_lists_every_flag_with_its_default(command):
  module = importlib.import_module(command)
  text = module.PARSER.help()
  assert text.startswith(module.__doc__.strip())
  _, _, flags = text.partition('\nFlags (')
  rows = re.findall(r'^  (?:--)?(\S+).*\n((?: {6}.*\n?)+)', flags, re.M)
  fields = dataclasses.fields(module.Flags)
  for (name, words), field in zip(rows, fields, strict=True):
    rules = field.metadata['flag']
    assert rules.help.endswith('.')
    meaning, _, default = ' '.join(words.split()).rpartition('. (')
    assert f'{meaning}.' == rules.help
    if rules.by_position or rules.repeated:
      assert name == (rules.value or 'config.KEY')
      continue
    assert name == field.name
    absent = field.default, field.default_factory
    if absent == (dataclasses.MISSING, dataclasses.MISSING):
      assert default == 'required)'
    else:
      assert default.startswith('default: ')
  assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize('command', COMMANDS)
def test_examples_of_each_command_parse(command):
  commands = examples(parser(command).help())
  assert commands
  for name, argv in commands:
    assert name == command.removesuffix('.__main__')
    flags = parser(command).parse(argv)
    config = getattr(flags, 'config', None)
    if config is not None:
      assert (ROOT / config.partition(':')[0]).is_file()


@pytest.mark.parametrize('command', COMMANDS)
def test_an_unknown_flag_of_each_command_is_exit_code_2(command, capsys):
  assert importlib.import_module(command).main(['--no_such_flag=1']) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.endswith('; --help lists all')


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


def test_main_of_a_command_is_a_console_script():
  """Without arguments it reads those of the process."""
  done = subprocess.run(
    [
      sys.executable,
      '-c',
      'import sys; from posttrain import export; sys.exit(export.main())',
      '--checkpoint=x',
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert done.stderr == 'error: --folder=DIR must be given\n'
