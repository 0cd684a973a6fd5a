"""Recorded experts of the tokens that an engine computes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema
from posttrain.decode import requests
from posttrain.models import transformer
from tests import fixtures
from tests.decode import helpers

DENSE = schema.Model(
  vocab_size=264,
  layers=3,
  embed_dim=32,
  heads=4,
  kv_heads=2,
  head_dim=8,
  mlp_dim=32,
  experts=schema.Experts(count=6, per_token=2, mlp_dim=16),
  dense_layers=(1,),
  routes='record',
)
HYBRID = dataclasses.replace(
  DENSE, delta_layers=(0,), delta=schema.Delta(2, 4, 8, 6)
)


@functools.partial(jax.jit, static_argnums=1)
def statistics(params, model, ids, routes):
  """Returns those of a row, over layers with experts."""
  rows = ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids)
  return transformer.trunk(params, model, *rows, routes=routes)[1]


def compare(model, ids, completion, capacity=96):
  """Checks that a full forward chooses the experts that were recorded."""
  ids = np.concatenate([ids, completion.ids]).astype(np.int32)
  routes = completion.routes
  assert routes.dtype == np.int16
  assert routes.shape == (len(ids) - 1, 2, 2)
  pad = capacity - len(ids)
  recorded = np.pad(routes, ((0, pad + 1), (0, 0), (0, 0)), constant_values=-1)[
    None
  ]
  stats = statistics(
    helpers.params(model), model, np.pad(ids, (0, pad))[None], recorded
  )
  assert stats['recorded'].sum() == 2 * len(routes)
  assert not stats['flipped'].any()
  return recorded


STORED = {'group_size': 2, 'prompt_tokens': 16, 'prefix_cache': False}


def play(model, mesh=None, **options):
  """Compares completions of groups and second turns with full forwards."""
  engine = helpers.make(model, slots=4, capacity=96, mesh=mesh, **options)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 256, n) for n in (21, 7, 30)]
  prompts[2][:21] = prompts[0]
  order, done = (0, 0, 0, 1, 2, 1), []
  for i, k in enumerate(order):
    ids = prompts[k]
    engine.submit(requests.Request(i, ids, 5 + i, hold=i < 2))
  while len(done) < len(order) + 2:
    for x in engine.poll():
      known = prompts[order[x.id]]
      again = [y for y in done if y.id == x.id]
      if again:
        known = np.concatenate([known, again[0].ids, [9, 8, 7]])
        engine.release(x.id)
      elif x.id < 2:
        engine.extend(x.id, np.array([9, 8, 7]), 6)
      compare(model, known, x)
      done.append(x)


@pytest.mark.parametrize(
  ('model', 'options'),
  [
    (DENSE, STORED),
    # Prompts that begin as others are copied.
    pytest.param(DENSE, {}, marks=pytest.mark.slow),
    pytest.param(HYBRID, {}, marks=pytest.mark.slow),
  ],
)
def test_recorded_experts_are_those_of_the_full_forward(model, options):
  play(model, **options)


ON_DEVICES = """
from posttrain import schema, sharding
from tests.decode import test_routes as t
mesh = sharding.make_mesh(schema.Mesh(data=2, tensor=2))
t.play(t.DENSE, mesh)
t.play(t.DENSE, mesh, **t.STORED)
"""


@pytest.mark.slow
def test_recorded_experts_on_devices():
  fixtures.run_on_devices(4, '-c', ON_DEVICES)


def test_replay_computes_with_the_recorded_experts():
  engine = helpers.make(DENSE, slots=4, capacity=96, **STORED)
  prompt = np.arange(20)
  (done,) = engine.generate([requests.Request(0, prompt, 10)])
  routes = compare(DENSE, prompt, done)
  other = np.where(routes >= 0, (routes + 3) % 6, routes).astype(np.int16)
  ids = np.pad(np.concatenate([prompt, done.ids]), (0, 66)).astype(np.int32)
  replays = dataclasses.replace(DENSE, routes='replay')
  params = helpers.params(DENSE)
  for model, follows in ((DENSE, False), (replays, True)):
    stats = statistics(params, model, ids[None], other)
    # The first layer's input is the same, so its own choices are.
    assert stats['flipped'][0] > 0
    recorded = np.bincount(other[0, :29, 0].ravel(), minlength=6)
    rest = statistics(params, DENSE, ids[None], None)['load'][0]
    rest = rest - np.bincount(routes[0, :29, 0].ravel(), minlength=6)
    same = np.array_equal(stats['load'][0], recorded + rest)
    assert same == follows
