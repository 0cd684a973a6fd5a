"""The fault matrix: injects faults, and checks what each command does then.

    python -m experiments.trials [--only=AREA,AREA.NAME] [--jobs=2] [--list]
                                 [--results=FILE]

Each trial (`experiments/trials/`, one module per place of the fault) states a
promise, injects a fault, and checks exit code, message, and that nothing is
lost. Prints one Markdown table, a row per trial, and how many were good, fell
short, and were not tried, because an optional package is missing; exits with 1
if one fell short. `--results` writes the table to a file as well.
"""

import argparse
import collections
import concurrent.futures
import datetime
import importlib
import logging
import pathlib
import pkgutil
import sys
import tempfile
import time
import traceback

from experiments import trials
from experiments.trials import base

HEAD = '| trial | promise | seen | seconds | |\n|---|---|---|---|---|'
GOOD, SHORT, NOT_TRIED = 'good', 'FELL SHORT', 'not tried'


def find(only: str = '') -> list[base.Trial]:
  """Returns the trials of the areas and names in `only`, '' = all."""
  for module in pkgutil.iter_modules(trials.__path__):
    importlib.import_module(f'{trials.__name__}.{module.name}')
  wanted = set(filter(None, only.split(',')))
  unknown = wanted - {x for t in base.TRIALS for x in (t.area, t.name)}
  if unknown:
    raise ValueError(f'--only must name trials: got {sorted(unknown)}')
  return [t for t in base.TRIALS if not wanted or {t.area, t.name} & wanted]


def run(trial: base.Trial, scratch: pathlib.Path, shared: base.Shared) -> dict:
  """Runs one trial; returns its row."""
  begin, result = time.monotonic(), SHORT
  try:
    seen = trial.run(base.Scratch(scratch / trial.name, shared))
    result = GOOD
  except base.NotTried as reason:
    seen, result = f'{reason}', NOT_TRIED
  except AssertionError as error:
    seen = f'{error}'
  except Exception:  # a fault of the trial itself
    seen = traceback.format_exc()
  row = {
    'trial': trial.name,
    'promise': trial.promise,
    'seen': seen,
    'seconds': time.monotonic() - begin,
    'result': result,
  }
  print(line(row), file=sys.stderr, flush=True)
  return row


def line(row: dict) -> str:
  """Returns a row of the table."""
  cells = (
    row['trial'],
    row['promise'],
    ' '.join(row['seen'].split())[:600].replace('|', '\\|'),
    f'{row["seconds"]:.1f}',
    row['result'],
  )
  return f'| {" | ".join(cells)} |'


def run_all(chosen: list[base.Trial], jobs: int) -> list[dict]:
  """Runs the trials, `jobs` at a time; then those with `alone`, singly."""
  with tempfile.TemporaryDirectory() as folder:
    scratch = pathlib.Path(folder)
    shared = base.Shared(scratch)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
      beside = [
        pool.submit(run, t, scratch, shared) for t in chosen if not t.alone
      ]
      rows = [future.result() for future in beside]
    rows += [run(t, scratch, shared) for t in chosen if t.alone]
  order = {t.name: i for i, t in enumerate(chosen)}
  return sorted(rows, key=lambda row: order[row['trial']])


def main(argv: list[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--only', default='')
  parser.add_argument('--jobs', type=int, default=2)
  parser.add_argument('--list', action='store_true')
  parser.add_argument('--results', type=pathlib.Path)
  args = parser.parse_args(argv)
  chosen = find(args.only)
  if args.list:
    print('\n'.join(f'{t.name}: {t.promise}' for t in chosen))
    return 0
  logging.basicConfig(handlers=[logging.NullHandler()])  # trials read them
  begin = time.monotonic()
  rows = run_all(chosen, args.jobs)
  results = collections.Counter(row['result'] for row in rows)
  table = '\n'.join(
    (
      HEAD,
      *map(line, rows),
      '',
      f'{datetime.date.today()}: {len(rows)} trials, {results[GOOD]} good, '
      f'{results[SHORT]} fallen short, {results[NOT_TRIED]} not tried, '
      f'{time.monotonic() - begin:.0f} s.',
    )
  )
  print(table)
  if args.results:
    args.results.write_text(table + '\n')
  return 1 if results[SHORT] else 0


if __name__ == '__main__':
  sys.exit(main())
