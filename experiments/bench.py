"""Benchmarks, one JSON line per result.

    python -m experiments.bench train_step --shape=S --threads=1
    python -m experiments.bench decode --shape=S --threads=1 [--refill]
    python -m experiments.bench grpo --shape=S --threads=1 [--first]
    python -m experiments.bench growth --shape=S --threads=1
    python -m experiments.bench logprobs --vocab=32768

`train_step`, `decode` and `grpo` alternate our train step, our engine and our
whole GRPO step with the yardsticks of `plain_jax` and `plain_jax_decode`, under
the same noise, and measure the machine's matrix product in between. On a shared
machine, tokens per CPU second is the number to read. See `bench_train`,
`bench_decode` and `bench_grpo`. `growth` has curves of what a token costs,
see `bench_growth`.

`logprobs` compares the chunked linear head with full logits, each in a process
of its own, because peak memory is a property of a process.
"""

import argparse
import os
import resource
import subprocess
import sys
import time

from experiments import (
  bench_decode,
  bench_growth,
  bench_grpo,
  bench_train,
  timing,
)


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
  step.set_defaults(run=bench_train.main)
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
  timing.emit_matmul(threads=args.threads)


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
