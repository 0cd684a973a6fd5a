"""Measured memory of training and loading, on the CPU, Linux only.

    python -m experiments.planner.memory lora --rank=8 --shape=L
    python -m experiments.planner.memory dpo --shape=L
    python -m experiments.planner.memory hf --gigabytes=3 --folder=/tmp

Every case runs in a process of its own. `peak` is the kernel's mark of the
highest resident memory (`VmHWM`), for `lora` and `dpo` less the resident memory
before any weight exists. Prints one JSON row per process, in units of 1e9
bytes, and one that compares them.

lora    three updates of SFT with all weights (`full`) and with a LoRA of frozen
        ones: XLA's plan of the update, the peak of building the stage and of
        its updates, the bytes of the state and of the frozen weights, and the
        checkpoint. In bfloat16 XLA's CPU backend converts all frozen matrices
        to float32 ahead of the loop, which `temp` shows.
dpo     the same of DPO with reference logprobs from a file (`cached`, as in
        `posttrain`), and with a second model that stays in memory (`held`).
hf      a random directory of the Qwen3 shape is loaded into float32 parameters
        and saved again (`like=`), tensor by tensor; the saved one must equal
        the first. `over_largest` is the peak beyond baseline and parameters, in
        units of the largest tensor.
"""

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import numpy as np

from experiments.benchmarks import timing

ROWS, TOKENS = 2, 256  # of a micro-batch
STEPS, EXAMPLES = 3, 24
CASES = {
  'lora': ('full', 'lora'),
  'dpo': ('cached', 'held'),
  'hf': ('start', 'load', 'save'),
}


def main() -> None:
  """Runs the command, or one of its processes."""
  parser = timing.parser(
    __doc__, rank=8, gigabytes=3.0, folder=tempfile.gettempdir()
  )
  add = parser.add_argument
  add('bench', choices=CASES)
  add('--shape', choices='SML', default='L', help='of lora and dpo')
  add('--dtype', choices=('float32', 'bfloat16'), default='float32')
  add('--child', help='runs this case alone')
  args = parser.parse_args()
  if args.child:
    row = hf(args) if args.bench == 'hf' else train(args)
    timing.emit(bench=f'{args.bench}_memory', impl=args.child, **row)
    return
  os.makedirs(args.folder, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=args.folder) as args.folder:
    model = make(args) if args.bench == 'hf' else None
    rows = {name: launch(name, args) for name in CASES[args.bench]}
    if model:
      held = rows['start']['peak'] + model['parameters']
      values = model | {
        f'{name}_over_largest': timing.rounded(
          (rows[name]['peak'] - held) / model['largest']
        )
        for name in ('load', 'save')
      }
      values['equal'] = equal(args.folder)
    else:
      first, second = rows.values()
      values = {
        f'{name}_ratio': timing.rounded(x / second[name])
        for name, x in first.items()
        if isinstance(x, float) and x and second[name]
      }
    timing.emit(bench=f'{args.bench}_memory', impl='compared', **values)


def launch(name: str, args) -> dict:
  """Measures a case in its own process; prints and returns its row."""
  options = {**vars(args), 'child': name}
  command = [sys.executable, '-m', 'experiments.planner.memory']
  command += [options.pop('bench'), *(f'--{k}={x}' for k, x in options.items())]
  done = subprocess.run(
    command,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    stdout=subprocess.PIPE,
    text=True,
  )
  if done.returncode:
    sys.exit(f'{name} failed')
  print(done.stdout.splitlines()[-1], flush=True)
  return json.loads(done.stdout.splitlines()[-1])


def recipe(args):
  """Returns a run of one stage on random letters, from random weights."""
  from experiments.benchmarks import learning, sizes, works
  from posttrain import schema

  rng = np.random.default_rng(0)

  def text(length):
    return ''.join(map(chr, rng.integers(97, 123, length)))

  path = pathlib.Path(args.folder) / f'{args.child}.jsonl'
  lengths = {
    'dpo': {'prompt': 40, 'chosen': 60, 'rejected': 60},
    'lora': {'prompt': 40, 'completion': 180},
  }[args.bench]
  rows = [{k: text(n) for k, n in lengths.items()} for _ in range(EXAMPLES)]
  learning.write_rows(path, rows)
  if args.bench == 'dpo':
    pairs = schema.PairFile(path=str(path), eval_fraction=0.0)
    data = {'kind': 'preference', 'pairs': pairs}
  else:
    env = schema.Rows(path=str(path), eval_fraction=0.25)
    entry = schema.EnvEntry(
      env=env, algorithm=schema.Sft(), sampler=schema.Dataset()
    )
    data = {'envs': {'rows': entry}}
  stage = schema.Stage(
    init='random',
    steps=STEPS,
    batch=schema.Batch(
      prompts_per_step=2 * ROWS,
      row_tokens=TOKENS,
      micro_batch_tokens=ROWS * TOKENS,
    ),
    optim=schema.Optim(lr=1e-5, schedule='constant'),
    lora=schema.Lora(rank=args.rank if args.child == 'lora' else 0),
    **data,
  )
  return schema.Run(
    model=works.model(
      sizes.SHAPES[args.shape], dtype=args.dtype, remat='block'
    ),
    stages={'main': stage},
    compilation_cache=None,
    metrics=schema.Metrics(progress=False),
  )


def train(args) -> dict:
  """Returns the row of `args.child`, of `lora` or `dpo`."""
  import jax
  import jax.numpy as jnp

  from posttrain import schema
  from posttrain.checkpoints import store
  from posttrain.stage import build, preflight
  from posttrain.util import memory, preemption

  memory.keep_freed_memory()
  run, workdir = recipe(args), os.path.join(args.folder, args.child)
  start, meter = resident(), Meter()
  job = build.make(
    preflight.make(preflight.resolve(run), 'main'),
    workdir,
    0,
    preemption.Signal(),
  )
  learner, state = job.learner, job.learner.state
  row = {'building': meter.read()['peak'] - start}
  held = jax.tree.map(jnp.copy, state.params) if args.child == 'held' else ()
  row |= {'reference': size(held), 'state': size(state)}
  row['base'] = size(learner.base)
  resident()  # frees the memory that only building needed
  meter = Meter()
  for _ in range(STEPS):
    batch = next(job.sampling.pipeline).batch
    state, metrics = jax.block_until_ready(learner.update(state, batch))
  row['peak'] = meter.read()['peak'] - start
  place, numbers = learner.update.place, learner.update._numbers
  analysis = (
    learner.update._update.lower(state, place(batch), learner.base, numbers)
    .compile()
    .memory_analysis()
  )
  for name in ('argument', 'output', 'alias', 'temp'):
    row[name] = getattr(analysis, f'{name}_size_in_bytes') / 1e9
  saved = pathlib.Path(args.folder) / 'checkpoint'
  with contextlib.closing(
    store.Checkpointer(str(saved), schema.Checkpoint())
  ) as checkpointer:
    checkpointer.save(1, state, {})
  files = [x for x in saved.rglob('*') if x.is_file()]
  row['checkpoint'] = sum(x.stat().st_size for x in files) / 1e9
  return {
    'shape': args.shape,
    'dtype': args.dtype,
    'trained': sum(x.size for x in jax.tree.leaves(state.params)),
    'loss': float(metrics['loss/total']),
    **{name: timing.rounded(x) for name, x in row.items()},
  }


def resident() -> float:
  """Returns resident memory in 1e9 bytes, after freeing unused memory."""
  gc.collect()
  ctypes.CDLL(None).malloc_trim(0)
  return status('VmRSS')


def status(name: str) -> float:
  """Returns a size that the kernel tells of this process, in 1e9 bytes."""
  text = pathlib.Path('/proc/self/status').read_text()
  return int(re.search(rf'{name}:\s+(\d+) kB', text)[1]) * 1024 / 1e9


def size(tree) -> float:
  """Returns the size of all arrays in 1e9 bytes."""
  import jax

  return sum(x.nbytes for x in jax.tree.leaves(tree)) / 1e9


def make(args) -> dict:
  """Writes a random model of about this size; returns its sizes."""
  import jax

  from posttrain import schema
  from posttrain.models import hf, transformer

  # A layer has 0.1 GB, and the embedding 0.6.
  layers = max(round((args.gigabytes - 0.62) / 0.1), 1)
  cfg = dataclasses.replace(schema.PRESETS['qwen3_1p7b'], layers=layers)
  folder = pathlib.Path(args.folder) / 'model'
  hf.save(transformer.init(jax.random.key(0), cfg), cfg, folder)
  files = list(folder.glob('*.safetensors'))
  return {
    'files': len(files),
    'directory': sum(path.stat().st_size for path in files) / 1e9,
    'largest': 2 * max(map(np.prod, hf.shapes(cfg).values())) / 1e9,
    'parameters': 4 * transformer.num_params(cfg) / 1e9,
  }


def equal(folder: str) -> bool:
  """Returns whether two directories hold the same tensors, bit by bit.

  The files are read by the library `safetensors`, not by ours.
  """
  import safetensors

  def files(name):
    return {
      name: path
      for path in sorted(pathlib.Path(folder, name).glob('*.safetensors'))
      for name in safetensors.safe_open(path, 'numpy').keys()
    }

  def bits(path, name):
    with safetensors.safe_open(path, 'numpy') as file:
      array = file.get_tensor(name)
    return array.dtype, array.shape, array.tobytes()

  first, second = files('model'), files('saved')
  return first.keys() == second.keys() and all(
    bits(first[name], name) == bits(second[name], name) for name in first
  )


def hf(args) -> dict:
  """Measures imports and the start of jax, then loading, or saving alone."""
  meter = Meter()
  import jax
  import jax.numpy as jnp

  from posttrain.models import hf, hf_config

  jax.block_until_ready(jnp.zeros(1) + 1)
  if args.child != 'start':
    folder = pathlib.Path(args.folder) / 'model'
    cfg = hf_config.read(folder)
    params = hf.load(folder, cfg)
  if args.child == 'save':
    meter = Meter()  # resets the peak, which includes loading
    hf.save(params, cfg, folder.parent / 'saved', like=folder)
  return {name: timing.rounded(x) for name, x in meter.read().items()}


class Meter:
  """The highest resident memory of this process since construction.

  It is the kernel's own mark, which `clear_refs` resets.
  """

  def __init__(self):
    pathlib.Path('/proc/self/clear_refs').write_text('5')
    self._start = time.perf_counter()

  def read(self) -> dict:
    """Returns the peak in 1e9 bytes, and the seconds so far."""
    seconds = time.perf_counter() - self._start
    return {'peak': status('VmHWM'), 'seconds': seconds}


if __name__ == '__main__':
  main()
