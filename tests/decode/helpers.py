"""Helpers of the engine tests: a model, engines of few shapes, requests.

Engines of one shape share programs, and compilation dominates the time of the
tests: the shapes are `make()`, `SMALL` and `WIDE`.
"""

import functools

import numpy as np

from posttrain import schema
from posttrain.decode import engines, requests
from tests import fixtures

MODEL = schema.Model(
  vocab_size=264,
  layers=2,
  embed_dim=64,
  heads=4,
  kv_heads=2,
  head_dim=16,
  mlp_dim=96,
  qk_norm=True,
)
EOS = 257
WIDTH = 48  # tokens of every reference forward
SMALL = {'slots': 2, 'prefill_rows': 2, 'prefill_tokens': 32}
WIDE = {'capacity': 96}
GREEDY = requests.Sampling(temperature=0.0)


@functools.cache
def params(model=MODEL, seed=0):
  """Returns parameters whose scale spreads the logits.

  With the default one the distribution is nearly uniform, and the argmax
  depends on rounding.
  """
  return fixtures.params(model, seed, scale=1.5)


def make(model=MODEL, slots=8, capacity=WIDTH, mesh=None, **options):
  options = {'prefill_rows': 4, 'prefill_tokens': 8, 'chunk': 4, **options}
  sizes = engines.Options(slots=slots, capacity=capacity, **options)
  engine = engines.Engine(model, sizes, mesh)
  engine.set_params(params(model), 0)
  return engine


def make_requests(count, seed=0, sampling=None, max_tokens=16, **options):
  """Returns requests with ragged prompts, 1 to 20 tokens long."""
  rng = np.random.default_rng(seed)
  sampling = sampling or requests.Sampling()
  return [
    requests.Request(
      1000 * seed + i,
      rng.integers(0, 256, rng.integers(1, 21)),
      max_tokens,
      (EOS,),
      sampling,
      **options,
    )
    for i in range(count)
  ]


@functools.cache
def baseline():
  """Returns requests, and their completions by the default engine."""
  batch = make_requests(12, seed=1)
  return batch, make().generate(batch)


def poll(engine, count):
  """Polls until `count` requests have stopped."""
  completions = []
  while len(completions) < count:
    completions += engine.poll()
  assert len(completions) == count
  return completions


def same(a, b):
  return all(
    x.id == y.id
    and np.array_equal(x.ids, y.ids)
    and x.stop_reason == y.stop_reason
    for x, y in zip(a, b, strict=True)
  )
