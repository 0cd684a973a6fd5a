"""The runs of a launch: names, workdirs and commands.

    --sweep=grpo.optim.lr=1e-4,3e-4 --sweep=seed=0,1 --workdir=DIR

gives four jobs with the workdirs DIR/lr=1e-4_seed=0, DIR/lr=1e-4_seed=1 and so
on; without a sweep there is one job, whose workdir is DIR. A job's name depends
on its own values alone, so that a sweep with more values continues the runs of
a smaller one.
"""

import dataclasses
import hashlib
import itertools
import os
import re
from collections.abc import Sequence

from posttrain.util import errors

_LONGEST_NAME = 100  # characters; file systems allow 255 bytes
_BRACKETS = '()', '[]', '{}'
_OPENS = r'((?:^|[(\[{:,])\s*)'  # what is before a quote that opens
Values = tuple[tuple[str, str], ...]  # (dotted key, text of the value)


@dataclasses.dataclass(frozen=True)
class Resources:
  """The devices and sizes of each host of a run.

  Fields:
    gpus: number of GPUs; 0 = none.
    gpu_type: the cluster's name of their kind; '' = any.
    tpu: accelerator type of the whole TPU slice, as v5litepod-16; '' = none.
    cpus: processor cores; None = as the cluster gives.
    memory: GiB of memory; None = as the cluster gives.
  """

  gpus: int = 0
  gpu_type: str = ''
  tpu: str = ''
  cpus: int | None = None
  memory: int | None = None


@dataclasses.dataclass(frozen=True)
class Job:
  """One run of posttrain.main.

  Fields:
    name: unique in its launch; letters, digits and `._=+-`.
    config: the recipe, as --config takes it.
    overrides: (dotted key, text), in order; the swept ones come last.
    swept: those of the overrides that the sweep has set.
    workdir: the folder of the run, on the hosts that it runs on.
    hosts: the number of processes, one per host.
    resources: what each host must have.
    flags: further arguments of posttrain.main.
  """

  name: str
  config: str
  overrides: Values
  swept: Values
  workdir: str
  hosts: int = 1
  resources: Resources = Resources()
  flags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Place:
  """The place of a process in its run, as the flags of posttrain.main."""

  coordinator: str  # HOST:PORT of process 0, or 'auto', as jax finds it
  process_id: int | None = None  # None with 'auto'


def command(
  job: Job, python: str = 'python', place: Place | None = None
) -> list[str]:
  """Returns the arguments that start a process of a job; nothing is quoted.

  Args:
    job: the job.
    python: the interpreter.
    place: the place of the process; None = the launcher's variables tell it,
      or the run has one process.
  """
  words = [
    *(python, '-m', 'posttrain.main'),
    *(f'--config={job.config}', f'--workdir={job.workdir}'),
    *(f'--config.{key}={text}' for key, text in job.overrides),
    *job.flags,
  ]
  if place is not None:
    words.append(f'--coordinator={place.coordinator}')
    if place.process_id is not None:
      words.append(f'--num_processes={job.hosts}')
      words.append(f'--process_id={place.process_id}')
  return words


def starts_again(codes: Sequence[int]) -> bool:
  """Returns whether a run that has ended so is to be started again.

  It is not where a process has failed by itself, even if others were lost then.

  Args:
    codes: exit codes of all its processes; negative = killed by that signal.
  """
  failed = errors.FAILED, errors.USAGE, errors.NO_REWARD
  again = errors.PREEMPTED, errors.PEER_LOST, errors.STALLED
  return any(x in again for x in codes) and not any(x in failed for x in codes)


def parse_sweep(text: str) -> tuple[str, tuple[str, ...]]:
  """Splits 'KEY=VALUE,VALUE' into the key and its values.

  Commas within brackets or quotes belong to a value: '("+",),("+", "-")' are
  two values. The texts are passed on as they are.

  Raises:
    ValueError: there is no key, a value is empty or given twice, or brackets
      or quotes are left open.
  """
  key, equals, rest = text.partition('=')
  if not equals or not re.fullmatch(r'[^\s=.]+(\.[^\s=.]+)*', key):
    raise ValueError(
      '--sweep must be KEY=VALUE,VALUE with a dotted key, as in '
      f'grpo.optim.lr=1e-4,3e-4: got {errors.quote(text)}'
    )
  values, value = [], ''
  for part in rest.split(','):
    value += part
    # A quote opens at the start of a value or within brackets; elsewhere it is
    # an apostrophe.
    bare = re.sub(_OPENS + r'("[^"]*"|\'[^\']*\')', r'\1', value)
    opened = re.search(_OPENS + '["\']', bare)
    if opened or any(bare.count(a) != bare.count(b) for a, b in _BRACKETS):
      value += ','
    else:
      values.append(value.strip())
      value = ''
  if value or '' in values or len(set(values)) < len(values):
    raise ValueError(
      '--sweep must name values that differ, none empty, with brackets and '
      f'quotes closed: got {errors.quote(text)}'
    )
  return key.removeprefix('config.'), tuple(values)


def expand(
  config: str,
  overrides: Sequence[tuple[str, str]],
  sweeps: Sequence[str],
  workdir: str,
  name: str = '',
  **fields,
) -> list[Job]:
  """Returns the jobs of all combinations of the swept values.

  Args:
    config: as in `Job`.
    overrides: of every job.
    sweeps: texts as `parse_sweep` takes them.
    workdir: the folder of the launch, in which each job of a sweep has its own.
    name: the name of a job without a sweep; '' = the workdir's last part.
    **fields: the other fields of `Job`.

  Raises:
    ValueError: a sweep is wrong, or its key is also set by another.
  """
  parsed = [parse_sweep(text) for text in sweeps]
  keys = [key for key, _ in parsed]
  for key in keys:
    if keys.count(key) > 1 or key in dict(overrides):
      raise ValueError(
        f'--sweep={key} must be the only value of its key: got another --sweep '
        f'or --config.{key}; remove one of them'
      )
  if not parsed:
    last = os.path.basename(os.path.normpath(workdir))
    only = safe_name(name or last, name or last)
    return [Job(only, config, tuple(overrides), (), workdir, **fields)]
  jobs = []
  for texts in itertools.product(*(values for _, values in parsed)):
    swept = tuple(zip(keys, texts, strict=True))
    own = _name(swept)
    folder = os.path.join(workdir, own)
    jobs.append(Job(own, config, (*overrides, *swept), swept, folder, **fields))
  return jobs


def _name(swept: Values) -> str:
  """Returns a readable name of a combination of values, such as 'lr=1e-4'."""
  keys = [key.split('.') for key, _ in swept]
  parts = []
  for key, (_, text) in zip(keys, swept, strict=True):
    length = next(
      n
      for n in range(1, len(key) + 1)
      if n == len(key) or sum(k[-n:] == key[-n:] for k in keys) == 1
    )
    parts.append(f'{".".join(key[-length:])}={text}')
  return safe_name('_'.join(parts), repr(swept))


def safe_name(name: str, identity: str) -> str:
  """Returns a name of safe characters; a changed one ends with a digest."""
  safe = re.sub(r'[^A-Za-z0-9._=+-]+', '-', name)[:_LONGEST_NAME].strip('-.')
  if safe == name:
    return safe
  return f'{safe}-{hashlib.sha256(identity.encode()).hexdigest()[:6]}'


def last_line(path: str) -> str:
  """Returns the last line of a log that is not empty, '' if it has none."""
  with open(path, 'rb') as file:
    file.seek(max(os.path.getsize(path) - 2**14, 0))
    lines = file.read().decode(errors='replace').strip().splitlines()
  return errors.text(lines[-1] if lines else '', 4000)
