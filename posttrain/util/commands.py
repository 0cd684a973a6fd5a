"""The command-line parser of every command: argparse over a dataclass of flags.

    @dataclasses.dataclass
    class Flags:
      checkpoint: str = commands.required('PATH', 'A workdir or a directory.')
      port: int = commands.flag(8000, 'The port to bind.', least=0, most=65535)

    PARSER = commands.Parser(Flags, __doc__)

    def main(argv: Sequence[str] | None = None) -> int:
      return PARSER.run(serve, argv)

argparse splits, converts and explains the arguments. Besides, a bool is true as
`--NAME` alone, and `--config.KEY=VALUE` are overrides: (key, text) pairs in the
order given. `run` prints every mistake as one line and returns exit code 2.

The flags that several commands share are here as well, and `place`, the place
of this process in a run of several.
"""

import argparse
import ast
import dataclasses
import inspect
import logging
import math
import os
import re
import sys
import threading
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from posttrain.util import errors, memory

# After a failure, the longest that the exit waits for threads.
_EXIT_SECONDS = 10.0
# Flags, and keys of the config, with which the memory of a device grows.
_SIZES = (
  'lower --slots, --max_model_len or --max_tokens, which of them the command '
  'has, or config.STAGE.rollout.slots or config.STAGE.eval.max_tokens'
)
T = TypeVar('T')


# --- fields of a dataclass of flags ------------------------------------------


@dataclasses.dataclass(frozen=True)
class Flag:
  """The rules and the help of a flag; name, type and default are the field's.

  Fields:
    help: its meaning, for `--help`.
    value: placeholder of the value, such as 'PATH'; '' = one for the type.
    if_absent: the default in words, where the value alone is unclear; None =
      the flag must be given.
    choices: the allowed values; () = any.
    least: lowest allowed number.
    most: highest allowed number.
    by_position: whether it is given without a name, in the order of fields.
  """

  help: str
  value: str = ''
  if_absent: str | None = ''
  choices: tuple[str, ...] = ()
  least: float = -math.inf
  most: float = math.inf
  by_position: bool = False


def flag(default: Any, help: str, **rules: Any) -> Any:
  """Returns a dataclass field: a flag with a default; rules as in `Flag`."""
  return dataclasses.field(
    default=default, metadata={'flag': Flag(help, **rules)}
  )


def required(value: str, help: str, **rules: Any) -> Any:
  """Returns a dataclass field: a flag that must be given."""
  return dataclasses.field(metadata={'flag': Flag(help, value, None, **rules)})


def several(value: str, help: str) -> Any:
  """Returns a dataclass field: a flag given any number of times, a list."""
  return dataclasses.field(
    default_factory=list, metadata={'flag': Flag(help, value, 'none')}
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


# --- flags of several commands -----------------------------------------------

CHECKPOINT = (
  "A run's workdir, one of its checkpoints/<stage> folders, one of their step "
  'folders, a HuggingFace or PEFT directory, or a model in the cache of the '
  'HuggingFace hub, OWNER/NAME.'
)
TRUST_CONFIG = (
  'Trusts the names in a config.json or a checkpoint: functions other than '
  'those of posttrain and configs, servers, addresses, environment variables '
  'of keys, and a folder of compiled programs. They are printed.'
)


def api_key(name: str, variable: str) -> str | None:
  """Returns the key in an environment variable; None without a variable.

  Args:
    name: the flag, with its dashes.
    variable: its value.

  Raises:
    ValueError: the variable has no key that a header can have.
  """
  key = os.environ.get(variable, '')
  if variable and not (key.isascii() and key.strip()):  # the error hides it
    raise ValueError(
      f'{name} must name an environment variable that holds a key, in ASCII: '
      f'got {variable!r}'
    )
  return key or None


def checkpoint() -> Any:
  """Returns a dataclass field: the flag --checkpoint."""
  return required('PATH', CHECKPOINT)


def recipe() -> Any:
  """Returns a dataclass field: the flag --config of a recipe to play."""
  return flag(
    None,
    'A recipe, whose tasks and options replace those of the run; required for '
    'a HuggingFace or PEFT directory.',
    value='FILE',
    if_absent="the run's own config",
  )


def stage() -> Any:
  """Returns a dataclass field: the flag --stage."""
  return flag(
    None,
    'The stage whose tasks are answered.',
    value='NAME',
    if_absent='the stage of the checkpoint, or the last of --config',
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
  return several(
    'VALUE',
    'Sets a key of the config; any number of them, applied in order. All keys, '
    'with defaults and meanings: posttrain/schema/.',
  )


def coordinator() -> Any:
  """Returns a dataclass field: the flag --coordinator."""
  return flag(
    None,
    'The address of process 0, in a run of several processes, one per host; '
    "with --num_processes and --process_id. 'auto' = as jax finds all three.",
    value='HOST:PORT',
    if_absent='the variables of SLURM, Open MPI, Kubernetes or TPU, if any',
  )


def num_processes(text: str = 'The number of processes.') -> Any:
  """Returns a dataclass field: --num_processes, with `text` as its help."""
  return flag(None, text, value='N', if_absent='1', least=1)


def process_id() -> Any:
  """Returns a dataclass field: the flag --process_id."""
  return flag(
    None,
    'The number of this process, from 0.',
    value='I',
    if_absent='0',
    least=0,
  )


class Place(NamedTuple):
  """The place of a process; None = jax asks the launcher."""

  coordinator: str | None = None  # HOST:PORT of process 0
  count: int | None = None
  index: int | None = None


def place(
  coordinator: str | None,
  num_processes: int | None,
  process_id: int | None,
  environ: Mapping[str, str] = os.environ,
) -> Place | None:
  """Returns the place of this process in a run of several; None if alone.

  Flags win. Without them the variables of these launchers are read:

      JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID
                              as the flags; JAX_PROCESS_ID may be absent in a
                              Kubernetes Indexed Job (JOB_COMPLETION_INDEX)
      SLURM, Open MPI, TPU    several tasks or workers; jax finds the address

  Args:
    coordinator: the flag; 'auto' = as jax finds it.
    num_processes: the flag.
    process_id: the flag.
    environ: the variables of the process.

  Raises:
    ValueError: some of the flags or variables are missing, or wrong.
  """
  given: list[Any] = [coordinator, num_processes, process_id]
  names = '--coordinator=HOST:PORT --num_processes=N --process_id=I'
  if given == ['auto', None, None]:
    return Place()
  if given == [None] * 3 and 'JAX_COORDINATOR_ADDRESS' in environ:
    names = 'JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID'
    given = [environ.get(name) for name in names.split()]
    given[2] = given[2] or environ.get('JOB_COMPLETION_INDEX')
  if given == [None] * 3:
    slurm = ('SLURM_JOB_ID', 'SLURM_STEP_NODELIST', 'SLURM_PROCID')
    if all(name in environ for name in slurm):
      counts = 'SLURM_NTASKS'
    elif 'OMPI_COMM_WORLD_SIZE' in environ:
      counts = 'OMPI_COMM_WORLD_SIZE'
    elif ',' in environ.get('TPU_WORKER_HOSTNAMES', ''):
      return Place()
    else:
      counts = 'MEGASCALE_NUM_SLICES'
    return Place() if environ.get(counts, '1') != '1' else None
  address, *numbers = map(str, given)
  if not (
    re.fullmatch(r'[^\s:]+:\d{1,5}|\[[^\s\]]+\]:\d{1,5}', address)
    and all(x.isdecimal() for x in numbers)
    and int(numbers[1]) < int(numbers[0])
  ):
    raise ValueError(
      f'{names} must be given together, HOST:PORT of process 0 and an id below '
      f'the number of processes: got {errors.quote(given)}'
    )
  count, index = map(int, numbers)
  return Place(address, count, index) if count > 1 else None


# --- the parser --------------------------------------------------------------


# Readers of texts, whose names argparse prints in errors.


def true_or_false(text: str) -> bool:
  """Returns a bool."""
  return bool(('false', 'true').index(text.lower()))


def whole_numbers(text: str) -> tuple[int, ...]:
  """Returns numbers with commas between them."""
  return tuple(map(int, text.split(',')))


def tuple_of_texts(text: str) -> tuple[str, ...]:
  """Returns a tuple of texts, as in ('a', 'b')."""
  try:
    return tuple(str(x) for x in ast.literal_eval(text))
  except (SyntaxError, TypeError):
    raise ValueError(text) from None


# Type of a field -> how a text is read, and its placeholder in the help.
_TYPES: dict[Any, tuple[Callable[[str], Any], str]] = {
  str: (str, 'TEXT'),
  list[str]: (str, 'TEXT'),
  list[tuple[str, str]]: (str, 'VALUE'),
  int: (int, 'N'),
  float: (float, 'X'),
  bool: (true_or_false, 'true|false'),
  tuple[int, ...]: (whole_numbers, 'N,N,...'),
  tuple[str, ...]: (tuple_of_texts, 'TUPLE'),
}


class _ArgumentParser(argparse.ArgumentParser):
  """An ArgumentParser that raises a mistake instead of ending the process."""

  def error(self, message: str) -> typing.NoReturn:
    raise ValueError(message.removeprefix('argument '))


class Parser(Generic[T]):
  """Parses a command's arguments into its dataclass of flags."""

  def __init__(
    self,
    kind: type[T],
    doc: str | None,
    hint: Callable[[str, Mapping[str, Flag]], str] = lambda *_: '',
  ):
    """Prepares the flags.

    Args:
      kind: dataclass of `flag`s.
      doc: the command's docstring.
      hint: returns what an unknown flag may mean, '' = nothing; its arguments
        are the name and the flags.
    """
    self._kind, self._hint = kind, hint
    self._flags: dict[str, Flag] = {}
    self._overrides = ''  # the field with the overrides, if any
    self._bools: set[str] = set()
    self.parser = _ArgumentParser(
      usage=argparse.SUPPRESS,
      description=(doc or '').strip(),
      formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
        prog, max_help_position=6, width=80
      ),
      argument_default=argparse.SUPPRESS,
      allow_abbrev=False,
    )
    kinds = typing.get_type_hints(kind)
    for field in dataclasses.fields(typing.cast(Any, kind)):
      rules = self._flags[field.name] = field.metadata['flag']
      base = next(x for x in _TYPES if kinds[field.name] in (x, x | None))
      read, placeholder = _TYPES[base]
      label = field.name if rules.by_position else f'--{field.name}'
      options: dict[str, Any] = {}
      if base is bool:
        self._bools.add(label)
      elif base == list[str]:
        options = {'nargs': '+'} if rules.by_position else {'action': 'append'}
      elif base == list[tuple[str, str]]:
        self._overrides, label = field.name, '--config.KEY'
      absent = rules.if_absent or str(field.default) or "''"
      absent = 'required' if rules.if_absent is None else f'default: {absent}'
      self.parser.add_argument(
        label,
        help=f'{rules.help} ({absent})'.replace('%', '%%'),
        metavar=rules.value or '|'.join(rules.choices) or placeholder,
        type=read,
        choices=rules.choices or None,
        **options,
      ).required = rules.if_absent is None

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
      The exit code, as in `errors`, or the command's own.
    """
    is_process = argv is None
    if is_process:
      argv = sys.argv[1:]
      logging.basicConfig(format='%(levelname)s: %(message)s')
      logging.captureWarnings(True)
      warnings.formatwarning = lambda message, *args, **options: str(message)
    try:
      try:
        flags = self.parse(argv)
      except SystemExit:  # after the help
        return errors.DONE
      with memory.explain_oom('this command', lambda _: [_SIZES]):
        code = command(flags) or errors.DONE
    except KeyboardInterrupt:
      print('interrupted', file=sys.stderr)
      code = errors.INTERRUPTED
    except Exception as error:
      code = errors.report(error, *packages)
    if is_process and code != errors.DONE:
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
    namespace, extra = self.parser.parse_known_intermixed_args(words)
    values = vars(namespace)
    if extra:
      text = extra[0].lstrip('-')
      name = text.partition('=')[0]
      key = self._hint(name, self._flags)
      near = errors.nearest(name, self._flags)
      if key:
        near = f'; did you mean {key}?'
      elif self._overrides and not near:
        text = text.removeprefix('config.')
        near = f'; a key of the config is set by --config.{text}'
      raise ValueError(
        f'arguments must be flags of this command: got {extra[0]!r}{near}; '
        '--help lists all'
      )
    for name, value in values.items():
      low, high = self._flags[name].least, self._flags[name].most
      if isinstance(value, int | float) and not low <= value <= high:
        raise ValueError(f'--{name} must be in [{low}, {high}]: got {value}')
    if self._overrides:
      values[self._overrides] = overrides
    return self._kind(**values)
