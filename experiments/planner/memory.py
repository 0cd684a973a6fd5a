"""Measured memory of training and loading, on the CPU, Linux only.

    python -m experiments.planner.memory lora --rank=8 --shape=L
    python -m experiments.planner.memory dpo --shape=L
    python -m experiments.planner.memory hf --gigabytes=3 --folder=/tmp

Every case runs in a process of its own. `peak` is the kernel's mark of the
highest resident memory (`VmHWM`), for `lora` and `dpo` less the resident memory
before any weight exists. Prints one JSON row per process, in units of 1e9
bytes, and one that compares them.

lora    two updates with all weights (`full`) and with a LoRA of frozen ones:
        XLA's plan of the update (`argument`, `output`, `alias`, `temp`), the
        peak, the bytes `held` between updates, the checkpoint, and the same
        with the reference of a KL leash. In bfloat16 XLA's CPU backend converts
        all frozen matrices to float32 ahead of the loop, which `temp` shows.
dpo     three steps with reference logprobs from a file (`cached`, as in
        `posttrain`), and with a second model that stays in memory (`held`).
        Both must train to the same loss.
hf      a random directory of the Qwen3 shape is loaded into float32 parameters
        and saved again (`like=`), tensor by tensor; the saved one must equal
        the first. `over_largest` is the peak beyond baseline and parameters, in
        units of the largest tensor.
"""

import argparse
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
import threading
import time

import numpy as np

from experiments.benchmarks import timing

ROWS, TOKENS = 2, 256  # of a micro-batch
STEPS, PAIRS = 3, 24
KL_BETA = 0.1
SHARD_BYTES = 2**30
PERIOD = 0.01  # seconds between two readings of the resident memory
SIZES = ('layers', 'embed_dim', 'head_dim', 'mlp_dim', 'vocab_size')
# S and M as in `plain_jax`; eight heads, four for keys and values.
SHAPES = {
  'S': (4, 256, 32, 768, 512),
  'M': (8, 512, 64, 1536, 8192),
  'L': (12, 1024, 128, 3072, 32768),
}
CASES = {
  'lora': ('full', 'lora'),
  'dpo': ('cached', 'held'),
  'hf': ('start', 'load', 'save'),
}


def main(argv=None) -> None:
  """Runs the command, or one of its processes."""
  parser = argparse.ArgumentParser(prog='python -m experiments.planner.memory')
  add = parser.add_argument
  add('bench', choices=CASES)
  add('--rank', type=int, default=8, help='of a LoRA')
  add('--shape', choices=SHAPES, default='L', help='of lora and dpo')
  add('--dtype', choices=('float32', 'bfloat16'), default='float32')
  add('--gigabytes', type=float, default=3.0, help='of hf')
  add(
    '--folder', default=tempfile.gettempdir(), help='for files, deleted again'
  )
  add('--child', help=argparse.SUPPRESS)
  args = parser.parse_args(argv)
  if args.child:
    measure = {'lora': lora, 'dpo': dpo, 'hf': hf}[args.bench]
    row = measure(args)
    timing.emit(bench=f'{args.bench}_memory', impl=args.child, **row)
    return
  os.makedirs(args.folder, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=args.folder) as args.folder:
    model = make(args) if args.bench == 'hf' else None
    rows = {name: launch(name, args) for name in CASES[args.bench]}
    if args.bench == 'lora':
      full, small = rows['full'], rows['lora']
      values = {
        name: timing.rounded(full[name] / small[name])
        for name in full
        if isinstance(full[name], float) and full[name] and small[name]
      }
    elif args.bench == 'dpo':
      values = compare(rows['cached'], rows['held'])
    else:
      held = rows['start']['peak'] + model['parameters']
      values = model | {
        f'{name}_over_largest': timing.rounded(
          (rows[name]['peak'] - held) / model['largest']
        )
        for name in ('load', 'save')
      }
      values['equal'] = equal(args.folder)
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


def model_of(args):
  """Returns the model of `lora` and `dpo`."""
  from posttrain import schema

  sizes = dict(zip(SIZES, SHAPES[args.shape], strict=True))
  return schema.Model(
    **sizes, heads=8, kv_heads=4, dtype=args.dtype, remat='block'
  )


def lora(args) -> dict:
  """Returns the row of `args.child`."""
  import jax

  child = Child(args)
  update = child.compile()
  row, start = planned(update), resident()
  base, state = child.make()
  row |= {'state': size(state), 'base': size(base)}
  counts = {'parameters': count(child.whole), 'trained': count(state.params)}

  def peak_of(batch, steps):
    nonlocal state
    resident()  # frees the memory that only building needed
    meter = Meter()
    for _ in range(steps):
      state, metrics = jax.block_until_ready(
        update(state, batch, base, child.optimizer.numbers)
      )
    assert state.skipped == 0
    return meter.read()['peak'] - start, metrics

  row['peak'], _ = peak_of(child.batch, 2)
  row['checkpoint'] = saved(state, args.folder)
  batch, reference = child.score(base)
  row['peak_with_reference'], metrics = peak_of(batch, 1)
  assert metrics['ref_kl/kl'] != 0, 'the leash was not read'
  shared = {id(x) for x in jax.tree.leaves(base)}
  row['reference'] = size(
    [x for x in jax.tree.leaves(reference) if id(x) not in shared]
  )
  row['held'] = row['state'] + row['base']
  row['held_with_reference'] = row['held'] + row['reference']
  return {
    'shape': args.shape,
    'rank': child.stage.lora.rank,
    'dtype': args.dtype,
    'micro_tokens': ROWS * TOKENS,
    **counts,
    **{name: timing.rounded(x) for name, x in row.items()},
  }


@dataclasses.dataclass(frozen=True)
class Row:
  """The fields of a sample that the scorer reads."""

  ids: np.ndarray
  temperatures: np.ndarray

  def __len__(self) -> int:
    return len(self.ids)


class Child:
  """A stage with its shapes, shardings and batch, without weights."""

  def __init__(self, args):
    from experiments.benchmarks import works
    from posttrain import schema, sharding
    from posttrain.training import optim
    from posttrain.training import state as train_state

    self.model = model_of(args)
    rank = args.rank if args.child == 'lora' else 0
    self.stage = schema.Stage(
      lora=schema.Lora(rank=rank), envs={'bench': schema.EnvEntry()}
    )
    self.optimizer = optim.make(self.stage.optim, 1000)
    self.mesh = sharding.make_mesh(schema.Mesh())
    self.like, self.whole = train_state.shapes(
      self.stage, self.model, self.optimizer, self.mesh
    )
    ids = np.random.default_rng(0).integers(
      self.model.vocab_size, size=(2 * ROWS, TOKENS), dtype=np.int32
    )
    self.batch = works.make_batch(ids, ROWS)

  def compile(self):
    """Returns the compiled `TrainStep`; also places the batch on the mesh."""
    from posttrain.models import lora, transformer
    from posttrain.training import objectives
    from posttrain.training import step as train_step

    cfg = self.stage.lora
    base = lora.Base(self.whole, lora.scale(cfg)) if cfg.rank else None
    self.step = train_step.make_train_step(
      objectives.TokenComponents(self.model, ('bench',)),
      self.optimizer,
      mesh=self.mesh,
      rules=transformer.SHARDING_RULES,
      base=base,
    )
    self.batch = self.step.place(self.batch)
    numbers = self.optimizer.numbers
    return self.step._update.lower(
      self.like, self.batch, base, numbers
    ).compile()

  def make(self):
    """Returns the frozen base, or None, and the state before the first step."""
    import jax

    from posttrain.models import lora
    from posttrain.training import state as train_state

    cfg, base = self.stage.lora, None
    if cfg.rank:
      base = lora.Base(self.load(), lora.scale(cfg))
    state = train_state.fresh(
      self.stage, self.optimizer, self.like, base, self.load, jax.random.key(0)
    )
    return base, state

  def load(self, name: str = 'init'):
    """Returns the same random weights in every call, as from a checkpoint."""
    import jax

    from posttrain.models import transformer

    assert name == 'init'

    @jax.jit
    def make():
      params = transformer.init(jax.random.key(0), self.model)
      return jax.tree.map(lambda x, y: x.astype(y.dtype), params, self.whole)

    return make()

  def score(self, base):
    """Returns the batch with a KL leash to 'init', and that model's weights."""
    from posttrain import scoring
    from posttrain.rollout import frozen_models

    scorer = frozen_models.References(
      self.model,
      None,
      lambda model, width: scoring.Scorer(model, ROWS, width, self.mesh),
      capacity=TOKENS,
      load=lambda name: frozen_models.Model(self.load(name), self.model),
      # With LoRA, as in `stage.models`.
      held=None if base is None else {'init': base.params},
    )
    batch = self.batch
    ids, temperatures = (
      np.asarray(x).reshape(-1, TOKENS) for x in (batch.ids, batch.temperatures)
    )
    logprobs = scorer(
      'init', [Row(*pair) for pair in zip(ids, temperatures, strict=True)]
    )
    batch = dataclasses.replace(
      batch,
      ref_logprobs=np.reshape(logprobs, batch.ids.shape),
      ref_kl_weights=KL_BETA * np.asarray(batch.ce_weights),
      sampler_logprobs=np.reshape(logprobs, batch.ids.shape),
      ref_kl_count=batch.ce_count,
    )
    return self.step.place(batch), scorer.model('init').params


def planned(update) -> dict:
  """Returns XLA's figures of a compiled program; `planned` is their sum."""
  analysis = update.memory_analysis()
  row = {
    name: getattr(analysis, f'{name}_size_in_bytes') / 1e9
    for name in ('argument', 'output', 'alias', 'temp')
  }
  total = row['argument'] + row['output'] - row['alias'] + row['temp']
  return {**row, 'planned': total}


def resident() -> float:
  """Returns resident memory in 1e9 bytes, after freeing unused memory."""
  gc.collect()
  ctypes.CDLL(None).malloc_trim(0)
  status = pathlib.Path('/proc/self/status').read_text()
  return int(re.search(r'VmRSS:\s+(\d+) kB', status)[1]) * 1024 / 1e9


def saved(state, folder: str) -> float:
  """Saves a checkpoint; returns its size in 1e9 bytes."""
  from posttrain import schema
  from posttrain.checkpoints import store

  with tempfile.TemporaryDirectory(dir=folder) as root:
    checkpointer = store.Checkpointer(root, schema.Checkpoint())
    checkpointer.save(1, state, {})
    checkpointer.close()
    files = pathlib.Path(root).rglob('*')
    return sum(x.stat().st_size for x in files if x.is_file()) / 1e9


def count(tree) -> int:
  """Returns the number of array elements."""
  import jax

  return sum(x.size for x in jax.tree.leaves(tree))


def size(tree) -> float:
  """Returns the size of all arrays in 1e9 bytes."""
  import jax

  return sum(x.nbytes for x in jax.tree.leaves(tree)) / 1e9


def recipe(args):
  """Returns a run of one DPO stage on random letters, from random weights."""
  from posttrain import schema

  rng = np.random.default_rng(0)

  def text(length):
    return ''.join(map(chr, rng.integers(97, 123, length)))

  path = pathlib.Path(args.folder) / f'{args.child}.jsonl'
  path.write_text(
    ''.join(
      json.dumps({'prompt': text(40), 'chosen': text(60), 'rejected': text(60)})
      + '\n'
      for _ in range(PAIRS)
    )
  )
  stage = schema.Stage(
    kind='preference',
    steps=STEPS,
    pairs=schema.PairFile(path=str(path), eval_fraction=0.0),
    batch=schema.Batch(
      prompts_per_step=2 * ROWS,
      row_tokens=TOKENS,
      micro_batch_tokens=ROWS * TOKENS,
    ),
    optim=schema.Optim(lr=1e-5, schedule='constant'),
  )
  return schema.Run(
    model=model_of(args),
    stages={'dpo': stage},
    compilation_cache=None,
    metrics=schema.Metrics(progress=False),
  )


def dpo(args) -> dict:
  """Returns the row of `args.child`."""
  import jax

  from posttrain.stage import build, preflight
  from posttrain.util import memory, preemption

  memory.keep_freed_memory()
  run = recipe(args)
  start, meter = resident(), Meter()
  stage = preflight.make(run, 'dpo')
  job = build.make(
    stage, os.path.join(args.folder, args.child), 0, preemption.Signal()
  )
  row = {'scoring': meter.read()['peak'] - start}
  score, reference = lambda batch: batch, None
  if args.child == 'held':
    score, reference = scorer(job.learner)
  resident()  # frees the memory that only building needed
  meter, state = Meter(), job.learner.state
  for _ in range(STEPS):
    batch = score(next(job.sampling.pipeline).batch)
    state, metrics = jax.block_until_ready(job.learner.update(state, batch))
  row['peak'] = meter.read()['peak'] - start
  row['reference'] = 0.0 if reference is None else size(reference)
  return {
    'shape': args.shape,
    'parameters': count(state.params),
    'loss': float(metrics['loss/total']),
    **{name: timing.rounded(x) for name, x in row.items()},
  }


def scorer(learner):
  """Returns a function that scores a batch, and the reference's weights."""
  import jax
  import jax.numpy as jnp

  from posttrain import schema
  from posttrain.training import pair_objectives

  objective = pair_objectives.Preference(
    learner.objective._model, (), schema.Loss(preference=schema.SimPo())
  )  # reads the policy's logprobs alone
  reference = jax.tree.map(jnp.copy, learner.state.params)

  @jax.jit
  def micro_batch_logps(params, micro):
    return objective._score(params, micro)[0]

  def score(batch):
    logps = np.zeros_like(batch.ref_logprobs)
    for i in range(int(batch.num_micro_batches)):
      micro = jax.tree.map(lambda x, i=i: x[i] if x.ndim else x, batch)
      logps[i] = np.where(
        micro.present, micro_batch_logps(reference, micro), 0.0
      )
    return dataclasses.replace(batch, ref_logprobs=logps)

  return score, reference


def compare(cached: dict, held: dict) -> dict:
  """Returns figures of a second model in memory, which must be in the peak."""
  np.testing.assert_allclose(held['loss'], cached['loss'], rtol=1e-4)
  more = held['peak'] - cached['peak']
  assert more >= 0.8 * held['reference'], (more, held['reference'])
  return {
    'peak': timing.rounded(held['peak'] / cached['peak']),
    'peak_more': timing.rounded(more),
    'reference': held['reference'],
  }


def make(args) -> dict:
  """Writes a random model of about this size; returns its sizes."""
  import jax.numpy as jnp

  from posttrain import schema
  from posttrain.models import hf, hf_config, transformer

  def size(layers):
    cfg = dataclasses.replace(schema.PRESETS['qwen3_1p7b'], layers=layers)
    return cfg, transformer.num_params(cfg)

  (_, one), (_, two) = size(1), size(2)
  more = (args.gigabytes * 1e9 / 2 - one) / (two - one)
  cfg, count = size(1 + max(round(more), 0))
  shapes = hf.shapes(cfg)
  dtypes = dict.fromkeys(shapes, jnp.dtype('bfloat16'))
  rng = np.random.default_rng(0)

  def draw(name):
    bits = np.frombuffer(rng.bytes(2 * np.prod(shapes[name])), np.uint16)
    # Any sign and mantissa; exponents of 2**-31 to 1, no zero, inf or nan.
    bits = (bits & 0x8FFF) | 0x3000
    return bits.view(dtypes[name]).reshape(shapes[name])

  folder = pathlib.Path(args.folder) / 'model'
  folder.mkdir()
  hf.write_shards(folder, shapes, dtypes, draw, SHARD_BYTES)
  text = json.dumps(hf_config.write(cfg))
  (folder / 'config.json').write_text(text)
  files = list(folder.glob('*.safetensors'))
  return {
    'files': len(files),
    'directory': sum(path.stat().st_size for path in files) / 1e9,
    'largest': 2 * max(np.prod(shape) for shape in shapes.values()) / 1e9,
    'parameters': 4 * count / 1e9,
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

  The kernel's own mark is exact; it is reset by `clear_refs`. The kernel keeps
  no mark for the share of mapped files, which is sampled.
  """

  def __init__(self):
    pathlib.Path('/proc/self/clear_refs').write_text('5')
    self._file, self._start = 0.0, time.perf_counter()
    threading.Thread(target=self._watch, daemon=True).start()

  def read(self) -> dict:
    """Returns peak and file share in 1e9 bytes, and the seconds so far."""
    seconds = time.perf_counter() - self._start
    return {'peak': self._sample(), 'file': self._file, 'seconds': seconds}

  def _sample(self) -> float:
    status = pathlib.Path('/proc/self/status').read_text()
    sizes = {
      name: int(kib) * 1024 / 1e9
      for name, kib in re.findall(r'(VmHWM|RssFile):\s+(\d+) kB', status)
    }
    self._file = max(self._file, sizes['RssFile'])
    return sizes['VmHWM']

  def _watch(self):
    while True:
      self._sample()
      time.sleep(PERIOD)


if __name__ == '__main__':
  main()
