"""The report command: writes the page of a run, or of several overlaid.

    python -m posttrain.report runs/arithmetic
    python -m posttrain.report runs/arithmetic --live
    python -m posttrain.report runs/a runs/b --output=both.html

A run writes its own report, RUN/report.html, from its first step on. This
command writes it again, compares runs, or follows runs with --live. The path of
the page is printed to stdout.

Exit codes: 0 done, 1 the machine failed, 2 the command line or a file of a run
is wrong, 130 interrupted.
"""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Sequence

from posttrain.util import exits
from posttrain.util import flags as flags_lib

_POLL = 0.5  # seconds between two looks at the files of a run


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
    'ended or Ctrl-C; an open page loads itself again.',
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
  while flags.live and not finished:
    _wait(flags.runs, flags.seconds)
    # The run may be writing the same file: then this page is the next one.
    with contextlib.suppress(FileNotFoundError, FileExistsError):
      finished = page.write_all(flags.runs, path, flags.seconds)
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


def _wait(runs: Sequence[str], seconds: float) -> None:
  """Waits at least so long, and until a file of a run has changed."""
  before = _written(runs)
  time.sleep(seconds)
  while _written(runs) == before:
    time.sleep(_POLL)


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
