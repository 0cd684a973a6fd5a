"""Runs a recipe.

    python -m posttrain.main --config=FILE[:ARGUMENT] --workdir=DIR
        [--config.KEY=VALUE ...] [--dry_run]

Started again with the same workdir, a run goes on where its newest checkpoint
stands. The last line on stdout is one JSON object with the final evaluation.
Exit codes: 0 done, 1 the run failed, 2 the command or config is wrong, 75
stopped by SIGTERM with everything saved, 130 interrupted. Every KEY, with its
default and meaning: posttrain/schema/.
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
from posttrain.util import errors, preemption


@dataclasses.dataclass
class Flags:
  """The command line."""

  config: str
  workdir: str | None
  overrides: list[tuple[str, str]]
  dry_run: bool


def parse(argv: Sequence[str]) -> Flags:
  """Reads the command line; ValueError names the argument that is wrong."""
  flags = Flags('', None, [], False)
  for argument in argv:
    name, _, value = argument.partition('=')
    if name == '--dry_run' and value in ('', 'true', 'false'):
      flags.dry_run = value != 'false'
    elif name == '--config' and value:
      flags.config = value
    elif name == '--workdir' and value:
      flags.workdir = value
    elif name.startswith('--config.') and value:
      flags.overrides.append((name.removeprefix('--config.'), value))
    else:
      raise ValueError(
        f'arguments must be --config=FILE, --workdir=DIR, '
        f'--config.KEY=VALUE or --dry_run: got {argument!r}'
      )
  if not flags.config:
    raise ValueError('--config=FILE must be given; see configs/')
  if not flags.workdir and not flags.dry_run:
    raise ValueError('--workdir=DIR must be given, or --dry_run')
  return flags


def load(path: str, overrides: Sequence[tuple[str, str]] = ()) -> schema.Run:
  """Reads a recipe: its checked options.

  Args:
    path: `FILE.py`, `FILE.py:ARGUMENT`, or the config.json of a workdir.
    overrides: (dotted key, value as on the command line), in their order.

  Raises:
    ValueError: naming the key that is wrong, and what it must be.
  """
  node = config.load(path)
  for key, value in overrides:
    config.override(node, key, value)
  run = config.build(node)
  checks.check(run)
  return run


def claim(workdir: str, run: schema.Run) -> None:
  """Writes config.json; in a used workdir, refuses another config.

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
  """Trains what a workdir lacks of a run; writes its report.

  The plan goes to stderr; nothing goes to stdout.

  Args:
    run: of `load`.
    workdir: new, or that of the same run, which goes on where it stands.

  Returns:
    The final evaluation: `stage`, `step` and every `eval/*` value.

  Raises:
    ValueError: something does not fit; before anything is compiled.
    Preempted: SIGTERM asked it to stop; everything is saved.
  """
  with preemption.on_sigterm() as stop:
    # Late, so that a mistake in the command line is answered at once.
    from posttrain import compilation
    from posttrain import train as loop
    from posttrain.report import page

    plans = _plan(run, sys.stderr)
    claim(workdir, run)
    compilation.enable_compilation_cache(run.compilation_cache)
    final = loop.run(run, workdir, plans, stop)
    page.write(workdir)
    return final


def _plan(run: schema.Run, file: TextIO) -> dict[str, Any]:
  """Prints what the stages are going to need; returns it by stage."""
  from posttrain.stage import components
  from posttrain.util import memory

  memory.keep_freed_memory()
  plans = components.preflight(run)
  for plan in plans.values():
    print('\n'.join(plan.lines()), file=file)
  return plans


def launch(run: schema.Run, workdir: str | None, dry_run: bool) -> None:
  """Prints the plan and, unless it is a dry run, trains."""
  if dry_run:
    _plan(run, sys.stdout)
  else:
    print(json.dumps(train(run, workdir)))


def main(argv: Sequence[str]) -> int:
  """Returns the exit code."""
  if '--help' in argv:
    print(__doc__)
    return 0
  try:
    flags = parse(argv)
    run = load(flags.config, flags.overrides)
    launch(run, flags.workdir, flags.dry_run)
  except KeyboardInterrupt:
    print(
      'interrupted; start again to go on from the newest checkpoint',
      file=sys.stderr,
    )
    return 130
  except preemption.Preempted as stopped:
    print(
      f'saved and stopped at {stopped}; start again to go on', file=sys.stderr
    )
    return preemption.EXIT_CODE
  except (ValueError, RuntimeError) as error:
    return errors.report(error, 'configs.', config.RECIPE_PREFIX)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
