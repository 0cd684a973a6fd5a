"""Kills a run at random times, many times, and compares what comes of it.

    python -m experiments.kill_resume --kills=20 --saving=5 --seed=0

1. A run goes to its end undisturbed, twice: with an empty compilation cache,
   and with a full one, which is the truth.
2. The same run is started again and again, and killed (SIGKILL) a uniformly
   random time after its start, until it gets through; then from the beginning
   again, until there were enough kills, and enough of them while a checkpoint
   was being written (its temporary folder is left behind).
3. Parameters, optimizer state and metrics (but `time/*`) of every run that got
   through must equal the truth bit by bit.

Prints one JSON object per line; exits non-zero where something differs.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
import orbax.checkpoint as ocp

from posttrain import checkpoint, metrics, tree

STAGE = 'sft'


def command(recipe: str, workdir: pathlib.Path, cache: pathlib.Path):
  """The run that is killed: it saves often, to be caught at it."""
  return [
      sys.executable, '-m', 'posttrain.main', f'--config={recipe}',
      f'--workdir={workdir}', f'--config.compilation_cache={cache}',
      '--config.checkpoint.every=2', f'--config.{STAGE}.steps=60',
  ]  # fmt: skip


def launch(argv) -> subprocess.Popen:
  return subprocess.Popen(
      argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
  )


def finish(process: subprocess.Popen) -> None:
  """Waits for a run to end well."""
  _, errors = process.communicate()
  if process.returncode:
    sys.exit(f'the run failed:\n{errors}')


def outcome(workdir: pathlib.Path) -> dict:
  """What a finished run left: every array, and every metric but the time."""
  folder = checkpoint.find(str(workdir))
  with ocp.PyTreeCheckpointer() as reader:
    saved = reader.metadata(folder / 'state').item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(np.ndarray), saved)
    arrays = tree.flat(
        reader.restore(folder / 'state', restore_args=as_numpy)
    )
  rows = [
      {k: v for k, v in row.items() if not k.startswith('time/')}
      for row in metrics.read(str(workdir / 'metrics.jsonl'))
  ]
  return {'step': int(folder.name), 'arrays': arrays, 'rows': rows}


def differences(truth: dict, other: dict) -> list[str]:
  """Names everything that is not bitwise equal."""
  wrong = []
  if truth['rows'] != other['rows']:
    wrong.append('metrics')
  if truth['arrays'].keys() != other['arrays'].keys():
    wrong.append('tree')
  for path in truth['arrays'].keys() & other['arrays'].keys():
    a, b = (np.asarray(x['arrays'][path]) for x in (truth, other))
    if a.dtype != b.dtype or a.tobytes() != b.tobytes():
      wrong.append(path)
  return wrong


def unfinished(folder: pathlib.Path) -> set[tuple[str, int]]:
  """(name, inode) of the steps that are half written.

  Not the times: clearing out an old one changes those, too.
  """
  return {
      (path.name, path.stat().st_ino)
      for path in folder.glob('*') if 'tmp' in path.name
  }


def kill_at_random(
    argv, workdir: pathlib.Path, rng: random.Random, longest: float
) -> dict | None:
  """Starts a run and kills it; None if it got through before."""
  folder = workdir / 'checkpoints' / STAGE
  before = unfinished(folder)
  process = launch(argv)
  delay = rng.uniform(0.0, longest)
  start = time.monotonic()
  while time.monotonic() - start < delay and process.poll() is None:
    time.sleep(0.005)
  if process.poll() is not None:
    finish(process)
    return None
  process.kill()
  process.wait()
  process.stderr.close()
  # By this process, not by one that was killed before it.
  saving = bool(unfinished(folder) - before)
  rows = metrics.read(str(workdir / 'metrics.jsonl'))
  at = rows[-1]['step'] if rows else None
  return {'killed_after_s': round(delay, 2), 'step': at, 'saving': saving}


def main(argv=None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--config', default='configs/arithmetic_sft.py:tiny')
  parser.add_argument('--kills', type=int, default=20)
  parser.add_argument('--saving', type=int, default=5)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args(argv)
  rng = random.Random(args.seed)
  with tempfile.TemporaryDirectory() as scratch:
    check(args, rng, pathlib.Path(scratch))


def check(args, rng: random.Random, scratch: pathlib.Path) -> None:
  cache = scratch / 'compiled'
  finish(launch(command(args.config, scratch / 'cold', cache)))
  start = time.monotonic()
  finish(launch(command(args.config, scratch / 'warm', cache)))
  longest = time.monotonic() - start
  truth = outcome(scratch / 'warm')
  wrong = differences(truth, outcome(scratch / 'cold'))
  print(json.dumps({'seed': args.seed, 'undisturbed_s': round(longest, 1),
                    'steps': truth['step']}), flush=True)  # fmt: skip
  kills, saving, trial = 0, 0, 0
  while kills < args.kills or saving < args.saving:
    workdir = scratch / f'trial_{trial}'
    argv = command(args.config, workdir, cache)
    while kills < args.kills or saving < args.saving:
      killed = kill_at_random(argv, workdir, rng, longest)
      if killed is None:
        break
      kills, saving = kills + 1, saving + killed['saving']
      print(json.dumps({'trial': trial, **killed}), flush=True)
    if not (workdir / 'report.html').exists():
      finish(launch(argv))
    differs = differences(truth, outcome(workdir))
    print(json.dumps({'trial': trial, 'differs': differs}), flush=True)
    wrong += differs
    trial += 1
  print(json.dumps({'kills': kills, 'while_saving': saving, 'runs': trial,
                    'differences': len(wrong)}))  # fmt: skip
  assert kills >= args.kills and saving >= args.saving
  if wrong:
    sys.exit('a killed run differs from the undisturbed one')


if __name__ == '__main__':
  main()
