"""The command-line parser of every command: argparse over a dataclass of flags.

    @dataclasses.dataclass
    class Flags:
      checkpoint: str = flags.required('PATH', 'A workdir or a directory.')
      port: int = flags.flag(8000, 'The port to bind.', least=0, most=65535)

    PARSER = flags.Parser(Flags, __doc__)

    def main(argv: Sequence[str] | None = None) -> int:
      return PARSER.run(serve, argv)

argparse splits, converts and explains the arguments. Besides, a bool is true as
`--NAME` alone, and `--config.KEY=VALUE` are overrides: (key, text) pairs in the
order given. `run` prints every mistake as one line and returns exit code 2.
"""

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import logging
import math
import os
import sys
import threading
import typing
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from posttrain.util import errors, exits, memory

# The help of --checkpoint, which several commands take.
CHECKPOINT = (
  "A run's workdir, one of its checkpoints/<stage> folders, one of their step "
  'folders, a HuggingFace or PEFT directory, or a model in the cache of the '
  'HuggingFace hub, OWNER/NAME.'
)
# The help of --trust_config, which several commands take.
TRUST_CONFIG = (
  'Trusts the names in a config.json or a checkpoint: functions other than '
  'those of posttrain and configs, servers, addresses, environment variables '
  'of keys, and a folder of compiled programs. They are printed.'
)

# After a failure, the longest that the exit waits for threads.
_EXIT_SECONDS = 10.0
T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Flag:
  """The rules and the help of a flag; name, type and default are the field's.

  Fields:
    help: its meaning, for `--help`.
    value: placeholder of the value, such as 'PATH'; '' = one for the type.
    if_absent: the default in words, where the value alone is unclear.
    choices: the allowed values; () = any.
    least: lowest allowed number.
    most: highest allowed number.
    by_position: whether it is given without a name, in the order of fields.
    repeated: whether it is the list of overrides.
  """

  help: str
  value: str = ''
  if_absent: str = ''
  choices: tuple[str, ...] = ()
  least: float = -math.inf
  most: float = math.inf
  by_position: bool = False
  repeated: bool = False


def flag(default: Any, help: str, **rules: Any) -> Any:
  """Returns a dataclass field: a flag with a default; rules as in `Flag`."""
  return dataclasses.field(
    default=default, metadata={'flag': Flag(help, **rules)}
  )


def required(value: str, help: str, **rules: Any) -> Any:
  """Returns a dataclass field: a flag that must be given."""
  return dataclasses.field(metadata={'flag': Flag(help, value, **rules)})


def checkpoint() -> Any:
  """Returns a dataclass field: the flag --checkpoint."""
  return required('PATH', CHECKPOINT)


def compilation_cache() -> Any:
  """Returns a dataclass field: the flag --compilation_cache."""
  return flag(
    None,
    'The folder of compiled programs; a checkpoint does not name it.',
    value='DIR',
    if_absent='~/.cache/posttrain/compiled; none for a run without one',
  )


def overrides() -> Any:
  """Returns a dataclass field: the list of (dotted key, text) overrides."""
  return several(
    'VALUE',
    'Sets a key of the config; any number of them, applied in order. All keys, '
    'with defaults and meanings: posttrain/schema/.',
    repeated=True,
  )


def several(value: str, help: str, **rules: Any) -> Any:
  """Returns a dataclass field: a flag given any number of times, a list."""
  rules.setdefault('if_absent', 'none')
  return dataclasses.field(
    default_factory=list, metadata={'flag': Flag(help, value, **rules)}
  )


def option(kind: type, name: str, **rules: Any) -> Any:
  """Returns a dataclass field: a flag for an option of the schema.

  Args:
    kind: dataclass of `posttrain.schema`, whose default is the flag's.
    name: the option; the comment above it is the help.
    **rules: as in `Flag`.
  """
  lines = [line.strip() for line in inspect.getsource(kind).splitlines()]
  row = next(i for i, x in enumerate(lines) if x.startswith(f'{name}: '))
  comment: list[str] = []
  while lines[row - 1].startswith('#'):
    row -= 1
    comment.insert(0, lines[row].removeprefix('#').strip())
  return flag(getattr(kind, name), ' '.join(comment), **rules)


class Parser(Generic[T]):
  """Parses a command's arguments into its dataclass of flags."""

  def __init__(
    self,
    kind: type[T],
    doc: str | None,
    hint: Callable[[str], str] = lambda name: '',
  ):
    """Prepares the flags.

    Args:
      kind: dataclass of `flag`s.
      doc: the command's docstring.
      hint: returns what an unknown flag means as a key of the config, or ''.
    """
    self._kind, self._hint = kind, hint
    self._overrides = ''  # the field with the overrides, if any
    self._bools: set[str] = set()
    self._required: list[str] = []
    self._parser = _ArgumentParser(
      usage=argparse.SUPPRESS,
      description=(doc or '').strip(),
      formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
        prog, max_help_position=6, width=80
      ),
      argument_default=argparse.SUPPRESS,
      allow_abbrev=False,
    )
    for field in dataclasses.fields(typing.cast(Any, kind)):
      self._add(field)

  def _add(self, field: dataclasses.Field) -> None:
    """Adds the argument of a flag."""
    rules, label = field.metadata['flag'], f'--{field.name}'
    base = next(x for x in _TYPES if field.type in (x, x | None))
    value = _TYPES[base][2]
    missing = dataclasses.MISSING
    is_required = field.default is missing and field.default_factory is missing
    default = rules.if_absent or str(field.default) or "''"
    default = 'required' if is_required else f'default: {default}'
    options: dict[str, Any] = {
      'help': f'{rules.help} ({default})'.replace('%', '%%'),
      'metavar': rules.value or '|'.join(rules.choices) or value,
    }
    if rules.repeated:
      self._overrides = field.name
      self._parser.add_argument('--config.KEY', **options)
      return
    options['type'] = functools.partial(_read, base, rules)
    if rules.choices:
      options['choices'] = rules.choices
    if base is bool:
      self._bools.add(label)
    if base == list[str]:
      options |= {'nargs': '+'} if rules.by_position else {'action': 'append'}
    if rules.by_position:
      label = field.name
    elif is_required:
      self._required.append(field.name)
    self._parser.add_argument(label, **options)

  def run(
    self,
    command: Callable[[T], int | None],
    argv: Sequence[str] | None = None,
    *packages: str,
  ) -> int:
    """Parses the arguments and runs a command; prints help and errors.

    Args:
      command: a function of the flags; returns an exit code, None = 0.
      argv: the arguments; None = those of the process.
      *packages: as in `errors.report`.

    Returns:
      The exit code, as in `exits`, or the command's own.
    """
    is_process = argv is None
    if is_process:
      argv = sys.argv[1:]
      logging.basicConfig(format='%(levelname)s: %(message)s')
      logging.captureWarnings(True)
      warnings.formatwarning = lambda message, *args, **options: str(message)
    try:
      flags = self.parse(argv)
      memory.check_limit()
      code = command(flags) or exits.DONE
    except _Helped:
      return exits.DONE
    except KeyboardInterrupt:
      print('interrupted', file=sys.stderr)
      code = exits.INTERRUPTED
    except Exception as error:
      code = errors.report(error, *packages)
    if is_process and code != exits.DONE:
      # Threads of libraries may wait for what has failed.
      timer = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
      timer.daemon = True
      timer.start()
    return code

  def parse(self, argv: Sequence[str]) -> T:
    """Returns the flags.

    Raises:
      ValueError: names the argument that is wrong, unknown or missing.
    """
    words, overrides, rest = [], [], list(argv)
    while rest:
      word = rest.pop(0)
      name, equals, value = word.partition('=')
      if self._overrides and name.startswith('--config.'):
        if not equals and not rest:
          raise ValueError(f'{name} must have a value: write {name}=VALUE')
        value = value if equals else rest.pop(0)
        overrides.append((name.removeprefix('--config.'), value))
      elif word in self._bools and rest[:1] not in (['true'], ['false']):
        words.append(f'{word}=true')
      else:
        words.append(word)
    namespace, extra = self._parser.parse_known_intermixed_args(words)
    if extra:
      raise ValueError(self._unknown(extra[0]))
    # argparse would name a missing flag before one that is misspelt.
    if missing := [x for x in self._required if x not in namespace]:
      raise ValueError(f'--{missing[0]} must be given')
    if self._overrides:
      setattr(namespace, self._overrides, overrides)
    return self._kind(**vars(namespace))

  def help(self) -> str:
    """Returns the docstring, and each flag with its meaning and default."""
    return self._parser.format_help().strip()

  def _unknown(self, argument: str) -> str:
    """Returns the error for an unknown argument; names the nearest flag."""
    name = argument.partition('=')[0].lstrip('-')
    known = [x.name for x in dataclasses.fields(typing.cast(Any, self._kind))]
    near = difflib.get_close_matches(name.replace('-', '_'), known, 1)
    hint = f'did you mean --{near[0]}? ' if near else ''
    if not hint and (key := self._hint(name)):
      hint = f'did you mean {key}? '
    return (
      f'arguments must be flags of this command: got {argument!r}; '
      f'{hint}--help lists all'
    )


class _Helped(Exception):
  """The help was printed."""


class _ArgumentParser(argparse.ArgumentParser):
  """An ArgumentParser that raises instead of ending the process."""

  def exit(
    self, status: int = 0, message: str | None = None
  ) -> typing.NoReturn:
    raise _Helped

  def error(self, message: str) -> typing.NoReturn:
    message = message.removeprefix('argument ')
    raise ValueError(message.replace(': must ', ' must ', 1))


def _read(kind: Any, rules: Flag, text: str) -> Any:
  """Returns the checked value of a flag.

  Raises:
    argparse.ArgumentTypeError: what it must be, without the flag's name.
  """
  read, words, _ = _TYPES[kind]
  try:
    value = read(text)
  except (KeyError, ValueError, SyntaxError):
    raise argparse.ArgumentTypeError(f'must be {words}: got {text!r}') from None
  if rules.least > -math.inf and value < rules.least:
    raise argparse.ArgumentTypeError(
      f'must be at least {rules.least}: got {value}'
    )
  if rules.most < math.inf and value > rules.most:
    raise argparse.ArgumentTypeError(
      f'must be at most {rules.most}: got {value}'
    )
  return value


def _strings(text: str) -> tuple[str, ...]:
  value = ast.literal_eval(text)
  if not isinstance(value, tuple):
    raise ValueError(value)
  return value


# By type: how a text is read, its name in errors, its placeholder in the help.
_TYPES: dict[Any, tuple[Callable[[str], Any], str, str]] = {
  str: (str, 'a text', 'TEXT'),
  list[str]: (str, 'a text', 'TEXT'),
  list[tuple[str, str]]: (str, 'a text', 'VALUE'),
  int: (int, 'a whole number', 'N'),
  float: (float, 'a number', 'X'),
  bool: (
    lambda text: {'true': True, 'false': False}[text.lower()],
    'true or false',
    'true|false',
  ),
  tuple[int, ...]: (
    lambda text: tuple(map(int, text.split(','))),
    'whole numbers with commas between them',
    'N,N,...',
  ),
  tuple[str, ...]: (_strings, "a tuple of texts, as in ('a', 'b')", 'TUPLE'),
}
