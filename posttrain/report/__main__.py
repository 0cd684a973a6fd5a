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
import functools
import os
import sys
import time
from collections.abc import Sequence

from posttrain.util import commands, disk, errors

_POLL = 0.5  # seconds between two looks at the files of a run
# Seconds without a process of a run, and without a change of its files, after
# which it has stopped: a run that is started again takes its lock within them.
_IDLE = 30.0


@dataclasses.dataclass
class Flags:
  """The command line."""

  runs: list[str] = commands.required(
    'RUN', 'Workdirs of runs; several are overlaid.', by_position=True
  )
  output: str | None = commands.flag(
    None,
    'The page.',
    value='FILE',
    if_absent='RUN/report.html; of several runs, report.html in this folder',
  )
  live: bool = commands.flag(
    False,
    'Writes the page again when a run has new steps, until all runs have '
    'ended or stopped, or Ctrl-C; an open page loads itself again.',
  )
  seconds: float = commands.flag(
    5.0, 'With --live: the least seconds between two pages.', least=1.0
  )


PARSER = commands.Parser(Flags, __doc__)


def report(options: Flags) -> int:
  """Writes the page; returns the exit code.

  Raises:
    ValueError: a run has no metrics, or a file of it is damaged.
  """
  from posttrain.report import page

  for run in options.runs:
    if not _has_metrics(run):
      if not options.live:
        raise ValueError(
          f'RUN must be the workdir of a run, with metrics.jsonl: got {run!r}'
        )
      print(f'waiting for the first step of {run!r}', file=sys.stderr)
  while not all(map(os.path.isdir, options.runs)):
    time.sleep(_POLL)
  path = options.output or (
    page.path_of(options.runs[0]) if len(options.runs) == 1 else 'report.html'
  )
  reload = options.seconds if options.live else None
  finished = page.write_all(options.runs, path, reload)
  print(path, flush=True)
  while options.live and not finished:
    stopped = not _wait(options.runs, options.seconds)
    # The run may be writing the same file: then this page is the next one.
    with contextlib.suppress(FileNotFoundError, FileExistsError):
      finished = page.write_all(options.runs, path, None if stopped else reload)
    if stopped and not finished:
      print(
        f'{", ".join(map(repr, options.runs))}: no process trains a run that '
        'has not ended, so --live ends; continue training, then repeat this '
        'command',
        file=sys.stderr,
      )
      break
  return errors.DONE


def _has_metrics(run: str) -> bool:
  return os.path.exists(os.path.join(run, 'metrics.jsonl'))


def _wait(runs: Sequence[str], seconds: float) -> bool:
  """Waits at least so long, and until a file of a run has changed.

  Args:
    runs: the runs' folders.
    seconds: the least seconds.

  Returns:
    False if no run goes on: all have begun, and none has had a process or a
    change for `_IDLE` seconds.
  """

  def written() -> list[float]:
    names = ('metrics.jsonl', 'about.json')
    paths = [os.path.join(run, name) for run in runs for name in names]
    return [os.path.getmtime(x) if os.path.exists(x) else 0.0 for x in paths]

  before, idle = written(), 0.0
  time.sleep(seconds)
  while written() == before:
    begun = all(map(_has_metrics, runs))
    if not begun or any(map(disk.is_locked, runs)):
      idle = 0.0
    elif idle >= _IDLE:
      return False
    time.sleep(_POLL)
    idle += _POLL
  return True


# Returns the exit code; takes the arguments, None = those of the process.
main = functools.partial(PARSER.run, report)

if __name__ == '__main__':
  sys.exit(main())
