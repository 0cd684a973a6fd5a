"""`bench growth`: what a token costs as capacities and rows grow.

    decode    by the capacity of a slot, of which 32 tokens are used
    prefill   by the capacity of a slot, per token of prompts of 64
    train     by the tokens of a row: one sequence; packed with segments of 64,
              or of 60; or packed with segments of 60, except one row in each
              micro-batch. Micro-batches of 2,048 tokens
    ragged    completions of 16 to 112 tokens that take turns in the slots,
              against completions of 64 tokens

All works of a kind alternate in one process; microseconds per token are
medians of CPU time. `--picture=FILE` draws the curves.
"""

import dataclasses
from collections.abc import Callable

from experiments.benchmarks import timing, train_step

CAPACITIES = (64, 128, 256, 512, 1024, 2048, 4096)
ROWS = (64, 128, 256, 512, 1024, 2048)
SLOTS, PROMPT, NEW = 64, 8, 24  # of `decode`
LONG_PROMPT = 64  # of `prefill`
MICRO_TOKENS = 2048  # of `train`
MIXED = (256, 512, 1024)  # rows of the other curves
RAGGED_SLOTS, REQUESTS, MEAN = 32, 256, 64  # of `ragged`


def main(args) -> None:
  """Prints a row per point of every curve, and one of the matrix product."""
  from experiments.benchmarks import plain_jax
  from posttrain.util import memory

  memory.keep_freed_memory()
  shape = plain_jax.SHAPES[args.shape]
  rows = []
  kinds = {f.__name__: f for f in (decode, prefill, train, ragged)}
  for kind in (args.kinds or ','.join(kinds)).split(','):
    rows += measure(kind, kinds[kind](shape), args)
  if args.picture and any(row['bench'] != 'growth_ragged' for row in rows):
    draw(rows, args.picture)


def measure(kind: str, points: dict, args) -> list[dict]:
  """Prints and returns the rows of a kind.

  Args:
    kind: its name.
    points: (curve, size) -> (work, tokens), or (work, tokens, another work
      whose time is subtracted).
    args: the command's arguments.
  """
  clocks = {'matmul': timing.matmul_clock()}
  for key, (work, _, *others) in points.items():
    clocks[key] = timing.Clock(work)
    for other in others:
      clocks[(*key, 'less')] = timing.Clock(other)
  timing.alternate(clocks, args.repeats)
  gflops = clocks['matmul'].rates(timing.MATMUL_GFLOP, 'gflop')
  rows = []
  for key, (_, tokens, *others) in points.items():
    seconds = clocks[key].median_cpu
    if others:
      seconds -= clocks[(*key, 'less')].median_cpu
    curve, size = key
    rows.append(
      {
        'bench': f'growth_{kind}',
        'shape': args.shape,
        'curve': curve,
        'size': size,
        'cpu_us_per_token': timing.rounded(1e6 * seconds / tokens),
        'spread': clocks[key].rates(tokens, 'tokens')['cpu_spread'],
        'matmul_gflop_per_cpu_s': gflops['gflop_per_cpu_s'],
      }
    )
    timing.emit(**rows[-1])
  return rows


def decode(shape) -> dict:
  """Returns the points of `decode`: whole completions less first tokens."""
  return {
    ('32 tokens used', capacity): (
      generating(shape, SLOTS, capacity, PROMPT, [NEW] * SLOTS),
      SLOTS * (NEW - 1),
      generating(shape, SLOTS, capacity, PROMPT, [1] * SLOTS),
    )
    for capacity in CAPACITIES
  }


def prefill(shape) -> dict:
  """Returns the points of `prefill`: completions of one token."""
  return {
    ('prompts of 64', capacity): (
      generating(shape, SLOTS, capacity, LONG_PROMPT, [1] * SLOTS),
      SLOTS * LONG_PROMPT,
    )
    for capacity in CAPACITIES[1:]
  }


def ragged(shape) -> dict:
  """Returns the points of `ragged`."""
  import numpy as np

  lengths = np.random.default_rng(0).integers(16, 2 * MEAN - 15, REQUESTS)
  return {
    (curve, REQUESTS): (
      generating(shape, RAGGED_SLOTS, 160, PROMPT, new),
      sum(new),
    )
    for curve, new in (
      ('fixed', [MEAN] * REQUESTS),
      ('ragged', lengths.tolist()),
    )
  }


def generating(
  shape, slots: int, capacity: int, prompt: int, new: list[int]
) -> Callable[[], object]:
  """Returns a work that completes distinct prompts.

  Args:
    shape: the model's sizes.
    slots: sequences decoded at a time.
    capacity: tokens of a slot.
    prompt: tokens of each prompt.
    new: tokens of each completion.
  """
  import jax
  import numpy as np

  from posttrain import schema
  from posttrain.decode import engine as engines
  from posttrain.decode import requests
  from posttrain.models import transformer

  cfg = schema.Model(**dataclasses.asdict(shape))
  engine = engines.Engine(
    cfg, slots=slots, capacity=capacity, prefill_rows=32, prefill_tokens=32
  )
  engine.set_params(transformer.init(jax.random.key(0), cfg), 0)
  rng = np.random.default_rng(0)
  ids = rng.integers(0, shape.vocab_size, (len(new), prompt), np.int32)
  batch = [requests.Request(i, ids[i], count) for i, count in enumerate(new)]
  return lambda: engine.generate(batch)


def train(shape) -> dict:
  """Returns the points of `train`."""
  points = {}
  for row in ROWS:
    rows = MICRO_TOKENS // row
    curves = {'one segment': [row] * rows, 'segments of 64': [64] * rows}
    if row in MIXED:
      mixed = [row] + [60] * (rows - 1)
      curves |= {'segments of 60': [60] * rows, 'one row unpacked': mixed}
    for curve, segments in curves.items():
      work = training(shape, row, segments)
      points[curve, row] = work, 2 * MICRO_TOKENS
  return points


def training(
  shape, row_tokens: int, segments: list[int]
) -> Callable[[], object]:
  """Returns an update from two micro-batches.

  Args:
    shape: the model's sizes.
    row_tokens: tokens of a row.
    segments: tokens of a segment, by row of a micro-batch.
  """
  import numpy as np

  from posttrain import schema

  rows = MICRO_TOKENS // row_tokens
  ids = np.random.default_rng(0).integers(
    0, shape.vocab_size, (2 * rows, row_tokens), np.int32
  )
  cfg = schema.Model(**dataclasses.asdict(shape))
  return train_step.update(cfg, train_step.make_batch(ids, rows, segments))


def draw(rows: list[dict], path: str) -> None:
  """Draws the curves of all kinds but `ragged`."""
  from matplotlib import pyplot as plt

  kinds = [
    kind
    for kind in ('decode', 'prefill', 'train')
    if any(row['bench'] == f'growth_{kind}' for row in rows)
  ]
  size = (4 * len(kinds), 3.5)
  figure, axes = plt.subplots(1, len(kinds), figsize=size, squeeze=False)
  for kind, axis in zip(kinds, axes[0], strict=True):
    mine = [row for row in rows if row['bench'] == f'growth_{kind}']
    for curve in dict.fromkeys(row['curve'] for row in mine):
      points = [row for row in mine if row['curve'] == curve]
      axis.plot(
        [row['size'] for row in points],
        [row['cpu_us_per_token'] for row in points],
        marker='o',
        label=curve,
      )
    axis.set_xscale('log', base=2)
    axis.set_ylim(bottom=0)
    axis.set_title(kind)
    axis.set_xlabel('tokens of a row' if kind == 'train' else 'capacity')
    axis.legend()
  axes[0, 0].set_ylabel('CPU us per token')
  figure.tight_layout()
  figure.savefig(path, dpi=120)
