"""Where the seconds of a first run go, cold and from the compilation cache.

    python -m experiments.benchmarks.start --workdir=DIR [--task=sft] [--top=12]

Runs the command of each task in a process of its own, twice with one cache of
compiled programs, which is empty before the first. Without hooks: jax logs what
it traces, lowers and compiles, and the rows of metrics.jsonl have the seconds.
A third, with `-X importtime`, shows what is imported. One JSON line per run:

    line_s       wall seconds until the first line
    start_s      until the initial weights are evaluated, where they are
    first_s      until the end of the first step
    wall_s       until the end
    *_cpu_s      CPU seconds until then
    programs     compiled, or loaded from the cache
    trace_s, lower_s, compile_s    of all of them; with a cache compile_s loads
    top          the dearest: name -> their number, and these three

Tasks: `tiny`, that of configs/arithmetic.py; `sft`, `grpo` and `dpo` on own
data, a model of the preset `--model` and 40 rows of `laptop`, with ten steps.
"""

import collections
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time

from experiments.benchmarks import laptop, timing
from posttrain.metrics import writers

TASKS = 'tiny', 'sft', 'grpo', 'dpo'
_SECONDS = re.compile(
  r'Finished (tracing|jaxpr to MLIR module conversion|XLA compilation of) '
  r'(?:jit[(_])?(.+?)\)?(?: for jit)? in ([\d.e-]+) sec'
)
_KINDS = {'tracing': 0, 'jaxpr to MLIR module conversion': 1}
_IMPORT = re.compile(r'import time:\s+(\d+) \|\s+(\d+) \|( +)(\S+)')


def main() -> None:
  """Runs the command."""
  parser = timing.parser(__doc__, task='', model='small', top=12, words='')
  parser.add_argument('--workdir', required=True)
  args = parser.parse_args()
  folder = os.path.join(args.workdir, 'model')
  if not os.path.exists(folder):
    laptop.write_model(args.model, folder)
  for task in [args.task] if args.task else TASKS:
    cache = os.path.join(args.workdir, f'cache_{task}')
    shutil.rmtree(cache, ignore_errors=True)
    options = [*command(task, args.workdir, args.words)]
    options.append(f'--config.compilation_cache={cache}')
    for name in ('cold', 'warm'):
      work = os.path.join(args.workdir, f'{task}_{name}')
      shutil.rmtree(work, ignore_errors=True)
      timing.emit(
        bench=f'start_{task}', cache=name, **measure(options, work, args.top)
      )
    timing.emit(bench=f'imports_{task}', **imports(options, work, args.top))


def command(task: str, workdir: str, words: str) -> list[str]:
  """Returns the options of a task; writes its data.

  Args:
    task: one of `TASKS`.
    workdir: has the folder `model`.
    words: more of the recipe's argument, as `,lora`.
  """
  if task == 'tiny':
    return ['--config=configs/arithmetic.py:tiny']
  rows = os.path.join(workdir, f'{task}.jsonl')
  with open(rows, 'w') as file:
    for index in range(40):
      row = {k: f'{index} {text}' for k, text in laptop.ROWS[task].items()}
      file.write(json.dumps(row) + '\n')
  reward = ',configs.grpo:short' if task == 'grpo' else ''
  few = laptop.FEW if task == 'grpo' else {}
  own = {'steps': 10, 'batch.prompts_per_step': laptop.BATCH[task], **few}
  own |= {'optim.warmup_steps': 0, 'eval.every': None}
  return [
    f'--config=configs/{task}.py:{workdir}/model,{rows}{reward}{words}',
    *(f'--config.{task}.{key}={value}' for key, value in own.items()),
  ]


def measure(options: list[str], workdir: str, top: int) -> dict:
  """Runs the program; returns its seconds."""
  programs = collections.defaultdict(lambda: [0, 0.0, 0.0, 0.0])
  environment = {**os.environ, 'JAX_LOG_COMPILES': '1'}
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  start, first = time.monotonic(), None
  with start_process(options, workdir, env=environment) as process:
    for line in process.stderr:
      if found := _SECONDS.search(line):
        kind, name, seconds = found.groups()
        kind = _KINDS.get(kind, 2)
        programs[name][0] += kind == 2
        programs[name][1 + kind] += float(seconds)
      elif first is None and not line.startswith('WARNING'):
        first = time.monotonic() - start
  wall = time.monotonic() - start
  assert not process.returncode, process.returncode
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  rows = writers.read(os.path.join(workdir, 'metrics.jsonl'))
  begun, stepped = rows[0], next(row for row in rows if row['step'] == 1)
  numbers = [sum(x) for x in zip(*programs.values(), strict=True)]
  dearest = sorted(programs.items(), key=lambda x: -sum(x[1][1:]))[:top]
  seconds = {
    'line_s': first,
    'start_s': begun['time/elapsed'],
    'first_s': stepped['time/elapsed'],
    'wall_s': wall,
    'start_cpu_s': begun['time/cpu'],
    'first_cpu_s': stepped['time/cpu'],
    'cpu_s': sum(after[:2]) - sum(before[:2]),
    'programs': numbers[0],
    **dict(zip(('trace_s', 'lower_s', 'compile_s'), numbers[1:], strict=True)),
  }
  return {
    **{k: timing.rounded(x) for k, x in seconds.items()},
    'top': {k: [timing.rounded(n) for n in x] for k, x in dearest},
  }


def start_process(options, workdir: str, *words: str, env=None):
  """Starts the program, with words for Python before its module."""
  return subprocess.Popen(
    [
      sys.executable,
      *words,
      '-m',
      'posttrain.main',
      f'--workdir={workdir}',
      *options,
    ],
    stderr=subprocess.PIPE,
    stdout=subprocess.DEVNULL,
    text=True,
    env=env,
  )


def imports(options: list[str], workdir: str, top: int) -> dict:
  """Returns the seconds of imports, and of the dearest packages.

  Those of a package are its own and those of what it alone was first to import.
  """
  shutil.rmtree(workdir)
  total, packages = 0.0, collections.Counter()
  with start_process(options, workdir, '-X', 'importtime') as process:
    for line in process.stderr:
      if found := _IMPORT.match(line):
        seconds = int(found[1]) / 1e6
        total += seconds
        packages[found[4].partition('.')[0]] += seconds
  dearest = packages.most_common(top)
  return {
    'seconds': timing.rounded(total),
    'own': {k: timing.rounded(x) for k, x in dearest},
  }


if __name__ == '__main__':
  main()
