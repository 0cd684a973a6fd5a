"""The command-line parser of every command: a dataclass of flags, and help.

    @dataclasses.dataclass
    class Flags:
      checkpoint: str = flags.required('PATH', 'A workdir or a directory.')
      port: int = flags.flag(8000, 'The port to bind.', least=0, most=65535)

    PARSER = flags.Parser(Flags, __doc__)

    def main(argv: Sequence[str] | None = None) -> int:
      return PARSER.run(serve, argv)

1. `--NAME=VALUE` and `--NAME VALUE` are equal. A separate value may start with
   one dash (`--seed -1`), not with two: write `--prompt=--x`.
2. A bool is true as `--NAME`; the value true or false may follow.
3. If a flag is given twice, the last value counts. Names have no abbreviations.
4. `--config.KEY=VALUE` are overrides: (key, text) pairs in the order given.
5. `--help` or `-h`, anywhere, prints the docstring and all flags.
6. Every mistake is a ValueError of one line that names the argument; `run`
   prints it and returns exit code 2.
"""

import ast
import collections
import dataclasses
import difflib
import inspect
import math
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, TypeVar

from posttrain.util import errors

INTERRUPTED = 130  # exit code after Ctrl-C
# The help of --checkpoint, which several commands take.
CHECKPOINT = (
  "A run's workdir, one of its checkpoints/<stage> folders, one of their step "
  'folders, or a HuggingFace or PEFT directory.'
)

_PREFIX = 'config.'  # of the overrides
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


def flag(default: Any, help: str, **rules: Any) -> Any:
  """Returns a dataclass field: a flag with a default; rules as of `Flag`."""
  return dataclasses.field(
    default=default, metadata={'flag': Flag(help, **rules)}
  )


def required(value: str, help: str, **rules: Any) -> Any:
  """Returns a dataclass field: a flag that must be given."""
  return dataclasses.field(metadata={'flag': Flag(help, value, **rules)})


def overrides() -> Any:
  """Returns a dataclass field: the list of (dotted key, text) overrides."""
  rules = Flag(
    'Sets a key of the config; any number of them, applied in order. All keys, '
    'with defaults and meanings: posttrain/schema/.',
    repeated=True,
  )
  return dataclasses.field(default_factory=list, metadata={'flag': rules})


def option(kind: type, name: str, **rules: Any) -> Any:
  """Returns a dataclass field: a flag for an option of the schema.

  Args:
    kind: dataclass of `posttrain.schema`, whose default is the flag's.
    name: the option; the comment above it is the help.
    **rules: as of `Flag`.
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

  def __init__(self, kind: type[T], doc: str | None):
    """Args: kind: dataclass of `flag`s; doc: the command's docstring."""
    self._kind, self._doc = kind, doc or ''
    fields = dataclasses.fields(typing.cast(Any, kind))
    self._fields = {field.name: field for field in fields}
    self._flags: dict[str, Flag] = {
      name: field.metadata['flag'] for name, field in self._fields.items()
    }
    self._positions = [k for k, v in self._flags.items() if v.by_position]
    self._overrides = [k for k, v in self._flags.items() if v.repeated]
    self._named = self._flags.keys() - self._positions - set(self._overrides)

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
      *packages: as of `errors.report`.

    Returns:
      The exit code: 0 done, 1 the command failed, 2 the command line or the
      config is wrong, 130 interrupted, or the command's own.
    """
    argv = sys.argv[1:] if argv is None else argv
    if '--help' in argv or '-h' in argv:
      print(self.help())
      return 0
    try:
      return command(self.parse(argv)) or 0
    except KeyboardInterrupt:
      return INTERRUPTED
    except (ValueError, RuntimeError) as error:
      return errors.report(error, *packages)

  def parse(self, argv: Sequence[str]) -> T:
    """Returns the flags.

    Raises:
      ValueError: names the argument that is wrong, unknown or missing.
    """
    values: dict[str, Any] = {name: [] for name in self._overrides}
    given: list[str] = []
    for name, text in self._split(argv):
      given.append(name)
      if name in self._fields:
        values[name] = self._value(name, text)
      else:
        values[self._overrides[0]].append((name.removeprefix(_PREFIX), text))
    self._check(given)
    return self._kind(**values)

  def help(self) -> str:
    """Returns the docstring and, of each flag, its default and meaning."""
    lines = [
      self._doc.strip(),
      '',
      'Flags (--NAME=VALUE or --NAME VALUE; the last value counts):',
    ]
    for name, rules in self._flags.items():
      lines.append(f'  {self._usage(name)}  ({self._default(name)})')
      lines += textwrap.wrap(
        rules.help, 80, initial_indent=' ' * 6, subsequent_indent=' ' * 6
      )
    return '\n'.join(lines)

  def _split(self, argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the name of each argument's flag, or override, and its text."""
    rest, positions = collections.deque(argv), iter(self._positions)
    while rest:
      argument = rest.popleft()
      name, equals, text = argument.removeprefix('--').partition('=')
      if not argument.startswith('--'):
        name, equals, text = next(positions, ''), '=', argument
      elif not self._is_known(name):
        name = ''
      if not name:
        raise ValueError(self._unknown(argument))
      if equals and (text or name in self._fields):
        yield name, text
      elif name in self._fields and self._type(name) is bool:
        follows = rest and rest[0].lower() in _BOOLS
        yield name, rest.popleft() if follows else 'true'
      elif not equals and rest and not rest[0].startswith('--'):
        yield name, rest.popleft()
      else:
        after = f'; {rest[0]!r} is the next flag' if rest else ''
        raise ValueError(
          f'--{name} must have a value: got {argument!r}{after}; write '
          + (self._usage(name) if name in self._fields else f'--{name}=VALUE')
        )

  def _is_known(self, name: str) -> bool:
    key = name.startswith(_PREFIX) and name != _PREFIX
    return name in self._named or bool(key and self._overrides)

  def _unknown(self, argument: str) -> str:
    """Returns the error for an unknown argument; names the nearest flag."""
    name, _, _ = argument.lstrip('-').partition('=')
    stem, dot, key = name.partition('.')
    names = sorted({*self._named, 'help'})
    longer = [name for name in names if stem and name.startswith(stem)]
    (near, *_) = longer or difflib.get_close_matches(stem, names, 1, 0.0)
    if dot and key and self._overrides and near + dot == _PREFIX:
      near = f'{near}.{key}'
    return (
      f'arguments must be flags of this command: got {argument!r}; did you '
      f'mean --{near}? --help lists all'
    )

  def _value(self, name: str, text: str) -> Any:
    """Returns the checked value of a flag."""
    rules, kind, label = self._flags[name], self._type(name), self._label(name)
    optional = rules.empty or self._fields[name].default == ''
    if kind is str and not (text or optional):
      raise ValueError(f'{label} must not be empty: got {text!r}')
    read, words, _ = _TYPES[kind]
    try:
      value: Any = read(text)
    except (ValueError, SyntaxError):
      raise ValueError(f'{label} must be {words}: got {text!r}') from None
    if rules.choices and value not in rules.choices:
      raise ValueError(f'{label} must be one of {rules.choices}: got {value!r}')
    if rules.least > -math.inf and value < rules.least:
      raise ValueError(f'{label} must be at least {rules.least}: got {value}')
    if rules.most < math.inf and value > rules.most:
      raise ValueError(f'{label} must be at most {rules.most}: got {value}')
    return value

  def _check(self, given: Collection[str]) -> None:
    """Refuses a missing flag, and flags that exclude each other.

    Args:
      given: names of the flags and overrides on the command line.
    """
    for name, field in self._fields.items():
      if name not in given and _is_required(field):
        raise ValueError(f'{self._usage(name)} must be given')
    for name, rules in self._flags.items():
      rest = [
        f'--{other}'
        for other in given
        if other != name and other not in rules.only_with
      ]
      if name in given and rules.only_with and rest:
        allowed = ' and '.join(map(self._usage, rules.only_with))
        raise ValueError(
          f'{self._usage(name)} must be given with {allowed} alone: got '
          f'{" ".join(rest)} too, which nothing would read'
        )

  def _type(self, name: str) -> Any:
    """Returns the type of a flag's value, without `| None`."""
    kind = self._fields[name].type
    if isinstance(kind, types.UnionType):
      (kind,) = set(typing.get_args(kind)) - {types.NoneType}
    return kind

  def _label(self, name: str) -> str:
    rules = self._flags[name]
    return rules.value if rules.by_position else f'--{name}'

  def _usage(self, name: str) -> str:
    """Returns a flag with the placeholder of its value."""
    rules = self._flags[name]
    if rules.repeated:
      return f'--{_PREFIX}KEY=VALUE'
    kind = self._type(name)
    if rules.by_position or kind is bool:
      return self._label(name)
    plain = '|'.join(rules.choices) or _TYPES[kind][2]
    return f'--{name}={rules.value or plain}'

  def _default(self, name: str) -> str:
    """Returns a flag's default in words."""
    field, rules = self._fields[name], self._flags[name]
    if _is_required(field):
      return 'required'
    value = field.default
    if isinstance(value, bool):
      value = str(value).lower()
    plain = 'none' if rules.repeated or value is None else str(value)
    return f'default: {rules.if_absent or plain or repr(value)}'


def _is_required(field: dataclasses.Field) -> bool:
  missing = dataclasses.MISSING
  return field.default is missing and field.default_factory is missing


def _bool(text: str) -> bool:
  if text.lower() not in _BOOLS:
    raise ValueError(text)
  return _BOOLS[text.lower()]


def _ints(text: str) -> tuple[int, ...]:
  return tuple(int(part) for part in text.split(','))


def _strings(text: str) -> tuple[str, ...]:
  value = ast.literal_eval(text)
  if not isinstance(value, tuple):
    raise ValueError(value)
  return value


_BOOLS = {'true': True, 'false': False}
# By type: how a text is read, its name in errors, its placeholder in the help.
_TYPES: dict[Any, tuple[Callable[[str], Any], str, str]] = {
  str: (str, 'a text', 'TEXT'),
  int: (int, 'a whole number', 'N'),
  float: (float, 'a number', 'X'),
  bool: (_bool, 'true or false', ''),
  tuple[int, ...]: (_ints, 'whole numbers with commas between them', 'N,N,...'),
  tuple[str, ...]: (_strings, "a tuple of texts, as in ('a', 'b')", 'TUPLE'),
}
