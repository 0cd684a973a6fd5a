"""The report command: writes the page of a run, or of several overlaid.

    python -m posttrain.report runs/arithmetic
    python -m posttrain.report runs/arithmetic --live
    python -m posttrain.report runs/a runs/b --output=both.html

A run writes its own report, RUN/report.html, from its first step on. This
command writes it again, compares runs, or follows runs with --live. The path of
the page is printed to stdout. A run that stopped before its end is followed no
longer: --live says so on stderr and ends.

Exit codes: 0 done, 1 the machine failed, 2 the command line or a file of a run
is wrong, 130 interrupted.
"""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Sequence

from posttrain.util import exits, locks
from posttrain.util import flags as flags_lib

_POLL = 0.5  # seconds between two looks at the files of a run
# Seconds without a process of a run, and without a change of its files, after
# which it has stopped: a run that is started again takes its lock within them.
# A run whose lock was seen has stopped as soon as the lock is free.
_START = 30.0


@dataclasses.dataclass
class Flags:
  """The command line."""

  runs: list[str] = flags_lib.required(
    'RUN', 'Workdirs of runs; several are overlaid.', by_position=True
  )
  output: str | None = flags_lib.flag(
    None,
    'The page.',
    value='FILE',
    if_absent='RUN/report.html; of several runs, report.html in this folder',
  )
  live: bool = flags_lib.flag(
    False,
    'Writes the page again when a run has new steps, until all runs have '
    'ended or stopped, or Ctrl-C; an open page loads itself again.',
  )
  seconds: float = flags_lib.flag(
    5.0, 'With --live: the least seconds between two pages.', least=1.0
  )


PARSER = flags_lib.Parser(Flags, __doc__)


def report(flags: Flags) -> int:
  """Writes the page; returns the exit code.

  Raises:
    ValueError: a run has no metrics, or a file of it is damaged.
  """
  _check_runs(flags.runs, flags.live)
  from posttrain.report import page

  path = flags.output or (
    page.path_of(flags.runs[0]) if len(flags.runs) == 1 else 'report.html'
  )
  folder = os.path.dirname(os.path.abspath(path))
  if not os.path.isdir(folder):
    raise ValueError(
      f'--output must be a file in a folder that exists: got {path!r}; '
      f'create {folder}'
    )
  finished = page.write_all(
    flags.runs, path, flags.seconds if flags.live else None
  )
  print(path, flush=True)
  held: set[str] = set()
  stopped = False
  while flags.live and not (finished or stopped):
    stopped = _wait(flags.runs, flags.seconds, held)
    # The run may be writing the same file: then this page is the next one.
    with contextlib.suppress(FileNotFoundError, FileExistsError):
      reload = None if stopped else flags.seconds
      finished = page.write_all(flags.runs, path, reload)
  if stopped and not finished:
    _print_stopped(flags.runs)
  return exits.DONE


def _check_runs(runs: Sequence[str], live: bool) -> None:
  """Refuses folders of no run; with --live, waits for the folder of one run.

  Of several folders those that do not exist are refused with --live, too: one
  of them may be misspelt, and the page would wait for it for ever.

  Raises:
    ValueError: names the folders.
  """
  exists = os.path.isdir if live else lambda run: os.path.exists(_metrics(run))
  missing = [run for run in runs if not exists(run)]
  if missing and not (live and len(runs) == 1):
    raise ValueError(
      f'RUN must be the workdir of a run: got {", ".join(map(repr, missing))}, '
      + (
        'which does not exist; correct the path, or start that run first'
        if live
        else 'which has no metrics.jsonl; name its folder, or wait for its '
        'first step with --live'
      )
    )
  for run in runs:
    if not os.path.exists(_metrics(run)):
      print(
        f'waiting for the first step of {run!r}: {_metrics(run)} does not '
        'exist yet',
        file=sys.stderr,
        flush=True,
      )
  while live and not all(map(os.path.isdir, runs)):
    time.sleep(_POLL)


def _wait(runs: Sequence[str], seconds: float, held: set[str]) -> bool:
  """Waits at least so long, and until a file of a run has changed.

  Args:
    runs: the runs' folders.
    seconds: the least seconds.
    held: runs that a process was seen to hold the lock of; this call adds to
      them.

  Returns:
    Whether no run goes on instead: each has begun, and no process holds its
    lock.
  """
  before, idle = _written(runs), 0.0
  held |= {run for run in runs if locks.is_held(run)}
  time.sleep(seconds)
  while _written(runs) == before:
    now = {run for run in runs if locks.is_held(run)}
    held |= now
    if now or not all(map(_has_begun, runs)):
      idle = 0.0
    elif idle >= _START or held.issuperset(runs):
      return True
    time.sleep(_POLL)
    idle += _POLL
  return False


def _has_begun(run: str) -> bool:
  """Returns whether a run has had its lock: it writes these files under it."""
  return any(map(os.path.exists, (_metrics(run), _about(run))))


def _print_stopped(runs: Sequence[str]) -> None:
  """Names the runs that have stopped before their end."""
  from posttrain.report import runs as runs_lib

  stopped = [run for run in runs if not runs_lib.read(run).finished]
  if not stopped:
    return
  verb = 'has' if len(stopped) == 1 else 'have'
  paths = ', '.join(os.path.join(run, locks.NAME) for run in stopped)
  print(
    f'{", ".join(map(repr, stopped))} {verb} stopped before the end (no '
    f'process holds {paths}), so --live ends; to follow again, continue '
    'training, then repeat this command',
    file=sys.stderr,
    flush=True,
  )


def _written(runs: Sequence[str]) -> list[float]:
  """Returns when the files of the runs were last written."""
  paths = [path for run in runs for path in (_metrics(run), _about(run))]
  return [os.path.getmtime(x) if os.path.exists(x) else 0.0 for x in paths]


def _metrics(run: str) -> str:
  return os.path.join(run, 'metrics.jsonl')


def _about(run: str) -> str:
  return os.path.join(run, 'about.json')


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code. `argv=None`: the process's."""
  return PARSER.run(report, argv)


if __name__ == '__main__':
  sys.exit(main())
