"""Decoding and a GRPO step on eight devices, compared with one device.

python -m tests.decode.test_mesh FILE [shared]    # on all devices
"""

import dataclasses
import math
import sys

import jax
import numpy as np
import pytest

from posttrain import schema, sharding, tree, types
from posttrain.decode import engines, requests
from posttrain.models import transformer
from posttrain.training import objectives
from tests import fixtures, toys
from tests.decode import helpers
from tests.models import test_transformer

STEPS = 2  # the second batch is sampled by the updated weights
WIDE = schema.Model(  # eight devices split its vocabulary, and no kv head
  vocab_size=128,
  layers=1,
  embed_dim=32,
  heads=8,
  kv_heads=4,
  head_dim=8,
  mlp_dim=64,
  qk_norm=True,
  qkv_bias=True,
)
SAMPLINGS = (
  {},
  {'temperature': 0.0},
  {'top_p': 0.8},
  {'top_k': 20},
  {'min_p': 0.02},
  {'temperature': 0.7, 'top_k': 50, 'top_p': 0.9, 'min_p': 0.01},
)


def _wide_completions(sizes, model=WIDE):
  """Completes pairs of prompts with a vocabulary that `tensor` splits.

  The prompts are stored once.
  """
  devices = jax.devices()[: math.prod(sizes)]
  mesh = sharding.make_mesh(schema.Mesh(*sizes), devices)
  make = helpers.params if model is WIDE else test_transformer.make_params
  params = make(model)
  places = sharding.shardings(params, transformer.SHARDING_RULES, mesh)
  options = engines.Options(
    slots=4,
    capacity=32,
    prefill_rows=4,
    prefill_tokens=8,
    prefix_cache=False,
    group_size=2,
    prompt_tokens=16,
  )
  engine = engines.Engine(model, options, mesh)
  engine.set_params(jax.device_put(params, places), 0)
  rng = np.random.default_rng(0)
  top = model.vocab_size
  prompts = [rng.integers(0, top, 12 + i) for i in range(len(SAMPLINGS))]
  done = engine.generate(
    [
      requests.Request(
        i, prompts[i // 2], 8, (7,), requests.Sampling(**sampling)
      )
      for i, sampling in enumerate(2 * SAMPLINGS)
    ]
  )
  return {
    f'{name}/{sizes}': np.concatenate([getattr(c, name) for c in done])
    for name in ('ids', 'logprobs')
  }


def _completions(mesh, params):
  """Completes ragged prompts, some of them equal, more than there are slots."""
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 256, n) for n in (5, 5, 12, 1, 9, 20, 3)]
  batch = [
    requests.Request(
      3 * i + j,
      prompt,
      4 + i,
      tuple(range(0, 256, 32)),
      requests.Sampling(temperature=(1.0, 0.7, 0.0)[j]),
    )
    for i, prompt in enumerate(prompts)
    for j in range(3)
  ]
  engine = toys.engine(mesh=mesh)
  engine.set_params(params, 0)
  done = engine.generate(batch)
  return {
    'ids': np.concatenate([c.ids for c in done]),
    'logprobs': np.concatenate([c.logprobs for c in done]),
    'lengths': [len(c.ids) for c in done],
    'reasons': [types.STOP_REASONS.index(c.stop_reason) for c in done],
  }


def _steps(mesh, state, step, patch):
  """Returns the pipeline's batches, and metrics and parameters after steps."""
  toys.install(patch)
  cfg = toys.stage(envs={'toy': toys.entry(kl_beta=0.1, reference='policy')})
  source, driver = toys.pipeline_and_driver(cfg, state.params, mesh=mesh)
  engine, references = driver._engine, source._scorer.__self__
  arrays = {}
  for i in range(STEPS):
    batch = next(source).batch
    state, metrics = step(state, batch)
    metrics = jax.device_get(metrics)
    engine.set_params(state.params, i)
    references.set_policy({'policy': state.params})
    arrays |= {
      f'{i}/batch/{k}': v for k, v in vars(batch).items() if v is not None
    }
    arrays |= {f'{i}/metrics/{k}': v for k, v in metrics.items()}
  return arrays | {
    f'params/{k}': np.asarray(v) for k, v in tree.flat(state.params).items()
  }


def outcome(mesh):
  """Returns all arrays that must not depend on the number of devices."""
  step, state = fixtures.make(
    mesh=mesh,
    objective=objectives.TokenComponents(fixtures.MODEL, ('toy',)),
    # A large eps: Adam's division by small gradients magnifies rounding.
    cfg=dataclasses.replace(fixtures.OPTIM, eps=1e-3),
  )
  mesh = sharding.make_mesh(mesh)
  arrays = _completions(mesh, state.params)
  with pytest.MonkeyPatch.context() as patch:
    return arrays | _steps(mesh, state, step, patch)


def test_eight_devices_match_one(tmp_path):
  path = tmp_path / 'eight.npz'
  fixtures.run_on_devices(8, '-m', 'tests.decode.test_mesh', str(path))
  eight, one = dict(np.load(path)), outcome(schema.Mesh())
  wide = _wide_completions((1, 1, 1))
  one |= {k.replace('(1, 1, 1)', '(1, 1, 8)'): x for k, x in wide.items()}
  assert eight.pop('devices') == 8 and eight.keys() == one.keys()
  assert len(set(one['reasons'])) == 2 and one['0/batch/rl_count'] > 0
  for name, value in one.items():
    exact = np.asarray(value).dtype.kind in 'ib' and 'metrics' not in name
    np.testing.assert_allclose(
      eight[name],
      value,
      rtol=0 if exact else 1e-5,
      atol=0 if exact else 1e-5,
      err_msg=name,
    )


@pytest.mark.slow
def test_shared_keys_on_eight_devices_match_one(tmp_path):
  path = tmp_path / 'eight.npz'
  args = '-m', 'tests.decode.test_mesh', str(path), 'shared'
  fixtures.run_on_devices(8, *args)
  one = _wide_completions((1, 1, 1), test_transformer.GEMMA4)
  for name, value in dict(np.load(path)).items():
    want = one[f'{name.partition("/")[0]}/(1, 1, 1)']
    np.testing.assert_allclose(value, want, atol=1e-4, err_msg=name)


def test_slots_must_divide_over_the_mesh():
  mesh = sharding.abstract_mesh(schema.Mesh(2, 2), 4)
  with pytest.raises(
    ValueError, match='slots must be a multiple of .*= 4 on 4'
  ):
    engines.Engine(fixtures.MODEL, engines.Options(slots=6), mesh)


if __name__ == '__main__' and 'shared' in sys.argv:
  model, each = test_transformer.GEMMA4, ((1, 2, 2), (2, 1, 4))
  both = [_wide_completions(sizes, model) for sizes in each]
  np.savez(sys.argv[1], **both[0], **both[1])
elif __name__ == '__main__':
  np.savez(
    sys.argv[1],
    devices=jax.device_count(),
    **outcome(schema.Mesh(2, 2, 2)),
    **_wide_completions((1, 1, 8)),
  )
