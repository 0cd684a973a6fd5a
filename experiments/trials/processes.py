"""Runs of several processes: against one process, and with one of them lost.

    python -m experiments.trials.processes same [--counts=2,4]
        [--recipes=arithmetic,sql,dpo,rm]
    python -m experiments.trials.processes lost [--count=4] [--trials=10]
        [--signals=SIGKILL,SIGSTOP,SIGTERM]
    python -m experiments.trials.processes elastic

All processes are on this machine, connected over loopback.

`same`: a run of one process is the truth. Runs of more continue from its first
stage, so that the second begins with the same weights. Compared are: the
prompts; the parameters after the first update; the tokens of the first rollout;
later tokens, where the first ones that differ must be within rounding of the
draw; a second run of as many processes, bit by bit; and the names
of the files.

`lost`: a signal is sent to one process at a random time. After SIGKILL and
SIGSTOP all others must end within `LIMIT` seconds, after SIGTERM all must save
and end with 75. The same command then continues the run; at its end it must
equal an undisturbed one bit by bit.

`elastic`: a run of four processes is continued by one, two and four, from the
same checkpoint; the tokens of the next step must be the same.

Prints a JSON object per line; exits non-zero where something is wrong.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

from experiments.trials import flips, kill_resume
from posttrain.util import exits

EXPORTS = 'token_exports'  # a folder in the workdir
ROUNDING = 1e-4  # of a draw, which is in [0, 1)
LIMIT = 60.0  # seconds for all to end after one is lost
_WAIT = 900.0  # seconds for a run to end


@dataclasses.dataclass(frozen=True)
class Recipe:
  """A run of two stages; the second is the one that is compared."""

  config: str
  stage: str
  overrides: dict[str, object]
  tokens: bool = True  # whether the second stage has samples of tokens


def recipes() -> dict[str, Recipe]:
  """Returns the runs by name."""
  every = {'checkpoint.every': 1, 'checkpoint.keep_every': 1}
  made = {
    'arithmetic': Recipe(
      'arithmetic',
      'grpo',
      {
        **kill_resume.setting('grpo'),
        'metrics.export_tokens': 1,
        'grpo.steps': 8,
        'grpo.optim.warmup_steps': 0,
      },
    ),
    'sql': Recipe(
      'sql',
      'grpo',
      {
        'metrics.export_tokens': 1,
        'metrics.progress': False,
        'sft.batch.micro_batch_tokens': 1024,
        'grpo.batch.micro_batch_tokens': 1024,
      },
    ),
    'dpo': Recipe(
      'arithmetic_dpo',
      'dpo',
      {
        **kill_resume.setting('dpo'),
        'dpo.steps': 6,
        'dpo.optim.warmup_steps': 0,
      },
      tokens=False,
    ),
    'rm': Recipe(
      'arithmetic_reward_model',
      'rm',
      {**kill_resume.setting('rm'), 'rm.steps': 6, 'rm.optim.warmup_steps': 0},
      tokens=False,
    ),
  }
  return {
    name: dataclasses.replace(x, overrides={**x.overrides, **every})
    for name, x in made.items()
  }


class Run:
  """The processes of one run."""

  def __init__(self, recipe: Recipe, workdir: pathlib.Path, count: int, cache):
    """Starts them."""
    self.workdir, self.began = workdir, time.monotonic()
    flags = [
      f'--config=configs/{recipe.config}.py:tiny',
      f'--workdir={workdir}',
      f'--config.compilation_cache={cache}',
      *(f'--config.{key}={value}' for key, value in recipe.overrides.items()),
    ]
    port = _free_port()
    self._logs = [
      pathlib.Path(f'{workdir}.{i}.log').open('a') for i in range(count)
    ]
    self.processes = [
      subprocess.Popen(
        [sys.executable, '-m', 'posttrain.main', *flags]
        + [
          f'--coordinator=127.0.0.1:{port}',
          f'--num_processes={count}',
          f'--process_id={index}',
        ]
        * (count > 1),
        stdout=subprocess.DEVNULL,
        stderr=log,
      )
      for index, log in enumerate(self._logs)
    ]

  def wait(self, seconds: float = _WAIT, among=None) -> list[int | None]:
    """Returns the exit codes; None for processes that have not ended."""
    end = time.monotonic() + seconds
    chosen = self.processes if among is None else among
    for process in chosen:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(end - time.monotonic(), 0.0))
    return [process.poll() for process in chosen]

  def close(self) -> None:
    """Kills what is left."""
    for process in self.processes:
      process.kill()
      process.wait()
    for log in self._logs:
      log.close()

  def finish(self) -> float:
    """Waits for the end; returns the seconds; exits if the run failed."""
    codes = self.wait()
    self.close()
    if set(codes) != {0}:
      sys.exit(f'{self.workdir} must end with 0: got {codes}; see its logs')
    return time.monotonic() - self.began


def _free_port() -> int:
  with socket.socket() as sock:
    sock.bind(('127.0.0.1', 0))
    return sock.getsockname()[1]


def emit(**values) -> None:
  """Prints a row."""
  print(json.dumps(values), flush=True)


def same(args, scratch: pathlib.Path) -> bool:
  """Compares runs of several processes with runs of one."""
  ok = True
  for name in args.recipes.split(','):
    recipe = recipes()[name]
    truth = scratch / f'{name}_1'
    seconds = Run(recipe, truth, 1, scratch / 'cache').finish()
    updates = max(row['step'] for row in _rows(truth, recipe.stage))
    emit(recipe=name, processes=1, seconds=round(seconds, 1), updates=updates)
    for count in map(int, args.counts.split(',')):
      runs = [scratch / f'{name}_{count}{letter}' for letter in 'ab']
      for workdir in runs:
        _copy_first_stage(truth, workdir, recipe.stage)
        seconds = Run(recipe, workdir, count, scratch / 'cache').finish()
      ok &= _compare(name, recipe, count, truth, *runs, seconds)
  return ok


def _copy_first_stage(truth, workdir, second: str) -> None:
  """Copies a run without its second stage."""
  shutil.copytree(
    truth,
    workdir,
    ignore=lambda folder, names: [
      x for x in names if x in (second, 'lock') or x.startswith(f'{second}_')
    ],
  )


def _compare(name, recipe, count, truth, run, again, seconds) -> bool:
  """Prints the differences between the runs; returns whether all is well."""
  twice = kill_resume.differences(
    kill_resume.outcome(run), kill_resume.outcome(again)
  )
  update = update_error(truth, run, recipe.stage)
  files = _names(truth) ^ _names(run)
  rows = [row['step'] for row in _rows(run, recipe.stage)]
  result = {
    'recipe': name,
    'processes': count,
    'seconds': round(seconds, 1),
    'first_update_error': float(f'{update:.2g}'),
    'differs_from_itself': twice,
    'files': sorted(files),
    'rows_once': rows == sorted(set(rows)),
  }
  ok = update < 1e-5 and not twice and not files and result['rows_once']
  if recipe.tokens:
    found = compare_tokens(truth, run, recipe.stage)
    result |= found
    ok &= found['same_prompts'] and found['first_rollout_differs'] == 0
    ok &= max(found['flip_margins'], default=0.0) < ROUNDING
  emit(**result, ok=ok)
  return ok


def _names(workdir: pathlib.Path) -> set[str]:
  """Returns the files that one process writes, without those of Orbax."""
  return {
    str(path.relative_to(workdir))
    for path in workdir.rglob('*')
    if path.is_file()
    and path.relative_to(workdir).parts[0] not in ('checkpoints', 'hosts')
  }


def _rows(workdir: pathlib.Path, stage: str) -> list[dict]:
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [row for row in map(json.loads, lines) if row['stage'] == stage]


def update_error(truth, run, stage: str) -> float:
  """Returns the largest error of the parameters after the first update.

  Relative to the largest parameter of each array.
  """
  import jax
  import orbax.checkpoint as ocp

  from posttrain import tree

  def params(workdir):
    folder = workdir / 'checkpoints' / stage / '1' / 'state'
    with ocp.PyTreeCheckpointer() as reader:
      saved = reader.metadata(folder).item_metadata.tree
      like = jax.tree.map(lambda _: ocp.RestoreArgs(np.ndarray), saved)
      state = reader.restore(folder, restore_args=like)
    return tree.flat(state['params'])

  expected, got = params(truth), params(run)
  return max(
    float(np.abs(got[path] - x).max() / np.abs(x).max())
    for path, x in expected.items()
  )


def compare_tokens(truth, run, stage: str) -> dict:
  """Compares the exported sequences of two runs, step by step.

  In the first step with differences, all must be within rounding of the draw:
  `flip_margins` has the distances, see `flips`.
  """
  differs, same_prompts, total, margins = {}, True, 0, []
  for path in sorted((truth / EXPORTS).glob(f'{stage}_*.jsonl')):
    rows, others = (flips.read(x / EXPORTS / path.name) for x in (truth, run))
    step = int(path.stem.rpartition('_')[2])
    prompts = [sorted(map(flips.prompt, x)) for x in (rows, others)]
    same_prompts &= prompts[0] == prompts[1]
    pairs = list(flips.pairs(rows, others))
    if pairs and not any(differs.values()) and step > 1:
      draws = flips.Draws(truth / 'checkpoints' / stage, step)
      margins = [draws.margin(*pair) for pair in pairs]
    differs[step] = len(pairs)
    total += len(rows)
  return {
    'sequences': total,
    'same_prompts': same_prompts,
    'first_rollout_differs': differs[min(differs)],
    'differ_by_step': {k: v for k, v in differs.items() if v},
    'flip_margins': [float(f'{x:.1e}') for x in margins],
  }


def lost(args, scratch: pathlib.Path) -> bool:
  """Loses one of several processes at random times; continues the runs."""
  recipe, cache = recipes()['arithmetic'], scratch / 'cache'
  short = {'sft.steps': 8, 'sft.optim.warmup_steps': 0}
  recipe = dataclasses.replace(recipe, overrides={**recipe.overrides, **short})
  rng, ok = random.Random(args.seed), True
  Run(recipe, scratch / 'first', args.count, cache).finish()  # compiles
  seconds = Run(recipe, scratch / 'truth', args.count, cache).finish()
  truth = kill_resume.outcome(scratch / 'truth')
  emit(processes=args.count, undisturbed_s=round(seconds, 1))
  for name, trial in itertools.product(
    args.signals.split(','), range(args.trials)
  ):
    workdir, ended = scratch / f'{name}_{trial}', None
    while ended is None:  # of a run that had not come to its end before
      shutil.rmtree(workdir, ignore_errors=True)
      run = Run(recipe, workdir, args.count, cache)
      # SIGSTOP for process 0, which has the coordinator, and for others.
      victim = rng.randrange(args.count) if name != 'SIGSTOP' else trial
      victim %= args.count
      ended = _lose(run, name, victim, rng.uniform(1, seconds))
      run.close()
    Run(recipe, workdir, args.count, cache).finish()
    wrong = kill_resume.differences(truth, kill_resume.outcome(workdir))
    fine = not wrong and ended.pop('fine')
    emit(signal=name, trial=trial, **ended, differs=wrong, ok=fine)
    ok &= fine
    shutil.rmtree(workdir)
  return ok


def _lose(run: Run, name: str, victim: int, delay: float) -> dict | None:
  """Sends a signal to a process; returns how the others ended.

  None: the run had come to its end before.
  """
  result = {'victim': victim, 'after_s': round(delay, 1)}
  if None not in run.wait(delay, run.processes[:1]):
    return None
  run.processes[victim].send_signal(getattr(signal, name))
  began = time.monotonic()
  others = [x for i, x in enumerate(run.processes) if i != victim]
  if name == 'SIGTERM':
    codes = run.wait(among=run.processes)
    fine = set(codes) <= {exits.PREEMPTED, 0} and len(set(codes)) == 1
  else:
    codes = run.wait(2 * LIMIT, others)
    # The run may just have come to its end.
    fine = set(codes) in ({exits.PEER_LOST}, {0})
  seconds = time.monotonic() - began
  if name == 'SIGSTOP':  # it goes on, and finds itself alone
    run.processes[victim].send_signal(signal.SIGCONT)
    codes += run.wait(LIMIT, [run.processes[victim]])
    fine &= codes[-1] == exits.PEER_LOST
  fine &= name == 'SIGTERM' or seconds <= LIMIT
  logs = [
    *sorted(run.workdir.parent.glob(f'{run.workdir.name}.*.log')),
    *sorted(run.workdir.glob('hosts/*.log')),
  ]
  lines = [
    line
    for log in logs
    for line in log.read_text().splitlines()
    if 'is lost' in line or 'has ended: ' in line or 'must join' in line
  ]
  named = bool(lines) or set(codes) == {0} or name == 'SIGTERM'
  return {
    **result,
    'codes': codes,
    'seconds': round(seconds, 1),
    'line': lines[0] if lines else None,
    'fine': fine and named,
  }


def elastic(args, scratch: pathlib.Path) -> bool:
  """Continues a run of four processes with one and with two."""
  del args
  recipe, cache = recipes()['arithmetic'], scratch / 'cache'
  half = dataclasses.replace(
    recipe, overrides={**recipe.overrides, 'grpo.steps': 4}
  )
  Run(half, scratch / 'four', 4, cache).finish()
  ok, tokens = True, []
  for count in (1, 2, 4):
    workdir = scratch / f'then_{count}'
    shutil.copytree(scratch / 'four', workdir)
    Run(recipe, workdir, count, cache).finish()
    rows = [row['step'] for row in _rows(workdir, recipe.stage)]
    path = workdir / EXPORTS / f'{recipe.stage}_000005.jsonl'
    # Of the first step that continues.
    tokens.append(sorted(row['ids'] for row in flips.read(path)))
    fine = rows == list(range(9)) and tokens[-1] == tokens[0]
    emit(
      saved_by=4,
      continued_by=count,
      steps=rows,
      same_tokens=tokens[-1] == tokens[0],
      ok=fine,
    )
    ok &= fine
  return ok


def main(argv=None) -> None:
  """Runs the command."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  commands = parser.add_subparsers(required=True)
  for trial in (same, lost, elastic):
    command = commands.add_parser(trial.__name__)
    command.set_defaults(run=trial)
    command.add_argument('--seed', type=int, default=0)
    command.add_argument('--scratch', help='keep the runs in this folder')
    if trial is same:
      command.add_argument('--counts', default='2,4')
      command.add_argument('--recipes', default=','.join(recipes()))
    if trial is lost:
      command.add_argument('--count', type=int, default=4)
      command.add_argument('--trials', type=int, default=10)
      command.add_argument('--signals', default='SIGKILL,SIGSTOP,SIGTERM')
  args = parser.parse_args(argv)
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(args.scratch or scratch)
    folder.mkdir(parents=True, exist_ok=True)
    if not args.run(args, folder):
      sys.exit('some trial is wrong')


if __name__ == '__main__':
  main()
