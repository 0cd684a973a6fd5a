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
import functools
import json
import os
import re
import socket
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import posttrain
from posttrain import config, processes, schema, types
from posttrain.config import checks, names
from posttrain.metrics import trackers
from posttrain.util import (
  commands,
  disk,
  errors,
  hub,
  imports,
  preemption,
  watchdog,
)

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

  samplers: str | None = commands.flag(
    None,
    'The addresses of samplers, processes of python -m posttrain.serve '
    '--sampler that decode with the policy in place of this one.',
    value='URL,URL',
    if_absent='none',
  )
  samplers_key_env: str = commands.flag(
    '',
    "The environment variable with the samplers' key.",
    value='VARIABLE',
    if_absent='none',
  )
  vllm_folder: str = commands.flag(
    '',
    'A folder that the samplers see, for weights: they are vLLM servers.',
    value='DIR',
    if_absent='they are posttrain.serve --sampler',
  )

  coordinator: str | None = commands.coordinator()
  num_processes: int | None = commands.num_processes(
    'The number of processes; with --dry_run --devices, of those to plan for.'
  )
  process_id: int | None = commands.process_id()

  def __post_init__(self):
    if not self.workdir and not self.dry_run:
      raise ValueError('--workdir=DIR must be given, or --dry_run')
    if self.devices and not self.dry_run:
      raise ValueError('--devices must be given with --dry_run')
    urls = [] if self.samplers is None else self.samplers.split(',')
    for url in urls:
      if not re.fullmatch(r'https?://\S+', url) or urls.count(url) > 1:
        raise ValueError(
          '--samplers must be different addresses with commas between them, as '
          f'in http://127.0.0.1:8001: got {errors.quote(self.samplers)}'
        )
    for name in ('samplers_key_env', 'vllm_folder'):
      if getattr(self, name) and not urls:
        raise ValueError(f'--{name} must be given with --samplers')
    commands.api_key('--samplers_key_env', self.samplers_key_env)
    if self.vllm_folder and not os.path.isdir(self.vllm_folder):
      raise ValueError(
        f'--vllm_folder must be a folder: got {errors.quote(self.vllm_folder)}'
      )

  @property
  def planned(self) -> Devices | None:
    """Returns the devices that `devices` and `num_processes` name."""
    if self.devices is None:
      return None
    kind, _, count = self.devices.rpartition(':')
    if kind not in ('', 'cpu', 'gpu', 'tpu') or not count.isdecimal():
      raise ValueError(
        '--devices must be a number, or one after cpu:, gpu: or tpu:, as in '
        f'gpu:8: got {errors.quote(self.devices)}'
      )
    return kind or None, int(count), self.num_processes or 1

  @property
  def decoding(self) -> types.Samplers | None:
    """Returns the samplers and what belongs to them."""
    if self.samplers is None:
      return None
    urls = tuple(self.samplers.split(','))
    return types.Samplers(urls, self.samplers_key_env, self.vllm_folder)

  @property
  def profiled(self) -> range | None:
    """Returns the steps of `profile`."""
    if self.profile is None:
      return None
    numbers = re.fullmatch(r'(\d{1,9}):(\d{1,9})', self.profile, re.ASCII)
    first, last = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= first <= last:
      raise ValueError(
        f'--profile must be FROM:TO, as in 3:5: got {self.profile!r}'
      )
    return range(first, last + 1)


PARSER = commands.Parser(Flags, __doc__, names.flag)


def load(
  path: str,
  overrides: Sequence[tuple[str, str]] = (),
  trust_config: bool = False,
  check: bool = True,
) -> schema.Run:
  """Reads a recipe and its overrides; returns the checked options.

  Args:
    path: `FILE.py`, `FILE.py:ARGUMENT`, or the config.json of a workdir.
    overrides: (dotted key, text of the value), applied in order.
    trust_config: whether a config.json may name any function and server, see
      `config.checks`; a recipe may.

  Raises:
    ValueError: names the key that is wrong and the values it allows.
  """
  node = config.load(path)
  config.override_all(node, overrides)
  try:
    run = config.build(node)
    if config.is_json(path):
      checks.check_trust(run, path, overrides, trust_config)
    if check:
      checks.check(run)
  except ValueError as error:
    # A value of the recipe, or a default, that does not go with an override.
    key = re.match(r'config\.(\S+) must ', str(error))
    typed = [x for x, _ in overrides if key and x in key[1]]
    typed += [x for x in re.split('^.*?:|,', path) if repr(x) in str(error)]
    if overrides and key and not typed:
      raise ValueError(
        f'{error}; the value is not of the overrides, but of --config='
        f'{path.partition(":")[0]} or a default: override it as well'
      ) from None
    raise
  return run


def claim(workdir: str, options: dict[str, Any], stages: Any) -> None:
  """Writes config.json; refuses a workdir of another config or other data.

  Args:
    workdir: the folder.
    options: the run's options, as plain data.
    stages: the stages' components, whose data are compared.

  Raises:
    ValueError: the config or the data differ.
  """
  from posttrain.stage import preflight

  preflight.check_resume(options, workdir, stages)
  os.makedirs(os.path.join(workdir, 'rollouts'), exist_ok=True)
  with disk.replacing(os.path.join(workdir, 'config.json')) as f:
    json.dump(options, f, indent=2)


def train(
  run: schema.Run,
  workdir: str,
  time_limit: float | None = None,
  profile: range | None = None,
  place: commands.Place | None = None,
  samplers: types.Samplers | None = None,
) -> dict[str, Any] | None:
  """Trains a run from its newest checkpoint to its end; writes its report.

  Prints the plan to stderr, nothing to stdout.

  Args:
    run: the options, from `load`.
    workdir: a new folder, or one of the same run, which is continued.
    time_limit: seconds of the process before which it saves and stops.
    profile: the steps of each stage to trace; None = none.
    place: the place of this process in a run of several; None = the only one.
    samplers: the processes that decode with the policy; None = this one does.

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
    from posttrain import compilation, machine, train
    from posttrain.hosts import joining
    from posttrain.report import page
    from posttrain.rollout import calls
    from posttrain.stage import preflight, results

    # 1. Join the other processes, which must have the same options.
    stack.enter_context(joining.join(place, os.path.join(workdir, 'hosts')))
    with watchdog.phase('plan', first=True):
      resolved = _resolve(run, None, samplers)
    options = resolved.options
    mine = {**options, 'versions': machine.versions(*machine.VERSIONS)}
    first, *others = processes.gather(mine)
    for index, other in enumerate(others, 1):
      if differ := config.changes(first, other):
        raise ValueError(
          'all processes of a run must have the same options and versions: '
          f'process {index} differs from process 0 in {differ}'
        )

    # 2. Check everything that can be checked before anything is written.
    with watchdog.phase('plan', first=True):
      stages = preflight.check(resolved)

    # 3. Claim the workdir.
    me = f'process {os.getpid()} on {socket.gethostname()}'
    peers = processes.gather(me)[1:]

    steps = {name: stage.steps for name, stage in run.stages.items()}
    sent = trackers.Trackers(run.metrics.trackers, steps)
    stack.callback(sent.finish)

    def begin() -> None:
      try:
        os.makedirs(workdir, exist_ok=True)
      except OSError as error:
        raise OSError(f'--workdir must be a folder: {error}') from error
      seconds = _LOCK_SECONDS if peers else disk.BRIEFLY
      stack.enter_context(disk.lock(workdir, '--workdir', peers, seconds))
      claim(workdir, options, stages)
      sizes = {
        name: {'parameters': x.plan.parameters, 'trained': x.plan.trained}
        for name, x in stages.items()
      }
      machine.begin(workdir, sizes)
      sent.start(options, workdir)

    processes.on(0, begin)
    _print_plans(run, stages, sys.stderr)

    # 4. Train; write the report, without which a finished run is finished.
    compilation.enable_compilation_cache(run.compilation_cache)
    report = page.Periodic(workdir, sent.log)
    try:
      final = train.run(stages, workdir, stop, profile, report)
    except calls.EndpointError:
      stop.check('a wait for a server', False)
      raise

    def end() -> None:
      machine.end(workdir)
      report.write()

    with watchdog.phase('report', first=True):
      processes.on(0, end)
    is_first = processes.is_first()
  if not is_first:
    return None
  print('\n'.join(results.lines(run, workdir)), file=sys.stderr)
  return final


def _resolve(
  run: schema.Run, devices: Devices | None, samplers: types.Samplers | None
) -> Any:
  """Returns the resolved options of a run whose trackers are installed."""
  from posttrain.stage import preflight
  from posttrain.util import memory

  memory.keep_freed_memory()
  processes.on(0, lambda: trackers.check(run.metrics.trackers))
  return preflight.resolve(run, devices, samplers)


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
    lines += stage.data.shown(color=file.isatty())
    print('\n'.join(lines), file=file)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code. `argv=None`: the process's."""
  if argv is None:
    imports.add_current_folder()  # the console script has its own instead
  return PARSER.run(functools.partial(_run, is_process=argv is None), argv)


def _run(flags: Flags, is_process: bool = False) -> int:
  try:
    limit, devices, steps = flags.time_limit, flags.planned, flags.profiled
    if limit is not None:
      limit = preemption.seconds(limit, '--time_limit')
    if is_process and flags.coordinator is None:  # a recipe may need jax
      line = f'posttrain {posttrain.__version__} checks {flags.config}'
      print(line, file=sys.stderr, flush=True)
    with hub.keeping(flags.workdir):
      run = load(flags.config, flags.overrides, flags.trust_config)
    if flags.dry_run:
      from posttrain.stage import preflight

      stages = preflight.check(_resolve(run, devices, flags.decoding))
      _print_plans(run, stages, sys.stdout, devices, details=True)
      return 0
    place = commands.place(
      flags.coordinator, flags.num_processes, flags.process_id
    )
    final = train(run, flags.workdir, limit, steps, place, flags.decoding)
    if final is not None:
      print(json.dumps(final))
  except KeyboardInterrupt:
    print(
      'interrupted without saving (SIGTERM saves); the same command continues '
      'from the newest checkpoint, if there is one',
      file=sys.stderr,
    )
    return errors.INTERRUPTED
  except preemption.Preempted as stopped:
    print(
      f'stopped at {stopped}; run the same command to continue', file=sys.stderr
    )
    return errors.PREEMPTED
  return 0


if __name__ == '__main__':
  sys.exit(main())
