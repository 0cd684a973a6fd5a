"""`bench train_step`: our train step against plain JAX, tokens per second.

A whole step: 64 rows of 160 tokens, cross-entropy on all of them, AdamW.
`matmul_share` is its rate, in FLOPs of the model, over the matrix product's.
"""

import dataclasses
import time
from collections.abc import Sequence

from experiments.benchmarks import timing


def main(args) -> None:
  """Prints a row per implementation, and one of the matrix product."""
  import jax

  from experiments.benchmarks import plain_jax
  from posttrain.util import memory

  memory.keep_freed_memory()  # as `posttrain.main` does, for both
  shape = plain_jax.SHAPES[args.shape]
  size = (plain_jax.ROWS, plain_jax.TOKENS)
  ids = jax.random.randint(jax.random.key(1), size, 0, shape.vocab_size)
  clocks, compile_s = {'matmul': timing.matmul_clock()}, {}
  for name, make in (('ours', ours), ('plain', plain)):
    start = time.perf_counter()
    work = make(args, shape, ids)
    work()  # compiles
    compile_s[name] = time.perf_counter() - start
    clocks[name] = timing.Clock(work)
  timing.alternate(clocks, args.repeats)
  gflops = clocks['matmul'].rates(timing.MATMUL_GFLOP, 'gflop')
  timing.emit_matmul(gflops, args.threads)
  for name, seconds in compile_s.items():
    rates = clocks[name].rates(ids.size, 'tokens')
    flops = plain_jax.train_flops(shape, size[1])
    share = rates['tokens_per_cpu_s'] * flops / 1e9 / gflops['gflop_per_cpu_s']
    timing.emit(
      bench='train_step',
      impl=name,
      shape=args.shape,
      threads=args.threads,
      micro_tokens=args.micro_rows * size[1],
      **rates,
      matmul_share=timing.rounded(share),
      first_step_s=timing.rounded(seconds),
    )


def plain(args, shape, ids):
  """Returns the yardstick's step as a function without arguments."""
  import jax

  from experiments.benchmarks import plain_jax

  init_state, step = plain_jax.make_step(shape, args.micro_rows)
  state = init_state(jax.random.key(0))

  def work():
    nonlocal state
    state, loss = step(state, ids)
    loss.block_until_ready()

  return work


def ours(args, shape, ids):
  """Returns our step on the same tokens as a function without arguments."""
  from posttrain import schema

  options = {'dtype': args.dtype, 'remat': args.remat}
  cfg = schema.Model(**dataclasses.asdict(shape), **options)
  return update(cfg, make_batch(ids, args.micro_rows))


def update(cfg, batch):
  """Returns the update of a model from a batch, as a function."""
  import jax

  from posttrain import schema, sharding
  from posttrain.models import transformer
  from posttrain.training import objectives, optim
  from posttrain.training import step as train_steps

  optimizer = optim.make(schema.Optim(), 1000)
  mesh, rules = sharding.make_mesh(schema.Mesh()), transformer.SHARDING_RULES
  step = train_steps.make_train_step(
    objectives.TokenComponents(cfg, ('bench',)),
    optimizer,
    mesh=mesh,
    rules=rules,
  )
  state = train_steps.init_state(
    transformer.init(jax.random.key(0), cfg), optimizer, average=False
  )
  # Placed, or the second call would compile again.
  state = jax.device_put(state, sharding.shardings(state, rules, mesh))

  def work():
    nonlocal state
    state, metrics = step(state, batch)
    metrics['loss/total'].block_until_ready()

  return work


def make_batch(ids, rows: int, segments: Sequence[int] | None = None):
  """Returns a batch of rows, all tokens but the first of a segment in `ce`.

  Args:
    ids: i32[N, T], a row each.
    rows: rows of a micro-batch.
    segments: tokens of a segment, by row of a micro-batch; None = a row is one.
  """
  import numpy as np

  from posttrain import types

  micro = (-1, rows, ids.shape[1])
  ids = np.asarray(ids).reshape(micro)
  fields = {
    name: np.zeros(ids.shape, dtype)
    for name, dtype in types.TOKEN_FIELDS.items()
  }
  segment = np.array(segments or [ids.shape[-1]] * rows, np.int32)[:, None]
  index = np.arange(ids.shape[-1], dtype=np.int32)[None]
  positions = np.broadcast_to(index % segment, ids.shape)
  segment_ids = np.broadcast_to(index // segment + 1, ids.shape)
  weights = (positions > 0).astype(np.float32)
  fields |= {
    'ids': ids,
    'mask': positions > 0,
    'ce_weights': weights,
    'temperatures': np.ones_like(weights),
  }
  return types.Batch(
    **fields,
    segment_ids=segment_ids,
    positions=positions,
    env_ids=np.zeros_like(ids),
    rl_count=np.float32(0),
    ce_count=np.float32(weights.sum()),
    ref_kl_count=np.float32(0),
    rl_sequences=np.float32(0),
    num_micro_batches=np.int32(len(ids)),
  )
