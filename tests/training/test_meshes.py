"""Train steps of all kinds of stages on eight devices, compared with one.

python -m tests.training.test_meshes DATA FSDP TENSOR SEQUENCE  # differences
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema, sharding
from posttrain.models import lora, transformer
from posttrain.training import objectives, optim
from posttrain.training import step as train_step
from tests import fixtures
from tests.training import test_critic as critics
from tests.training import test_pair_objectives as pairs
from tests.training import test_trees as trees

MODEL = dataclasses.replace(
  fixtures.MODEL,
  layers=2,
  heads=8,
  kv_heads=4,
  head_dim=8,
  qk_norm=True,
  tied_head=False,
  remat='block',
)
OPTIM = dataclasses.replace(fixtures.OPTIM, eps=1e-3)  # not to magnify rounding
CFG = schema.Lora(rank=4, alpha=8.0)
CRITICS = {'critic': 'model', 'head': 'head'}
KINDS = ('tokens', 'trees', 'lora', *CRITICS, 'sigmoid', 'kto', 'ranking')
REDUCE = ('micro_batch', 'update')
REFERENCES = ('ema:0.9', 'snapshot:2')
SIZES = (
  (8, 1, 1, 1),
  (1, 8, 1, 1),
  (1, 2, 4, 1),
  (2, 2, 2, 1),
  (1, 2, 1, 4),
  (2, 1, 2, 2),
)


def _objective(kind):
  if kind in ('sigmoid', 'kto'):
    loss = schema.Sigmoid() if kind == 'sigmoid' else schema.Kto()
    return objectives.TYPES['preference'](
      MODEL, (), schema.Loss(preference=loss)
    )
  if kind == 'ranking':
    loss = schema.Loss(ranking=schema.Ranking(lm_coef=0.1))
    return objectives.TYPES['ranking'](MODEL, (), loss)
  mode = 'token_truncate' if kind in ('tokens', 'trees') else 'none'
  loss = schema.Loss(rl=schema.Clip(sampler_is_mode=mode))
  envs = trees.ENVS if kind in ('trees', *CRITICS) else ('arithmetic',)
  return objectives.TokenComponents(MODEL, envs, loss)


def _batch(kind, shares):
  if kind in ('sigmoid', 'kto', 'ranking'):
    return pairs._pack(pairs._choices(16), pairs._choices(4, seed=1), rows=8)
  if kind == 'trees':
    return trees._pack(trees._samples(), True, 32, rows=8)
  if kind in CRITICS:
    return critics.pack(critics.samples(), trees=shares, rows=8)
  return fixtures.sampled(*fixtures.batches(1, micro_batch_tokens=512))


def _adapter(base, key):
  """An adapter whose correction is not 0."""
  low = lora.init(key, CFG, base)
  return jax.tree.map(
    lambda x: x + 0.01 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), low
  )


def outcome(kind, mesh, reduce='micro_batch', shares=True):
  """Returns the metrics and the state of two steps of two updates."""
  rules, key = transformer.SHARDING_RULES, jax.random.key(0)
  critic = schema.Critic(kind=CRITICS.get(kind, 'none'))
  optimizer = optim.make_all(OPTIM, critic, 10)
  objective = _objective(kind)
  params, base = transformer.init(key, MODEL), None
  if kind == 'ranking':
    params = transformer.add_reward(params, keep_lm_head=True)
  params = transformer.add_critic(params, params, critic.kind)
  if kind == 'lora':
    params, base = _adapter(params, key), params
    base = jax.device_put(base, sharding.shardings(base, rules, mesh))
    base = lora.Base(base, lora.scale(CFG))
  state = train_step.init_state(
    params, optimizer, average=True, ema_and_snapshots=REFERENCES
  )
  state = jax.device_put(state, sharding.shardings(state, rules, mesh))
  step = train_step.make_train_step(
    objective,
    optimizer,
    mesh=mesh,
    rules=rules,
    average=0.5,
    updates=2,
    base=base,
    reduce=reduce,
  )
  batch, arrays = _batch(kind, shares), []
  for _ in range(2):
    state, metrics = jax.block_until_ready(step(state, batch))
    arrays += [np.asarray(metrics[k]) for k in sorted(metrics)]
  return [*arrays, *map(np.asarray, jax.tree.leaves(state))]


def _differences(sizes):
  one = sharding.make_mesh(schema.Mesh(1, 1, 1), jax.devices()[:1])
  *sizes, sequence = sizes
  mesh = sharding.make_mesh(schema.Mesh(*sizes, sequence=sequence))
  differences, shares = {}, sequence == 1
  for kind in KINDS:
    if kind == 'trees' and not shares:
      continue
    expected = outcome(kind, one, shares=shares)
    for reduce in REDUCE if sizes[2] == 1 and shares else REDUCE[:1]:
      actual = outcome(kind, mesh, reduce, shares)
      differences[f'{kind} {reduce}'] = max(
        float(np.max(np.abs(a - b) / (1 + np.abs(a))))
        for a, b in zip(expected, actual, strict=True)
      )
  return differences


@pytest.mark.slow
@pytest.mark.parametrize('sizes', SIZES, ids=str)
def test_eight_devices_match_one(sizes):
  """Losses, gradients (as moments), metrics and updated parameters."""
  words = map(str, sizes)
  printed = fixtures.run_on_devices(
    8, '-m', 'tests.training.test_meshes', *words
  )
  differences = json.loads(printed.splitlines()[-1])
  assert len(differences) >= len(KINDS) - (sizes[3] > 1)
  for kind, difference in differences.items():
    assert difference < 1e-5, kind


if __name__ == '__main__':
  assert jax.device_count() == 8
  print(json.dumps(_differences(tuple(map(int, sys.argv[1:])))))
