"""Benchmarks, one JSON line per result.

    python -m experiments.bench train_step --shape=S --threads=1
    python -m experiments.bench decode --shape=S --threads=1 [--refill]
    python -m experiments.bench grpo --shape=S --threads=1 [--first]
    python -m experiments.bench growth --shape=S --threads=1
    python -m experiments.bench logprobs --vocab=32768

`train_step` alternates our train step with the yardstick of `plain_jax`, under
the same noise, and measures the machine's matrix product in between. On a
shared machine, tokens per CPU second is the number to read.

`decode` and `grpo` do the same with the engine and with a whole GRPO step:
see `bench_decode` and `bench_grpo`. `growth` has curves of what a token costs,
see `bench_growth`.

`logprobs` compares the chunked linear head with full logits, each in a process
of its own, because peak memory is a property of a process.
"""

import argparse
import dataclasses
import os
import resource
import subprocess
import sys
import time

from experiments import bench_decode, bench_growth, bench_grpo, timing


def main(argv=None) -> None:
  """Runs the command, with `--threads` threads."""
  args = parse(argv)
  if args.threads:
    # jax reads both when it creates its client.
    os.environ['NPROC'] = str(args.threads)
    if args.threads == 1:
      flag = '--xla_cpu_multi_thread_eigen=false'
      os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flag}'
  args.run(args)


def parse(argv):
  """Reads the command line; `run` is the benchmark's function."""
  parser = argparse.ArgumentParser(prog='python -m experiments.bench')
  commands = parser.add_subparsers(required=True)
  step = commands.add_parser('train_step')
  step.set_defaults(run=train_step)
  step.add_argument('--shape', choices=('S', 'M'), default='S')
  step.add_argument('--micro-rows', type=int, default=4)
  step.add_argument('--dtype', default='float32')
  step.add_argument('--remat', default='none')
  decode = commands.add_parser('decode')
  decode.set_defaults(run=bench_decode.main)
  decode.add_argument('--shape', choices=('S', 'M'), default='S')
  decode.add_argument('--refill', action='store_true', help='by capacity')
  grpo = commands.add_parser('grpo')
  grpo.set_defaults(run=bench_grpo.main)
  grpo.add_argument('--shape', choices=('S', 'M'), default='S')
  grpo.add_argument('--first', action='store_true', help='only the first steps')
  grpo.add_argument(
    '--impl',
    choices=bench_grpo.makers(),
    help='only the first step of this implementation, in this process',
  )
  grpo.add_argument('--cache', help='cold:FOLDER or warm:FOLDER, with --impl')
  growth = commands.add_parser('growth')
  growth.set_defaults(run=bench_growth.main)
  growth.add_argument('--shape', choices=('S', 'M'), default='S')
  growth.add_argument(
    '--kinds', help='decode,prefill,train,ragged; default all'
  )
  growth.add_argument('--picture', help='file of a picture of the curves')
  logprobs = commands.add_parser('logprobs')
  logprobs.set_defaults(run=linear_head)
  logprobs.add_argument('--vocab', type=int, default=32768)
  logprobs.add_argument('--tokens', type=int, default=2048)
  logprobs.add_argument('--embed-dim', type=int, default=256)
  logprobs.add_argument('--vocab-chunk', type=int)
  logprobs.add_argument('--impl', choices=('chunked', 'plain'))
  for command in (step, decode, grpo, growth, logprobs):
    command.add_argument('--threads', type=int, help='default: all')
    command.add_argument('--repeats', type=int, default=5)
  return parser.parse_args(argv)


def train_step(args) -> None:
  """Measures a whole step: 64 rows of 160 tokens, CE on all of them."""
  import jax

  from experiments import plain_jax
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
  timing.emit(bench='matmul', threads=args.threads, **gflops)
  for name, seconds in compile_s.items():
    rates = clocks[name].rates(ids.size, 'tokens')
    timing.emit(
      bench='train_step',
      impl=name,
      shape=args.shape,
      threads=args.threads,
      micro_tokens=args.micro_rows * size[1],
      **rates,
      first_step_s=timing.rounded(seconds),
    )


def plain(args, shape, ids):
  """Returns the yardstick's step as a function without arguments."""
  import jax

  from experiments import plain_jax

  init_state, step = plain_jax.make_step(shape, args.micro_rows)
  state = init_state(jax.random.key(0))

  def work():
    nonlocal state
    state, loss = step(state, ids)
    loss.block_until_ready()

  return work


def ours(args, shape, ids):
  """Returns our step on the same tokens as a function without arguments."""
  import jax

  from posttrain import schema, sharding
  from posttrain.models import transformer
  from posttrain.training import objectives, optim
  from posttrain.training import step as train_steps

  cfg = schema.Model(
    **dataclasses.asdict(shape), dtype=args.dtype, remat=args.remat
  )
  optim_cfg = schema.Optim()
  optimizer = optim.make(optim_cfg, 1000)
  step = train_steps.make_train_step(
    objectives.TokenComponents(cfg, ('bench',)),
    optimizer,
    mesh=sharding.make_mesh(schema.Mesh()),
    rules=transformer.SHARDING_RULES,
  )
  state = train_steps.init_state(
    transformer.init(jax.random.key(0), cfg), optimizer, average=False
  )
  batch = make_batch(ids, args.micro_rows)

  def work():
    nonlocal state
    state, metrics = step(state, batch)
    metrics['loss/total'].block_until_ready()

  return work


def make_batch(ids, rows: int, segment: int | None = None):
  """Returns a batch of rows, all tokens but the first of a segment in `ce`.

  Args:
    ids: i32[N, T], a row each.
    rows: rows of a micro-batch.
    segment: tokens of a segment, which divide T; None = a row is one.
  """
  import numpy as np

  from posttrain import types

  micro = (-1, rows, ids.shape[1])
  ids = np.asarray(ids).reshape(micro)
  fields = {
    name: np.zeros(ids.shape, dtype)
    for name, dtype in types.TOKEN_FIELDS.items()
  }
  segment = segment or ids.shape[-1]
  index = np.arange(ids.shape[-1], dtype=np.int32)
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


def linear_head(args) -> None:
  """Measures the linear head in two processes, or `--impl` in this one."""
  if args.impl is not None:
    _linear_head(args)
    return
  for impl in ('chunked', 'plain'):
    command = [sys.executable, '-m', 'experiments.bench', 'logprobs']
    command += [
      f'--{name.replace("_", "-")}={value}'
      for name, value in {**vars(args), 'impl': impl}.items()
      if name != 'run' and value is not None
    ]
    subprocess.run(command, check=True)


def _linear_head(args) -> None:
  """Measures forward and backward pass of one implementation."""
  import jax

  n, d, v = args.tokens, args.embed_dim, args.vocab
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = jax.random.normal(keys[0], (n, d))
  weight = jax.random.normal(keys[1], (d, v)) / d**0.5
  targets = jax.random.randint(keys[2], (n,), 0, v)
  before = peak_rss_mib()
  start = time.perf_counter()
  step = jax.jit(jax.value_and_grad(logprobs_loss(args), (0, 1)))
  step = step.lower(hidden, weight, targets).compile()
  compile_s = time.perf_counter() - start
  clock = timing.Clock(
    lambda: jax.block_until_ready(step(hidden, weight, targets))
  )
  timing.alternate({'work': clock}, args.repeats)
  temp = step.memory_analysis().temp_size_in_bytes
  timing.emit(
    bench='logprobs',
    impl=args.impl,
    vocab=v,
    tokens=n,
    embed_dim=d,
    threads=args.threads,
    **clock.rates(n, 'tokens'),
    compile_s=timing.rounded(compile_s),
    temp_mib=timing.rounded(temp / 2**20),
    peak_rss_mib=peak_rss_mib(),
    rss_before_mib=before,
  )


def logprobs_loss(args):
  """Returns the function (hidden, weight, targets) -> sum of logprobs."""
  import jax
  import jax.numpy as jnp

  from posttrain.losses import logprobs

  def chunked(hidden, weight, targets):
    chunk = args.vocab_chunk
    return logprobs.linear(hidden, weight, targets, vocab_chunk=chunk)[0].sum()

  def full(hidden, weight, targets):
    log_probs = jax.nn.log_softmax(hidden @ weight)
    return jnp.take_along_axis(log_probs, targets[:, None], axis=1).sum()

  return {'chunked': chunked, 'plain': full}[args.impl]


def peak_rss_mib() -> int:
  """Returns the highest resident memory of this process so far."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == '__main__':
  main()
