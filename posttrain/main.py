"""The training command: runs every stage of a recipe, in order.

    python -m posttrain.main --config=configs/arithmetic.py \\
        --workdir=runs/arithmetic --config.seed=1
    python -m posttrain.main --config=configs/arithmetic.py:tiny --dry_run

The same command with the same workdir continues a run from its newest
checkpoint. The last line on stdout is one JSON object with the final
evaluation. The console script `posttrain` is this command.

Exit codes: 0 done, 1 the run or the machine failed, 2 the command line or the
config is wrong, 3 no rollout of a stage had a reward, because reward functions
or episodes failed, 4 ended by the watchdog (config.watchdog.exit_seconds), 5
another process of the run is lost, 75 stopped after saving by SIGTERM or
--time_limit, 130 interrupted.
"""

import contextlib
import dataclasses
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from posttrain import config, processes, schema
from posttrain.config import checks, names, trust
from posttrain.metrics import display, trackers
from posttrain.util import (
  commands,
  disk,
  errors,
  hub,
  imports,
  preemption,
  watchdog,
)

# Packages whose versions change numbers.
_PACKAGES = ('jax', 'jaxlib', 'numpy', 'posttrain')
# How long a run of several processes waits for a lock: that of a host that is
# gone may live on in a network file system.
_LOCK_SECONDS = 120.0
# Platform, None = this machine's; number of devices, and of hosts.
Devices = tuple[str | None, int, int]


@dataclasses.dataclass
class Flags:
  """The command line."""

  config: str = commands.required(
    'FILE',
    'The recipe: FILE.py, FILE.py:ARGUMENT (configs/arithmetic.py:tiny), or '
    'the config.json of a workdir. A recipe is code: it is run.',
  )
  overrides: list[tuple[str, str]] = commands.overrides()
  workdir: str | None = commands.flag(
    None,
    'The folder of the run: checkpoints, metrics and the report. Required '
    'without --dry_run.',
    value='DIR',
  )
  dry_run: bool = commands.flag(
    False,
    'Prints the plan (batch sizes, parameters, memory and communication per '
    'device) and trains nothing.',
  )

  devices: str | None = commands.flag(
    None,
    'With --dry_run: plans for N devices that need not be here, of this '
    "machine's kind, or of another: gpu:8, tpu:32.",
    value='N',
    if_absent='the devices of this machine',
  )

  time_limit: str | None = commands.flag(
    None,
    'Saves and exits with 75 before the process has run for so long, as in '
    '3h50m: give it a little less than the scheduler allows.',
    value='DURATION',
    if_absent='none',
  )

  profile: str | None = commands.flag(
    None,
    'Writes a trace (jax.profiler) of these steps of each stage, counted from '
    '1 and both included, to WORKDIR/profiles/STAGE.',
    value='FROM:TO',
    if_absent='none',
  )

  trust_config: bool = commands.flag(False, commands.TRUST_CONFIG)

  coordinator: str | None = commands.coordinator()
  num_processes: int | None = commands.num_processes(
    'The number of processes; with --dry_run --devices, of those to plan for.'
  )
  process_id: int | None = commands.process_id()

  def __post_init__(self):
    if not self.workdir and not self.dry_run:
      raise ValueError('--workdir=DIR must be given, or --dry_run')
    if self.profile and self.dry_run:
      raise ValueError('--profile must be given without --dry_run')
    if self.dry_run and self.num_processes and not self.devices:
      raise ValueError('--num_processes must be given with --devices to plan')
    if self.devices and not self.dry_run:
      raise ValueError('--devices must be given with --dry_run')

  @property
  def limit(self) -> float | None:
    """Returns the seconds of `time_limit`."""
    text = self.time_limit
    return None if text is None else preemption.seconds(text, '--time_limit')

  @property
  def place(self) -> commands.Place | None:
    """Returns the place of this process; None if it is the only one."""
    if self.dry_run:
      return None
    return commands.place(self.coordinator, self.num_processes, self.process_id)

  @property
  def planned(self) -> Devices | None:
    """Returns the devices that `devices` and `num_processes` name."""
    if self.devices is None:
      return None
    parts = re.fullmatch(
      r'(?:(cpu|gpu|tpu):)?(\d{1,6})', self.devices, re.ASCII
    )
    if not parts or not int(parts[2]):
      raise ValueError(
        '--devices must be a number, or one after cpu:, gpu: or tpu:, as in '
        f'gpu:8: got {errors.quote(self.devices)}'
      )
    return parts[1], int(parts[2]), self.num_processes or 1

  @property
  def profiled(self) -> range | None:
    """Returns the steps of `profile`."""
    if self.profile is None:
      return None
    numbers = re.fullmatch(r'(\d{1,9}):(\d{1,9})', self.profile, re.ASCII)
    first, last = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= first <= last:
      raise ValueError(
        '--profile must be FROM:TO, two steps with 1 <= FROM <= TO, as in 3:5: '
        f'got {self.profile!r}'
      )
    return range(first, last + 1)


PARSER = commands.Parser(Flags, __doc__, names.flag)


def load(
  path: str,
  overrides: Sequence[tuple[str, str]] = (),
  trust_config: bool = False,
) -> schema.Run:
  """Reads a recipe and its overrides; returns the checked options.

  Args:
    path: `FILE.py`, `FILE.py:ARGUMENT`, or the config.json of a workdir.
    overrides: (dotted key, text of the value), applied in order.
    trust_config: whether a config.json may name any function and server, see
      `config.trust`; a recipe may.

  Raises:
    ValueError: names the key that is wrong and the values it allows.
  """
  run = read(path, overrides, trust_config)
  checks.check(run)
  return run


def read(
  path: str,
  overrides: Sequence[tuple[str, str]] = (),
  trust_config: bool = False,
) -> schema.Run:
  """Returns the options of `load`, without the checks that span several."""
  node = config.load(path)
  for key, value in overrides:
    config.override(node, key, value)
  run = config.build(node)
  if config.is_json(path):
    trust.check(run, path, overrides, trust_config)
  return run


def claim(workdir: str, run: schema.Run) -> None:
  """Writes config.json; refuses a workdir that holds a run of another config.

  Raises:
    ValueError: the config differs, or the folder cannot be written.
  """
  from posttrain.stage import preflight

  preflight.check_resume(run, workdir)
  with _writable():
    os.makedirs(os.path.join(workdir, 'rollouts'), exist_ok=True)
    preflight.write_config(run, workdir)


@contextlib.contextmanager
def hold(workdir: str, others: Sequence[str] = ()) -> Iterator[None]:
  """Locks a workdir, which is created if it is missing.

  Args:
    workdir: the folder.
    others: the other processes of the run.

  Raises:
    ValueError: another run uses it, or it cannot be written.
  """
  with contextlib.ExitStack() as stack:
    with _writable():
      os.makedirs(workdir, exist_ok=True)
      seconds = _LOCK_SECONDS if others else disk.BRIEFLY
      stack.enter_context(disk.lock(workdir, '--workdir', others, seconds))
    yield


@contextlib.contextmanager
def _writable() -> Iterator[None]:
  try:
    yield
  except OSError as error:
    raise ValueError(f'--workdir must be writable: {error}') from error


def train(
  run: schema.Run,
  workdir: str,
  time_limit: float | None = None,
  profile: range | None = None,
  place: commands.Place | None = None,
) -> dict[str, Any] | None:
  """Trains a run from its newest checkpoint to its end; writes its report.

  Prints the plan to stderr, nothing to stdout.

  Args:
    run: the options, from `load`.
    workdir: a new folder, or one of the same run, which is continued.
    time_limit: seconds of the process before which it saves and stops.
    profile: the steps of each stage to trace; None = none.
    place: the place of this process in a run of several; None = the only one.

  Returns:
    The final evaluation: `stage`, `step` and every `eval/*` value; None in all
    processes of a run but the first.

  Raises:
    ValueError: options, weights or workdir do not fit each other; raised
      before anything is compiled.
    Preempted: the run stopped after SIGTERM, or before its time limit;
      everything is saved.
  """
  with (
    preemption.on_sigterm(time_limit, processes.any_of) as stop,
    watchdog.watch(
      run.watchdog.seconds,
      run.watchdog.first_seconds,
      run.watchdog.exit_seconds,
      errors.STALLED,
    ),
    contextlib.ExitStack() as stack,
  ):
    # Imported here so that command-line mistakes are reported without jax.
    from posttrain import compilation, machine
    from posttrain import train as loop
    from posttrain.hosts import joining
    from posttrain.report import page
    from posttrain.stage import summary

    stack.enter_context(joining.join(place, os.path.join(workdir, 'hosts')))
    _check_equal(run)
    stack.enter_context(_shown(run))
    with watchdog.phase('plan', first=True):
      stages = _preflight(run)
    me = f'process {os.getpid()} on {socket.gethostname()}'
    others = processes.gather(me)[1:]

    def begin() -> None:
      stack.enter_context(hold(workdir, others))
      claim(workdir, run)
      with _writable():
        sizes = {
          name: {'parameters': x.plan.parameters, 'trained': x.plan.trained}
          for name, x in stages.items()
        }
        machine.begin(workdir, sizes)
      stack.enter_context(_tracked(run, workdir))

    processes.on(0, begin)
    _print_plans(run, stages, sys.stderr)
    compilation.enable_compilation_cache(run.compilation_cache)
    final = loop.run(
      stages, workdir, stop, profile, page.Periodic(workdir, trackers.log)
    )
    with watchdog.phase('report', first=True):
      processes.on(0, lambda: _report(workdir))
    is_first = processes.is_first()
  if not is_first:
    return None
  print('\n'.join(summary.lines(run, workdir)), file=sys.stderr)
  return final


def _shown(run: schema.Run) -> contextlib.AbstractContextManager:
  """Returns the run's display; only the first process shows anything."""
  on = run.metrics.progress and processes.is_first()
  return display.show(run.metrics.log_seconds, on)


def _tracked(
  run: schema.Run, workdir: str
) -> contextlib.AbstractContextManager:
  names, options = run.metrics.trackers, config.to_dict(run)
  return trackers.use(names, _steps(run), options, workdir)


def _steps(run: schema.Run) -> dict[str, int]:
  return {name: stage.steps for name, stage in run.stages.items()}


def _check_equal(run: schema.Run) -> None:
  """Refuses processes of other options or versions than the first one's."""
  if processes.count() == 1:
    return
  from posttrain import machine

  versions = machine.versions(*_PACKAGES)
  all_own = processes.gather((config.to_dict(run), versions))
  (options, known), *_ = all_own
  for index, (own, other) in enumerate(all_own):
    lines = config.changes(options, own)
    if known != other:
      lines += f' versions {known} -> {other}'
    if lines:
      raise ValueError(
        'all processes of a run must have the same options and versions: '
        f'process {index} differs from process 0 in {lines.strip()}; start all '
        'with the same command'
      )


def _report(workdir: str) -> None:
  """Writes the report; a finished run without one is finished."""
  from posttrain import machine
  from posttrain.report import page

  try:
    machine.end(workdir)
    page.write(workdir)
  except (OSError, ValueError) as error:
    logging.getLogger('absl').warning(
      'the run is finished, but its report could not be written: %s; the same '
      'command writes it again',
      errors.describe(error),
    )


def _preflight(
  run: schema.Run, devices: Devices | None = None
) -> dict[str, Any]:
  """Returns the checked components of each stage."""
  from posttrain.stage import preflight
  from posttrain.util import memory

  memory.keep_freed_memory()
  processes.on(0, lambda: trackers.check(run.metrics.trackers))
  return preflight.check(run, devices)


def _print_plans(
  run: schema.Run,
  stages: dict[str, Any],
  file: TextIO,
  devices: Devices | None = None,
  details: bool = False,
) -> None:
  from posttrain.stage import plan

  print('\n'.join(plan.head(run.seed, devices)), file=file)
  for stage in stages.values():
    lines = stage.plan.lines() + (stage.plan.details() if details else [])
    print('\n'.join(lines), file=file)


def launch(
  run: schema.Run,
  workdir: str | None,
  dry_run: bool,
  time_limit: float | None = None,
  profile: range | None = None,
  devices: Devices | None = None,
  place: commands.Place | None = None,
) -> None:
  """Prints the plan, with `dry_run` for given devices; else trains."""
  if dry_run:
    stages = _preflight(run, devices)
    _print_plans(run, stages, sys.stdout, devices, details=True)
  else:
    final = train(run, workdir, time_limit, profile, place)
    if final is not None:
      print(json.dumps(final))


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code. `argv=None`: the process's."""
  if argv is None:
    imports.add_current_folder()  # the console script has its own instead
  return PARSER.run(_run, argv, 'configs.', config.RECIPE_PREFIX)


def _run(flags: Flags) -> int:
  try:
    limit, profiled, planned = flags.limit, flags.profiled, flags.planned
    place = flags.place
    with hub.keeping(flags.workdir):
      run = load(flags.config, flags.overrides, flags.trust_config)
    launch(run, flags.workdir, flags.dry_run, limit, profiled, planned, place)
  except KeyboardInterrupt:
    print(
      'interrupted without saving (SIGTERM saves); the same command continues '
      'from the newest checkpoint, if there is one',
      file=sys.stderr,
    )
    return errors.INTERRUPTED
  except preemption.Preempted as stopped:
    print(
      f'saved and stopped at {stopped}; run the same command to continue',
      file=sys.stderr,
    )
    return errors.PREEMPTED
  return 0


if __name__ == '__main__':
  sys.exit(main())
