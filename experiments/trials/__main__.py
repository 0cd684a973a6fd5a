"""The fault matrix: injects faults, and checks what each command does then.

    python -m experiments.trials [--only=AREA,AREA.NAME] [--jobs=2] [--list]

Each trial (`faults.py`, `server.py`) states a promise, injects a fault, and
checks exit code, message, and that nothing is lost. Prints one Markdown table,
a row per trial, and how many kept their promise, fell short of it, or were not
tried because a package is missing; exits with 1 if one fell short.
"""

import concurrent.futures
import datetime
import pathlib
import sys
import tempfile
import time
import traceback

from experiments.benchmarks import timing
from experiments.launch import results
from experiments.trials import base, faults, server  # noqa: F401

HEAD = 'trial', 'promise', 'seen', 'seconds', ''
SHORT, NOT_TRIED = 'FELL SHORT', 'not tried'


def find(only: str = '') -> list[base.Trial]:
  """Returns the trials of the areas and names in `only`, '' = all."""
  wanted = set(filter(None, only.split(',')))
  unknown = wanted - {x for t in base.TRIALS for x in (t.area, t.name)}
  if unknown:
    raise ValueError(f'--only must name trials: got {sorted(unknown)}')
  return [t for t in base.TRIALS if not wanted or {t.area, t.name} & wanted]


def run(trial: base.Trial, scratch: pathlib.Path, shared: base.Shared) -> list:
  """Runs one trial; returns its row of the table."""
  begin, result = time.monotonic(), SHORT
  try:
    seen = trial.run(base.Scratch(scratch / trial.name, shared))
    result = 'good'
  except AssertionError as error:
    seen = f'{error}'
  except base.NotTried as error:
    seen, result = f'{error}', NOT_TRIED
  except Exception:  # a fault of the trial itself
    seen = traceback.format_exc()
  seen = ' '.join(seen.split())[:600]
  seconds = f'{time.monotonic() - begin:.1f}'
  row = [trial.name, trial.promise, seen, seconds, result]
  print(*row, sep=' | ', file=sys.stderr, flush=True)
  return row


def main() -> int:
  """Runs the command; returns its exit code."""
  parser = timing.parser(__doc__, only='', jobs=2)
  parser.add_argument('--list', action='store_true')
  args = parser.parse_args()
  chosen = find(args.only)
  if args.list:
    print('\n'.join(f'{t.name}: {t.promise}' for t in chosen))
    return 0
  begin = time.monotonic()
  with (
    tempfile.TemporaryDirectory() as folder,
    concurrent.futures.ThreadPoolExecutor(args.jobs) as pool,
  ):
    scratch = pathlib.Path(folder)
    shared = base.Shared(scratch)
    rows = list(pool.map(lambda t: run(t, scratch, shared), chosen))
  results_of = [row[-1] for row in rows]
  short = results_of.count(SHORT)
  table = results.markdown(HEAD, rows)
  table += [
    '',
    f'{datetime.date.today()}: {len(rows)} trials, {results_of.count("good")} '
    f'good, {short} fallen short, {results_of.count(NOT_TRIED)} not tried, '
    f'{time.monotonic() - begin:.0f} s.',
  ]
  print('\n'.join(table))
  return int(short > 0)


if __name__ == '__main__':
  sys.exit(main())
