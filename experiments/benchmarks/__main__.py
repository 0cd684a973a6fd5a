"""Benchmarks, one JSON line per result.

    python -m experiments.benchmarks train_step --shape=S --threads=1
    python -m experiments.benchmarks decode --shape=S --threads=1
    python -m experiments.benchmarks grpo --shape=S --threads=1
    python -m experiments.benchmarks growth --shape=S --threads=1
    python -m experiments.benchmarks logprobs --vocab=32768

The first three alternate our work with that of `plain_jax`, under the same
noise, and measure the machine's matrix product in between. On a shared machine,
tokens per CPU second is the number to read. Each work runs in a process of its
own. Its row says how many tokens it computed, and needed (`counts`), its share
of the matrix product's rate, and its peak memory.

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

import tempfile

import numpy as np

from experiments.benchmarks import sizes, timing

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
  timing.emit_box()
  runs[args.bench](args)


def train_step(args) -> None:
  """Compares a train step."""
  from experiments.benchmarks import plain_jax, works

  shape = sizes.SHAPES[args.shape]
  ids = sizes.random_ids(shape.vocab_size, sizes.ROWS, sizes.TOKENS)

  def plain():
    import jax

    init_state, step = plain_jax.make_step(shape, sizes.TRAIN_ROWS)
    state = init_state(jax.random.key(0))

    def work():
      nonlocal state
      state, loss = step(state, ids)
      loss.block_until_ready()

    return work

  makers = {
    'ours': lambda: works.update(
      works.model(shape), works.make_batch(ids, sizes.TRAIN_ROWS)
    ),
    'plain': plain,
  }
  timing.compare(args, makers, ids.size, 'tokens', {})


def decode(args) -> None:
  """Compares decoding."""
  from experiments.benchmarks import plain_jax, works

  shape = sizes.SHAPES[args.shape]
  ids = sizes.random_ids(shape.vocab_size, BATCH, PROMPT)

  def ours(count: int):
    return works.generate(
      works.model(shape),
      ids[:count].repeat(BATCH // count, 0),
      NEW,
      capacity=PROMPT + NEW,
      prefill_rows=min(count, 32),
      prefill_tokens=PROMPT,
    )

  def plain():
    import jax

    params, key = plain_jax.init(jax.random.key(0), shape), jax.random.key(1)
    return lambda: jax.device_get(
      plain_jax.generate(params, shape, ids, key, NEW)
    )

  makers = {
    'ours': lambda: ours(BATCH),
    'ours_groups': lambda: ours(BATCH // GROUP),
    'plain': plain,
  }
  timing.compare(args, makers, BATCH * NEW, 'tokens', {})


def grpo(args) -> None:
  """Compares whole steps."""
  from experiments.benchmarks import plain_jax, works

  shape, size = sizes.SHAPES[args.shape], sizes.STEPS['grpo']
  prompts = size.prompts, size.prompt
  with tempfile.TemporaryDirectory() as root:

    def ours(tied: int):
      folder = tempfile.mkdtemp(dir=root)
      return works.grpo(works.model(shape), size, folder, tied)

    makers = {
      'ours_live': lambda: ours(0),
      'ours_mixed': lambda: ours(size.prompts // 2),
      'plain': lambda: plain_jax.make_grpo(
        shape,
        group=size.group,
        new=size.new,
        rows=size.micro_rows,
        prompts=np.random.default_rng(0).integers(97, 123, prompts),
        reward=lambda task, ids: sizes.reward(ids.tobytes()),
      ),
    }
    timing.compare(args, makers, 1, 'steps', {})


def growth(args) -> None:
  """Measures tokens per second by the size of a slot or a row."""
  from experiments.benchmarks import works

  cfg = works.model(sizes.SHAPES[args.shape])

  def generate(capacity: int, prompt: int, new: int):
    ids = sizes.random_ids(cfg.vocab_size, BATCH, prompt)
    rows = {'prefill_rows': 32, 'prefill_tokens': 32}
    return works.generate(cfg, ids, new, capacity=capacity, **rows)

  def train(row: int, segment: int):
    rows = MICRO_TOKENS // row
    ids = sizes.random_ids(cfg.vocab_size, 2 * rows, row)
    batch = works.make_batch(ids, rows, [segment] * rows)
    return works.update(cfg, batch)

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
      timing.compare(args, works_of, tokens, 'tokens', {}, size=size)


def logprobs(args) -> None:
  """Compares the chunked linear head with full logits."""
  n, d, v = 2048, 256, args.vocab

  def make(is_chunked: bool):
    import jax
    import jax.numpy as jnp

    from posttrain.losses import logprobs

    def chunked(hidden, weight, targets):
      return logprobs.linear(hidden, weight, targets)[0].sum()

    def plain(hidden, weight, targets):
      log_probs = jax.nn.log_softmax(hidden @ weight)
      return jnp.take_along_axis(log_probs, targets[:, None], axis=1).sum()

    keys = jax.random.split(jax.random.key(0), 3)
    arrays = (
      jax.random.normal(keys[0], (n, d)),
      jax.random.normal(keys[1], (d, v)) / d**0.5,
      jax.random.randint(keys[2], (n,), 0, v),
    )
    loss = jax.value_and_grad(chunked if is_chunked else plain, (0, 1))
    step = jax.jit(loss).lower(*arrays).compile()
    temp = step.memory_analysis().temp_size_in_bytes / 2**20

    def work():
      jax.block_until_ready(step(*arrays))
      return lambda: {'temp_mib': temp}

    return work

  makers = {'chunked': lambda: make(True), 'plain': lambda: make(False)}
  timing.compare(args, makers, n, 'tokens', {}, vocab=v, embed_dim=d)


if __name__ == '__main__':
  main()
