"""`bench decode`: our engine against plain JAX, new tokens per second.

64 sequences of 32 prompt and 128 new tokens each, no stop token. `ours` has
64 prompts, `ours_groups` 8 prompts for 8 sequences each; for the yardstick the
two are the same. All alternate in one process.
"""

import dataclasses
import time

from experiments.benchmarks import timing

BATCH, PROMPT, NEW, GROUP = 64, 32, 128, 8
REFILL_SLOTS, REFILL_PROMPT = 16, 64
CAPACITIES = (512, 1024, 2048, 4096, 8192)


def main(args) -> None:
  """Prints a row per implementation, and one of the matrix product."""
  if args.refill:
    refill(args)
    return
  from experiments.benchmarks import plain_jax
  from posttrain.util import memory

  memory.keep_freed_memory()  # as `posttrain.main` does, for all
  shape = plain_jax.SHAPES[args.shape]
  works = {
    'ours': ours(shape, BATCH),
    'ours_groups': ours(shape, BATCH // GROUP),
    'plain': plain(shape),
  }
  clocks, first = {'matmul': timing.matmul_clock()}, {}
  for name, work in works.items():
    start = time.perf_counter()
    work()  # compiles; `ours_groups` has the programs of `ours`
    first[name] = time.perf_counter() - start
    clocks[name] = timing.Clock(work)
  timing.alternate(clocks, args.repeats)
  gflops = clocks['matmul'].rates(timing.MATMUL_GFLOP, 'gflop')
  timing.emit_matmul(gflops, args.threads)
  for name in works:
    rates = clocks[name].rates(BATCH * NEW, 'tokens')
    timing.emit(
      bench='decode',
      impl=name,
      shape=args.shape,
      threads=args.threads,
      **rates,
      first_s=timing.rounded(first[name]),
    )


def refill(args) -> None:
  """Prints the milliseconds of a refill, by capacity and group size."""
  from experiments.benchmarks import plain_jax
  from posttrain.util import memory

  memory.keep_freed_memory()
  timing.emit_matmul(threads=args.threads)
  shape = plain_jax.SHAPES[args.shape]
  for group in (1, GROUP):
    clocks = {}
    for capacity in CAPACITIES:
      work = refilling(shape, capacity, group)
      work()  # compiles
      clocks[capacity] = timing.Clock(work)
    timing.alternate(clocks, args.repeats)
    for capacity, clock in clocks.items():
      rates = clock.rates(1, 'refills')
      timing.emit(
        bench='refill',
        shape=args.shape,
        capacity=capacity,
        group=group,
        prompt=REFILL_PROMPT,
        wall_ms=timing.rounded(1e3 / rates['refills_per_s']),
        cpu_ms=timing.rounded(1e3 / rates['refills_per_cpu_s']),
      )


def refilling(shape, capacity: int, group: int):
  """Returns the prefill of a group's prompt as a function."""
  import jax
  import numpy as np

  from posttrain import schema
  from posttrain.decode import engine as engines
  from posttrain.decode import requests
  from posttrain.models import transformer

  cfg = schema.Model(**dataclasses.asdict(shape))
  engine = engines.Engine(
    cfg, slots=REFILL_SLOTS, capacity=capacity, prefill_rows=8
  )
  engine.set_params(transformer.init(jax.random.key(0), cfg), 0)
  ids = np.random.default_rng(0).integers(0, shape.vocab_size, REFILL_PROMPT)
  # The first token comes with the prompt, and nothing is decoded.
  batch = [requests.Request(i, ids, 1) for i in range(group)]
  return lambda: engine.generate(batch)


def prompts(vocab: int, count: int):
  """Returns random ids i32[count, PROMPT]."""
  import numpy as np

  return np.random.default_rng(0).integers(0, vocab, (count, PROMPT), np.int32)


def ours(shape, count: int):
  """Returns the engine's work on `count` distinct prompts, as a function."""
  import jax

  from posttrain import schema
  from posttrain.decode import engine as engines
  from posttrain.decode import requests
  from posttrain.models import transformer

  cfg = schema.Model(**dataclasses.asdict(shape))
  engine = engines.Engine(
    cfg,
    slots=BATCH,
    capacity=PROMPT + NEW,
    prefill_rows=min(count, 32),
    prefill_tokens=PROMPT,
  )
  engine.set_params(transformer.init(jax.random.key(0), cfg), 0)
  batch = [
    requests.Request(i, ids, NEW)
    for i, ids in enumerate(
      prompts(shape.vocab_size, count).repeat(BATCH // count, 0)
    )
  ]

  def work():
    completions = engine.generate(batch)
    assert all(len(completion.ids) == NEW for completion in completions)

  return work


def plain(shape):
  """Returns the yardstick's work as a function without arguments."""
  import jax

  from experiments.benchmarks import plain_jax, plain_jax_decode

  params = plain_jax.init(jax.random.key(0), shape)
  ids = prompts(shape.vocab_size, BATCH)
  key = jax.random.key(1)

  def work():
    jax.device_get(plain_jax_decode.generate(params, shape, ids, key, NEW))

  return work
