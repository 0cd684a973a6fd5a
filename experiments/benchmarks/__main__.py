"""Benchmarks, one JSON line per result.

    python -m experiments.benchmarks train_step --shape=S --threads=1
    python -m experiments.benchmarks decode --shape=S --threads=1
    python -m experiments.benchmarks grpo --shape=S --threads=1
    python -m experiments.benchmarks growth --shape=S --threads=1
    python -m experiments.benchmarks logprobs --vocab=32768

The first three alternate our work with that of `plain_jax`, under the same
noise, and measure the machine's matrix product in between. On a shared machine,
tokens per CPU second is the number to read.

train_step  64 rows of 160 tokens, cross-entropy on all of them, AdamW
decode      64 sequences of 32 prompt and 128 new tokens, no stop token: 64
            prompts, and (`ours_groups`) 8 prompts for 8 sequences each.
grpo        8 prompts of 32 tokens, 8 samples of 32 tokens for each, one update
            over micro-batches of 1,024 tokens, from the tasks to the new
            weights. In `ours_live` the rewards of every group differ; in
            `ours_mixed` 4 of the 8 groups are tied, and pruned
growth      what a token costs by the capacity of a slot (`decode`, of which 32
            tokens are used; `prefill`, prompts of 64) and by the tokens of a
            row (`train`: one sequence; `packed`: segments of 64)
logprobs    the chunked linear head against full logits, and the temporaries of
            both programs
"""

import numpy as np

from experiments.benchmarks import timing

BATCH, PROMPT, NEW, GROUP = 64, 32, 128, 8  # of `decode`
SIZES = (128, 256, 512, 1024, 2048)  # of `growth`
MICRO_TOKENS = 2048  # of `growth`


def main() -> None:
  """Runs the command, with `--threads` threads."""
  parser = timing.parser(__doc__, repeats=5, vocab=32768)
  runs = {x.__name__: x for x in (train_step, decode, grpo, growth, logprobs)}
  add = parser.add_argument
  add('bench', choices=runs)
  add('--shape', choices=('S', 'M'), default='S')
  add('--threads', type=int, help='default: all')
  args = parser.parse_args()
  timing.set_threads(args.threads)
  runs[args.bench](args)


def train_step(args) -> None:
  """Compares a train step."""
  import jax

  from experiments.benchmarks import plain_jax, works

  shape = plain_jax.SHAPES[args.shape]
  ids = works.random_ids(shape, plain_jax.ROWS, plain_jax.TOKENS)

  def plain():
    init_state, step = plain_jax.make_step(shape, works.TRAIN_ROWS)
    state = init_state(jax.random.key(0))

    def work():
      nonlocal state
      state, loss = step(state, ids)
      loss.block_until_ready()

    return work

  makers = {
    'ours': lambda: works.update(
      shape, works.make_batch(ids, works.TRAIN_ROWS)
    ),
    'plain': plain,
  }
  timing.compare(args, makers, ids.size, 'tokens')


def decode(args) -> None:
  """Compares decoding."""
  import jax

  from experiments.benchmarks import plain_jax, works

  shape = plain_jax.SHAPES[args.shape]
  ids = works.random_ids(shape, BATCH, PROMPT)

  def ours(count: int):
    return works.generate(
      shape,
      ids[:count].repeat(BATCH // count, 0),
      NEW,
      capacity=PROMPT + NEW,
      prefill_rows=min(count, 32),
      prefill_tokens=PROMPT,
    )

  def plain():
    params, key = plain_jax.init(jax.random.key(0), shape), jax.random.key(1)
    return lambda: jax.device_get(
      plain_jax.generate(params, shape, ids, key, NEW)
    )

  makers = {
    'ours': lambda: ours(BATCH),
    'ours_groups': lambda: ours(BATCH // GROUP),
    'plain': plain,
  }
  timing.compare(args, makers, BATCH * NEW, 'tokens')


def grpo(args) -> None:
  """Compares whole steps."""
  from experiments.benchmarks import plain_jax, works

  shape = plain_jax.SHAPES[args.shape]
  size = works.PROMPTS, works.PROMPT
  makers = {
    'ours_live': lambda: works.grpo(shape, tied=0),
    'ours_mixed': lambda: works.grpo(shape, tied=works.PROMPTS // 2),
    'plain': lambda: plain_jax.make_grpo(
      shape,
      group=works.GROUP,
      new=works.NEW,
      rows=works.MICRO_ROWS,
      prompts=np.random.default_rng(0).integers(97, 123, size),
      reward=lambda task, ids: works.reward(ids.tobytes()),
    ),
  }
  timing.compare(args, makers, 1, 'steps')


def growth(args) -> None:
  """Measures tokens per second by the size of a slot or a row."""
  from experiments.benchmarks import plain_jax, works

  shape = plain_jax.SHAPES[args.shape]

  def generate(capacity: int, prompt: int, new: int):
    ids = works.random_ids(shape, BATCH, prompt)
    sizes = {'prefill_rows': 32, 'prefill_tokens': 32}
    return works.generate(shape, ids, new, capacity=capacity, **sizes)

  def train(row: int, segment: int):
    rows = MICRO_TOKENS // row
    ids = works.random_ids(shape, 2 * rows, row)
    batch = works.make_batch(ids, rows, [segment] * rows)
    return works.update(shape, batch)

  # Kind -> its work of a size, and the work's tokens.
  kinds = {
    'decode': (lambda size: generate(size, 8, 24), BATCH * 24),
    'prefill': (lambda size: generate(size, 64, 1), BATCH * 64),
    'train': (lambda size: train(size, size), 2 * MICRO_TOKENS),
    'packed': (lambda size: train(size, 64), 2 * MICRO_TOKENS),
  }
  for kind, (make, tokens) in kinds.items():
    for size in SIZES:
      works_of = {kind: lambda make=make, size=size: make(size)}
      timing.compare(args, works_of, tokens, 'tokens', size=size)


def logprobs(args) -> None:
  """Compares the chunked linear head with full logits."""
  import jax
  import jax.numpy as jnp

  from posttrain.losses import logprobs

  def chunked(hidden, weight, targets):
    return logprobs.linear(hidden, weight, targets)[0].sum()

  def plain(hidden, weight, targets):
    log_probs = jax.nn.log_softmax(hidden @ weight)
    return jnp.take_along_axis(log_probs, targets[:, None], axis=1).sum()

  n, d, v = 2048, 256, args.vocab
  keys = jax.random.split(jax.random.key(0), 3)
  arrays = (
    jax.random.normal(keys[0], (n, d)),
    jax.random.normal(keys[1], (d, v)) / d**0.5,
    jax.random.randint(keys[2], (n,), 0, v),
  )
  works = {}
  for loss in (chunked, plain):
    step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()
    temp = step.memory_analysis().temp_size_in_bytes
    timing.emit(impl=loss.__name__, temp_mib=timing.rounded(temp / 2**20))
    works[loss.__name__] = lambda step=step: (
      lambda: jax.block_until_ready(step(*arrays))
    )
  timing.compare(args, works, n, 'tokens', vocab=v, embed_dim=d)


if __name__ == '__main__':
  main()
