"""Benchmarks, one JSON line per result.

    python -m experiments.benchmarks train_step --shape=S --threads=1
    python -m experiments.benchmarks decode --shape=S --threads=1 [--refill]
    python -m experiments.benchmarks grpo --shape=S --threads=1 [--first]
    python -m experiments.benchmarks growth --shape=S --threads=1
    python -m experiments.benchmarks logprobs --vocab=32768

`train_step`, `decode` and `grpo` alternate our train step, our engine and our
whole GRPO step with the yardsticks of `plain_jax` and `plain_jax_decode`, under
the same noise, and measure the machine's matrix product in between. On a shared
machine, tokens per CPU second is the number to read. See `train_step`,
`decode` and `grpo`. `growth` has curves of what a token costs,
see `growth`.

`logprobs` compares the chunked linear head with full logits, each in a process
of its own, because peak memory is a property of a process.
"""

import argparse
import os
import resource
import subprocess
import sys
import time

from experiments.benchmarks import decode, growth, grpo, timing, train_step


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
  parser = argparse.ArgumentParser(prog='python -m experiments.benchmarks')
  commands = parser.add_subparsers(required=True)
  for name, run in (
    ('train_step', train_step.main),
    ('decode', decode.main),
    ('grpo', grpo.main),
    ('growth', growth.main),
    ('logprobs', linear_head),
  ):
    command = commands.add_parser(name)
    command.set_defaults(run=run)
    command.add_argument('--threads', type=int, help='default: all')
    command.add_argument('--repeats', type=int, default=5)
    if name != 'logprobs':
      command.add_argument('--shape', choices=('S', 'M'), default='S')
    OPTIONS[name](command.add_argument)
  return parser.parse_args(argv)


def _train_step_options(add) -> None:
  add('--micro-rows', type=int, default=4)
  add('--dtype', default='float32')
  add('--remat', default='none')


def _grpo_options(add) -> None:
  add('--first', action='store_true', help='only the first steps')
  help = 'only the first step of this implementation, in this process'
  add('--impl', choices=grpo.makers(), help=help)
  add('--cache', help='cold:FOLDER or warm:FOLDER, with --impl')


def _growth_options(add) -> None:
  add('--kinds', help='decode,prefill,train,ragged; default all')
  add('--picture', help='file of a picture of the curves')


def _logprobs_options(add) -> None:
  add('--vocab', type=int, default=32768)
  add('--tokens', type=int, default=2048)
  add('--embed-dim', type=int, default=256)
  add('--vocab-chunk', type=int)
  add('--impl', choices=('chunked', 'plain'))


OPTIONS = {
  'train_step': _train_step_options,
  'decode': lambda add: add(
    '--refill', action='store_true', help='by capacity'
  ),
  'grpo': _grpo_options,
  'growth': _growth_options,
  'logprobs': _logprobs_options,
}


def linear_head(args) -> None:
  """Measures the linear head in two processes, or `--impl` in this one."""
  if args.impl is not None:
    _linear_head(args)
    return
  for impl in ('chunked', 'plain'):
    command = [sys.executable, '-m', 'experiments.benchmarks', 'logprobs']
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
