"""The training command: runs every stage of a recipe, in order.

    python -m posttrain.main --config=configs/arithmetic.py \\
        --workdir=runs/arithmetic --config.seed=1
    python -m posttrain.main --config=configs/arithmetic.py:tiny --dry_run

The same command with the same workdir continues a run from its newest
checkpoint. The last line on stdout is one JSON object with the final
evaluation. The console script `posttrain` is this command.

Exit codes: 0 done, 1 the run failed, 2 the command line or the config is wrong,
75 stopped by SIGTERM after saving, 130 interrupted.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from posttrain import schema
from posttrain.config import checks
from posttrain.config import load as config
from posttrain.util import flags as flags_lib
from posttrain.util import preemption


@dataclasses.dataclass
class Flags:
  """The command line."""

  config: str = flags_lib.required(
    'FILE',
    'The recipe: FILE.py, FILE.py:ARGUMENT (configs/arithmetic.py:tiny), or '
    'the config.json of a workdir.',
  )
  overrides: list[tuple[str, str]] = flags_lib.overrides()
  workdir: str | None = flags_lib.flag(
    None,
    'The folder of the run: checkpoints, metrics and the report. Required '
    'without --dry_run.',
    value='DIR',
  )
  dry_run: bool = flags_lib.flag(
    False,
    'Prints the plan (batch sizes, parameters, a memory estimate) and trains '
    'nothing.',
  )

  def __post_init__(self):
    if not self.workdir and not self.dry_run:
      raise ValueError('--workdir=DIR must be given, or --dry_run')


PARSER = flags_lib.Parser(Flags, __doc__)


def load(path: str, overrides: Sequence[tuple[str, str]] = ()) -> schema.Run:
  """Reads a recipe and its overrides; returns the checked options.

  Args:
    path: `FILE.py`, `FILE.py:ARGUMENT`, or the config.json of a workdir.
    overrides: (dotted key, text of the value), applied in order.

  Raises:
    ValueError: names the key that is wrong and the values it allows.
  """
  node = config.load(path)
  for key, value in overrides:
    config.override(node, key, value)
  run = config.build(node)
  checks.check(run)
  return run


def claim(workdir: str, run: schema.Run) -> None:
  """Writes config.json; refuses a workdir that holds a run of another config.

  Raises:
    ValueError: the config differs, or the folder cannot be written.
  """
  path = os.path.join(workdir, 'config.json')
  values = config.to_dict(run)
  used = os.path.exists(os.path.join(workdir, 'metrics.jsonl'))
  if used and os.path.exists(path):
    with open(path) as f:
      config.check_resume(json.load(f), values)
  try:
    os.makedirs(os.path.join(workdir, 'rollouts'), exist_ok=True)
    with open(path + '.tmp', 'w') as f:
      json.dump(values, f, indent=2)
    os.replace(path + '.tmp', path)
  except OSError as error:
    raise ValueError(f'--workdir must be writable: {error}') from error


def train(run: schema.Run, workdir: str) -> dict[str, Any]:
  """Trains a run from its newest checkpoint to its end; writes its report.

  Prints the plan to stderr, nothing to stdout.

  Args:
    run: the options, from `load`.
    workdir: a new folder, or one of the same run, which is continued.

  Returns:
    The final evaluation: `stage`, `step` and every `eval/*` value.

  Raises:
    ValueError: options, weights or workdir do not fit each other; raised
      before anything is compiled.
    Preempted: the run stopped after SIGTERM; everything is saved.
  """
  with preemption.on_sigterm() as stop:
    # Imported here so that command-line mistakes are reported without jax.
    from posttrain import compilation
    from posttrain import train as loop
    from posttrain.report import page

    stages = _preflight(run, sys.stderr)
    claim(workdir, run)
    compilation.enable_compilation_cache(run.compilation_cache)
    final = loop.run(stages, workdir, stop)
    page.write(workdir)
    return final


def _preflight(run: schema.Run, file: TextIO) -> dict[str, Any]:
  """Returns the checked components of each stage; prints their plans."""
  from posttrain.stage import components
  from posttrain.util import memory

  memory.keep_freed_memory()
  stages = components.preflight(run)
  for stage in stages.values():
    print('\n'.join(stage.plan.lines()), file=file)
  return stages


def launch(run: schema.Run, workdir: str | None, dry_run: bool) -> None:
  """Prints the plan; trains unless `dry_run`."""
  if dry_run:
    _preflight(run, sys.stdout)
  else:
    print(json.dumps(train(run, workdir)))


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code. `argv=None`: the process's."""
  return PARSER.run(_run, argv, 'configs.', config.RECIPE_PREFIX)


def _run(flags: Flags) -> int:
  try:
    run = load(flags.config, flags.overrides)
    launch(run, flags.workdir, flags.dry_run)
  except KeyboardInterrupt:
    print(
      'interrupted; run the same command to continue from the newest '
      'checkpoint',
      file=sys.stderr,
    )
    return flags_lib.INTERRUPTED
  except preemption.Preempted as stopped:
    print(
      f'saved and stopped at {stopped}; run the same command to continue',
      file=sys.stderr,
    )
    return preemption.EXIT_CODE
  return 0


if __name__ == '__main__':
  sys.exit(main())
