"""Decoding and a GRPO step on four devices, compared with one device.

python -m tests.decode.test_mesh FILE    # on all devices of the process
"""

import dataclasses
import sys

import jax
import numpy as np
import pytest

from posttrain import schema, sharding, tree, types
from posttrain.decode import engine as engines
from posttrain.decode import requests
from posttrain.training import objectives
from tests import fixtures, toys

STEPS = 2  # the second batch is sampled by the updated weights


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
  engine, references = driver._engine, source._scorer
  arrays = {}
  for i in range(STEPS):
    batch = next(source).batch
    state, metrics = step(state, batch)
    metrics = jax.device_get(metrics)
    engine.set_params(state.params, i)
    references.set_policy({'policy': state.params})
    arrays |= {f'{i}/batch/{k}': v for k, v in vars(batch).items()}
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


def test_four_devices_match_one(tmp_path):
  path = tmp_path / 'four.npz'
  fixtures.run_on_devices(4, '-m', 'tests.decode.test_mesh', str(path))
  four, one = dict(np.load(path)), outcome(schema.Mesh())
  assert four.pop('devices') == 4 and four.keys() == one.keys()
  assert len(set(one['reasons'])) == 2 and one['0/batch/rl_count'] > 0
  for name, value in one.items():
    exact = np.asarray(value).dtype.kind in 'ib' and 'metrics' not in name
    np.testing.assert_allclose(
      four[name],
      value,
      rtol=0 if exact else 1e-5,
      atol=0 if exact else 1e-5,
      err_msg=name,
    )


def test_slots_must_divide_over_the_mesh():
  mesh = jax.sharding.AbstractMesh((2, 2, 1), sharding.AXES)
  with pytest.raises(ValueError, match='slots must be a multiple of .*= 4: go'):
    engines.Engine(fixtures.MODEL, slots=6, mesh=mesh)


if __name__ == '__main__':
  np.savez(
    sys.argv[1],
    devices=jax.device_count(),
    **outcome(schema.Mesh(data=2, fsdp=2)),
  )
