"""Memory of DPO: reference logprobs from a file, or from a second model.

    python -m experiments.dpo_memory --shape=L

Two processes, on the CPU, build a DPO stage on the same pairs, from the same
checkpoint, and train three steps:

  cached   as in `posttrain`: the reference scores all answers before the first
           step, into a file, and is freed
  held     as `cached`, but the reference stays in memory and scores the answers
           of each step's batch again

`peak` is the kernel's mark of the highest resident memory (`VmHWM`) of the
three steps, less the resident memory before any weight exists; `scoring` is the
same of the time before the steps. Both must train to the same loss. Prints a
JSON row for each, in units of 1e9 bytes, and one of held over cached. Linux
only.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from experiments import hf_memory, lora_memory
from experiments.benchmarks import timing

STEPS, PAIRS, ROWS, TOKENS = 3, 24, 2, 256


def main(argv=None) -> None:
  """Runs the command, or one of its processes."""
  parser = argparse.ArgumentParser(prog='python -m experiments.dpo_memory')
  parser.add_argument('--shape', choices=lora_memory.SHAPES, default='L')
  parser.add_argument('--child', choices=('cached', 'held'))
  parser.add_argument('--workdir', help=argparse.SUPPRESS)
  args = parser.parse_args(argv)
  if args.child:
    timing.emit(**measure(args))
    return
  rows = {}
  for name in ('cached', 'held'):
    with tempfile.TemporaryDirectory() as workdir:
      rows[name] = launch(name, args.shape, workdir)
  cached, held = rows['cached'], rows['held']
  np.testing.assert_allclose(held['loss'], cached['loss'], rtol=1e-4)
  more = held['peak'] - cached['peak']
  if more < 0.8 * held['reference']:
    sys.exit(
      f'a second model must show in the peak: got {more:.3f} GB more, its '
      f'weights are {held["reference"]:.3f}'
    )
  timing.emit(
    bench='dpo_memory',
    impl='held over cached',
    peak=timing.rounded(held['peak'] / cached['peak']),
    peak_more=timing.rounded(more),
    reference=held['reference'],
  )


def launch(name: str, shape: str, workdir: str) -> dict:
  """Measures `cached` or `held` in its own process; prints the row."""
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'experiments.dpo_memory',
      f'--child={name}',
      f'--shape={shape}',
      f'--workdir={workdir}',
    ],
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    stdout=subprocess.PIPE,
    text=True,
  )
  if done.returncode:
    sys.exit(f'{name} failed')
  row = json.loads(done.stdout.splitlines()[-1])
  timing.emit(**row)
  return row


def recipe(shape: str, workdir: str):
  """Returns a run of one DPO stage on random letters, from random weights."""
  from posttrain import schema

  rng = np.random.default_rng(0)

  def text(length):
    return ''.join(map(chr, rng.integers(97, 123, length)))

  path = pathlib.Path(workdir) / 'pairs.jsonl'
  path.write_text(
    ''.join(
      json.dumps({'prompt': text(40), 'chosen': text(60), 'rejected': text(60)})
      + '\n'
      for _ in range(PAIRS)
    )
  )
  model = schema.Model(
    **dict(zip(lora_memory.SIZES, lora_memory.SHAPES[shape], strict=True)),
    heads=8,
    kv_heads=4,
    remat='block',
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
    model=model,
    stages={'dpo': stage},
    compilation_cache=None,
    metrics=schema.Metrics(progress=False),
  )


def measure(args) -> dict:
  """Returns the row of `args.child`."""
  import jax

  from posttrain.stage import build, components
  from posttrain.util import memory, preemption

  memory.keep_freed_memory()
  run = recipe(args.shape, args.workdir)
  start, meter = lora_memory.resident(), hf_memory.Meter()
  stage = components.make(run, 'dpo')
  job = build.make(stage, args.workdir, 0, preemption.Signal())
  row = {'scoring': meter.read()['peak'] - start}
  score, reference = lambda batch: batch, None
  if args.child == 'held':
    score, reference = scorer(job.learner)
  lora_memory.resident()  # frees the memory that only building needed
  meter, state = hf_memory.Meter(), job.learner.state
  for _ in range(STEPS):
    batch = score(next(job.sampling.pipeline).batch)
    state, metrics = jax.block_until_ready(job.learner.update(state, batch))
  row['peak'] = meter.read()['peak'] - start
  row['reference'] = 0.0 if reference is None else lora_memory.size(reference)
  return {
    'bench': 'dpo_memory',
    'impl': args.child,
    'shape': args.shape,
    'parameters': lora_memory.count(state.params),
    'loss': float(metrics['loss/total']),
    **{name: timing.rounded(x) for name, x in row.items()},
  }


def scorer(learner):
  """Returns a function that scores a batch, and the reference's weights."""
  import dataclasses

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


if __name__ == '__main__':
  main()
