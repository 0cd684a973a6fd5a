"""Memory of training: all weights, or a LoRA of frozen ones.

    python -m experiments.lora_memory --rank=8 --shape=L --dtype=float32

Two processes, on the CPU, do the same, `full` with all weights and `lora`:

1. Compile the update (two micro-batches, remat 'block', AdamW), and read XLA's
   plan: bytes of arguments (`argument`), results (`output`), results in the
   place of arguments (`alias`), and temporaries (`temp`).
2. Make the weights (`state` trains, `base` is frozen) and run two updates.
   `peak` is the kernel's mark of the highest resident memory (`VmHWM`) while
   they run, less the resident memory before any weight exists. `held` is the
   memory between updates: state and base.
3. Save a checkpoint: `checkpoint` is its size on disk.
4. Score the batch under the reference 'init', as a KL leash does, and update
   once more, with that reference held: `reference` is the size it adds, and
   `peak_with_reference` the peak of this update. With LoRA the reference is
   the base itself, else a copy of the initial weights.

Prints a JSON row for each, in units of 1e9 bytes, and one of full over LoRA.
Linux only. In bfloat16, XLA's CPU backend multiplies in float32, and converts
all frozen matrices at once, ahead of the loop: `temp` then has a float32 copy
of them that is not in our program.
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

import numpy as np

from experiments import hf_memory
from experiments.benchmarks import timing

ROWS, TOKENS = 2, 256  # of a micro-batch
STEPS = 2
KL_BETA = 0.1
SIZES = ('layers', 'embed_dim', 'head_dim', 'mlp_dim', 'vocab_size')
# S and M as in `plain_jax`; eight heads, four for keys and values.
SHAPES = {
  'S': (4, 256, 32, 768, 512),
  'M': (8, 512, 64, 1536, 8192),
  'L': (12, 1024, 128, 3072, 32768),
}


def main(argv=None) -> None:
  """Runs the command, or one of its processes."""
  args = parse(argv)
  if args.child:
    timing.emit(**measure(args))
    return
  full, lora = (launch(name, args) for name in ('full', 'lora'))
  ratios = {
    name: timing.rounded(full[name] / lora[name])
    for name in full
    if isinstance(full[name], float) and full[name] and lora[name]
  }
  timing.emit(bench='lora_memory', impl='full over lora', **ratios)


def parse(argv):
  """Reads the command line."""
  parser = argparse.ArgumentParser(prog='python -m experiments.lora_memory')
  parser.add_argument('--rank', type=int, default=8)
  parser.add_argument('--shape', choices=SHAPES, default='L')
  parser.add_argument(
    '--dtype', choices=('float32', 'bfloat16'), default='float32'
  )
  parser.add_argument(
    '--folder',
    default=tempfile.gettempdir(),
    help='folder for the checkpoint, which is deleted again',
  )
  parser.add_argument(
    '--child', choices=('full', 'lora'), help=argparse.SUPPRESS
  )
  args = parser.parse_args(argv)
  if args.rank < 1:
    parser.error(f'--rank must be >= 1: got {args.rank}')
  return args


def launch(name: str, args) -> dict:
  """Measures `full` or `lora` in its own process; prints the row."""
  command = [sys.executable, '-m', 'experiments.lora_memory', f'--child={name}']
  command += [
    f'--{key}={value}' for key, value in vars(args).items() if key != 'child'
  ]
  done = subprocess.run(
    command,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    stdout=subprocess.PIPE,
    text=True,
  )
  if done.returncode:
    sys.exit(f'{name} failed')
  row = json.loads(done.stdout)
  timing.emit(**row)
  return row


def measure(args) -> dict:
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
    meter = hf_memory.Meter()
    for _ in range(steps):
      state, metrics = jax.block_until_ready(update(state, batch, base))
    assert state.skipped == 0
    return meter.read()['peak'] - start, metrics

  row['peak'], _ = peak_of(child.batch, STEPS)
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
    'bench': 'lora_memory',
    'impl': args.child,
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
    from experiments.benchmarks import train_step
    from posttrain import schema, sharding
    from posttrain.training import optim
    from posttrain.training import state as train_state

    self.model = schema.Model(
      **dict(zip(SIZES, SHAPES[args.shape], strict=True)),
      heads=8,
      kv_heads=4,
      dtype=args.dtype,
      remat='block',
    )
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
    self.batch = train_step.make_batch(ids, ROWS)

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
    from posttrain.rollout import references

    scorer = references.References(
      self.model,
      None,
      lambda model, width: scoring.Scorer(model, ROWS, width, self.mesh),
      capacity=TOKENS,
      load=lambda name: references.Model(self.load(name), self.model),
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
    checkpointer.save(STEPS, state, {})
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


if __name__ == '__main__':
  main()
