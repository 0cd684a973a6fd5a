"""The command-line parser of every command: argparse over a dataclass of flags.

    @dataclasses.dataclass
    class Flags:
      checkpoint: str = flags.required('PATH', 'A workdir or a directory.')
      port: int = flags.flag(8000, 'The port to bind.', least=0, most=65535)

    PARSER = flags.Parser(Flags, __doc__)

    def main(argv: Sequence[str] | None = None) -> int:
      return PARSER.run(serve, argv)

1. `--NAME=VALUE` and `--NAME VALUE` are equal. A separate value may start with
   one dash (`--seed -1`), not with two: write `--prompt=--x`.
2. A bool is true as `--NAME`; the value true or false may follow. The last of
   two values counts, except where a flag takes several. Names have no
   abbreviations.
3. `--config.KEY=VALUE` are overrides: (key, text) pairs in the order given.
4. `--help` or `-h`, anywhere, prints the docstring and all flags.
5. Every mistake is a ValueError of one line that names the argument; `run`
   prints it and returns exit code 2.

argparse splits, matches and converts the arguments and formats the help. By
hand, because it cannot: words with one dash are values, a bool takes only true
or false from the next word, and mistakes are one line with the nearest flag.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import os
import sys
import threading
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Generic, TypeVar

from posttrain.util import errors, exits, logs, memory, spelling, streams

# The help of --checkpoint, which several commands take.
CHECKPOINT = (
  "A run's workdir, one of its checkpoints/<stage> folders, one of their step "
  'folders, a HuggingFace or PEFT directory, or a model in the cache of the '
  'HuggingFace hub, OWNER/NAME.'
)
# The help of --trust_config, which several commands take.
TRUST_CONFIG = (
  'Trusts the names in a config.json or a checkpoint: functions other than the '
  'reward functions of posttrain and the functions of configs, servers, '
  'addresses, environment variables of keys, and a folder of compiled '
  'programs. They are printed. A run that you trained yourself, with the same '
  'home folder or XDG_STATE_HOME, needs no trust.'
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
    empty: whether a text may be ''; always so where '' is the default.
    only_with: names of the only flags that may be given besides; () = any.
    by_position: whether it is given without a name, in the order of fields.
    repeated: whether it is the list of overrides.
    also: names that it has elsewhere, for hints.
  """

  help: str
  value: str = ''
  if_absent: str = ''
  choices: tuple[str, ...] = ()
  least: float = -math.inf
  most: float = math.inf
  empty: bool = False
  only_with: tuple[str, ...] = ()
  by_position: bool = False
  repeated: bool = False
  also: tuple[str, ...] = ()


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
  return required(
    'PATH',
    CHECKPOINT,
    also=('model', 'model_path', 'model_name_or_path', 'workdir', 'run'),
  )


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
  rules = Flag(
    'Sets a key of the config; any number of them, applied in order. All keys, '
    'with defaults and meanings: posttrain/schema/.',
    if_absent='none',
    repeated=True,
  )
  return dataclasses.field(default_factory=list, metadata={'flag': rules})


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
    self._kind, self._doc, self._hint = kind, doc or '', hint
    fields = dataclasses.fields(typing.cast(Any, kind))
    self._fields = {field.name: field for field in fields}
    rules = [field.metadata['flag'] for field in fields]
    self._named = {
      f'--{field.name}': field
      for field, rule in zip(fields, rules, strict=True)
      if not (rule.by_position or rule.repeated)
    }
    self._has_overrides = any(rule.repeated for rule in rules)

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
    argv = sys.argv[1:] if argv is None else argv
    try:
      form = logs.one_form() if is_process else contextlib.nullcontext()
      with streams.guarded(), form, logs.one_line_background():
        code = self._run(command, argv, packages)
    except OSError as error:  # the last line could not be written to stdout
      code = errors.report(error)
    if is_process and code != exits.DONE:
      # Threads of libraries may wait for what has failed.
      timer = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
      timer.daemon = True
      timer.start()
    return code

  def _run(
    self,
    command: Callable[[T], int | None],
    argv: Sequence[str],
    packages: Sequence[str],
  ) -> int:
    if '--help' in argv or '-h' in argv:
      print(self.help())
      return exits.DONE
    try:
      flags = self.parse(argv)
      memory.check_limit()
      return command(flags) or exits.DONE
    except KeyboardInterrupt:
      print('interrupted', file=sys.stderr)
      return exits.INTERRUPTED
    except Exception as error:
      return errors.report(error, *packages)

  def parse(self, argv: Sequence[str]) -> T:
    """Returns the flags.

    Raises:
      ValueError: names the argument that is wrong, unknown or missing.
    """
    given, words = [], []
    for word, after in itertools.zip_longest(argv, argv[1:], fillvalue=''):
      if word.startswith('--'):
        given.append(word.partition('=')[0])
        if not self._is_known(given[-1]):
          raise ValueError(self._unknown(word))
      field = self._named.get(word)
      bare = field and _type(field) is bool and after.lower() not in _BOOLS
      words.append(f'{word}=true' if bare else word)
    parser = self._parser(label for label in given if '.' in label)
    try:
      namespace, extra = parser.parse_known_intermixed_args(words)
    except argparse.ArgumentError as error:
      raise ValueError(self._wrong(error, argv)) from None
    if extra:
      raise ValueError(self._unknown(extra[0]))
    self._check(given, vars(namespace))
    return self._kind(**vars(namespace))

  def help(self) -> str:
    """Returns the docstring, and each flag with its meaning and default."""
    return self._parser(['--config.KEY']).format_help().strip()

  def _parser(self, overrides: Iterable[str]) -> argparse.ArgumentParser:
    """Returns the argparse parser; its namespace has only the given flags.

    Args:
      overrides: '--config.seed', for instance; each becomes an option.
    """
    parser = _ArgumentParser(
      usage=argparse.SUPPRESS,
      description=self._doc.strip(),
      formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
        prog, max_help_position=6, width=80
      ),
      argument_default=argparse.SUPPRESS,
      add_help=False,
      allow_abbrev=False,
      exit_on_error=False,
    )
    group = parser.add_argument_group(
      'Flags (--NAME=VALUE or --NAME VALUE; the last value counts)'
    )
    for name, field in self._fields.items():
      rules = field.metadata['flag']
      labels = [name if rules.by_position else f'--{name}']
      options: dict[str, Any] = {
        'help': f'{rules.help} ({_default(field)})'.replace('%', '%%'),
        'metavar': _usage(field).removeprefix(f'--{name}='),
      }
      if rules.repeated:
        labels = list(dict.fromkeys(overrides))
        options |= {'action': 'append', 'dest': name}
      elif _type(field) == list[str]:
        options |= {'nargs': '+'} if rules.by_position else {'action': 'append'}
      elif _type(field) is bool:
        options['nargs'] = '?'
      for label in labels:
        read = functools.partial(_read, field, label)
        action = group.add_argument(label, type=read, **options)
        action.required = False  # `_check` runs after unknown arguments
    return parser

  def _is_known(self, label: str) -> bool:
    override = self._has_overrides and label.startswith('--config.')
    return label in self._named or (override and label != '--config.')

  def _unknown(self, argument: str) -> str:
    """Returns the error for an unknown argument; names the nearest flag."""
    label, equals, _ = argument.partition('=')
    stem, dot, key = label.lstrip('-').partition('.')
    names, near = sorted(['--help', *self._named]), []
    if stem and (equals or argument.startswith('-')):
      near = [name for name in names if name.startswith(f'--{stem}')]
      near = near or self._near(stem)
    if near and self._is_known(near[0] + dot + key):
      near[0] += dot + key
    hint = f'did you mean {near[0]}?' if near else ''
    is_flag = label.startswith('--') and '.' not in label
    if meant := [x for x in self._meant(stem) if is_flag]:
      hint = meant[0]
    elif self._has_overrides and label.startswith('--') and not near:
      hint = self._hint(stem) if is_flag else ''
      hint = hint or 'options of the config are --config.KEY=VALUE'
    hint += ' ' if hint.endswith('?') else '; ' if hint else ''
    return (
      f'arguments must be flags of this command: got {argument!r}; '
      f'{hint}--help lists all'
    )

  def _meant(self, name: str) -> list[str]:
    """Returns the usage of each flag that other commands call so."""
    return [
      f'{_usage(field)} is given alone, without a name'
      if field.metadata['flag'].by_position
      else f'did you mean {_usage(field)}?'
      for field in self._fields.values()
      if name in field.metadata['flag'].also
    ]

  def _near(self, stem: str) -> list[str]:
    """Returns the flags that a name without dashes may be meant for."""
    names = spelling.near(stem, ['help', *(x[2:] for x in self._named)])
    return [f'--{name}' for name in names]

  def _wrong(self, error: argparse.ArgumentError, argv: Sequence[str]) -> str:
    """Returns the error for a wrong or missing value."""
    label = error.argument_name or ''
    if error.message.startswith('must '):  # from `_read`
      return f'{label} {error.message}'
    follows = (y for x, y in itertools.pairwise(argv) if x == label)
    flags = [f'; {y!r} is the next flag' for y in follows if y[:2] == '--']
    field = self._named.get(label)
    usage = _usage(field) if field else f'{label}=VALUE'
    return (
      f'{label} must have a value: got {label!r}{"".join(flags[:1])}; '
      f'write {usage}'
    )

  def _check(self, given: Collection[str], values: dict[str, Any]) -> None:
    """Refuses a missing flag, and flags that exclude each other.

    Args:
      given: the flags on the command line, such as '--seed', in order.
      values: values by the name of the field.
    """
    for name, field in self._fields.items():
      if name not in values and _default(field) == 'required':
        raise ValueError(f'{_usage(field)} must be given')
    for field in [self._fields[name] for name in values]:
      others = field.metadata['flag'].only_with
      allowed = [f'--{name}' for name in (field.name, *others)]
      rest = [label for label in given if others and label not in allowed]
      if rest:
        usages = ' and '.join(_usage(self._fields[name]) for name in others)
        raise ValueError(
          f'{_usage(field)} must be given with {usages} alone: got '
          f'{" ".join(rest)} too, which nothing would read'
        )


class _ArgumentParser(argparse.ArgumentParser):
  def _parse_optional(self, arg_string: str) -> Any:
    """Takes words such as `-x` and `-1,2` for values."""
    two = arg_string.startswith('--')
    return super()._parse_optional(arg_string) if two else None


def _type(field: dataclasses.Field) -> Any:
  """Returns the type of a flag's value, without `| None`."""
  return next(kind for kind in _TYPES if field.type in (kind, kind | None))


def _usage(field: dataclasses.Field) -> str:
  """Returns a flag with the placeholder of its value."""
  rules = field.metadata['flag']
  value = rules.value or '|'.join(rules.choices) or _TYPES[_type(field)][2]
  return value if rules.by_position else f'--{field.name}={value}'


def _default(field: dataclasses.Field) -> str:
  """Returns a flag's default in words."""
  value, words = field.default, field.metadata['flag'].if_absent
  if value is dataclasses.MISSING and not words:
    return 'required'
  plain = str(value) or repr(value)
  if value is None or isinstance(value, bool):
    plain = plain.lower()
  return f'default: {words or plain}'


def _read(field: dataclasses.Field, label: str, text: str) -> Any:
  """Returns the checked value of a flag; of an override, (key, text).

  Raises:
    argparse.ArgumentTypeError: what it must be, without the flag's name.
  """
  rules, kind = field.metadata['flag'], _type(field)
  read, words, _ = _TYPES[kind]
  value: Any = text
  try:
    value = read(text)
  except (KeyError, ValueError, SyntaxError):
    must = f'be {words}'
  else:
    if value == '' and not (rules.empty or field.default == ''):
      must = 'not be empty'
    elif rules.choices and value not in rules.choices:
      must = f'be one of {rules.choices}'
    elif rules.least > -math.inf and value < rules.least:
      must = f'be at least {rules.least}'
    elif rules.most < math.inf and value > rules.most:
      must = f'be at most {rules.most}'
    elif rules.repeated:
      return label.removeprefix('--config.'), value
    else:
      return value
  raise argparse.ArgumentTypeError(f'must {must}: got {value!r}')


def _strings(text: str) -> tuple[str, ...]:
  value = ast.literal_eval(text)
  if not isinstance(value, tuple):
    raise ValueError(value)
  return value


_BOOLS = {'true': True, 'false': False}
# By type: how a text is read, its name in errors, its placeholder in the help.
_TYPES: dict[Any, tuple[Callable[[str], Any], str, str]] = {
  str: (str, 'a text', 'TEXT'),
  list[str]: (str, 'a text', 'TEXT'),
  list[tuple[str, str]]: (str, 'a text', 'VALUE'),
  int: (int, 'a whole number', 'N'),
  float: (float, 'a number', 'X'),
  bool: (lambda text: _BOOLS[text.lower()], 'true or false', 'true|false'),
  tuple[int, ...]: (
    lambda text: tuple(map(int, text.split(','))),
    'whole numbers with commas between them',
    'N,N,...',
  ),
  tuple[str, ...]: (_strings, "a tuple of texts, as in ('a', 'b')", 'TUPLE'),
}
