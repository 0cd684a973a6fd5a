"""One table over all algorithms: options, streams, and a train step."""

import dataclasses
import json
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from configs import machinery
from posttrain import algorithms, config, schema
from posttrain.data import packing
from tests import fixtures
from tests.algorithms import two_turns

CREDITS = 'tests.algorithms.credits'
ONE, NONE = two_turns.MASK.astype(float), np.zeros(9)
TOOL = np.array([0, 0, 0, 0, 0, 1, 1, 0, 0])  # content of the tool's message


class Row(NamedTuple):
  """An algorithm, and its streams for a group with rewards 1 and 0."""

  cfg: Any
  credit: tuple | None  # None = no credit is assigned
  rl: np.ndarray = NONE
  ce: np.ndarray = NONE
  ref_kl: np.ndarray = NONE
  prunes: bool = False  # the second rollout leaves the rl component
  reference: Any = None


ROWS = {
  'grpo': Row(schema.Grpo(), (0.5, -0.5), rl=ONE),
  'grpo with kl_beta': Row(
    schema.Grpo(kl_beta=0.1, reference='ema:0.9'),
    (0.5, -0.5),
    rl=ONE,
    ref_kl=0.1 * ONE,
    reference='ema:0.9',
  ),
  'max_rl': Row(schema.MaxRl(), (1, -1), rl=ONE),
  'max_rl of full order': Row(
    schema.MaxRl(baseline=False), (2, 0), rl=ONE, prunes=True
  ),
  'rloo': Row(schema.Rloo(), (1, -1), rl=ONE),
  'reward': Row(schema.Reward(), (1, 0), rl=ONE, prunes=True),
  'ppo': Row(schema.Ppo(), (1, 0), rl=ONE),
  'custom': Row(
    schema.Custom(import_path=f'{CREDITS}:centered', kwargs={'scale': 3}),
    (1.5, -1.5),
    rl=ONE,
  ),
  'a class of the user': Row(
    schema.Custom(import_path=f'{CREDITS}:Hooks', kwargs={'scale': 3}),
    (1.5, -1.5),
    rl=ONE,
    ce=0.1 * TOOL,
  ),
  'a class of the user that distils': Row(
    schema.Custom(import_path=f'{CREDITS}:Distils'),
    None,
    ref_kl=0.5 * ONE,
    reference='init',
  ),
  'echo': Row(schema.Echo(), (0.5, -0.5), rl=ONE, ce=0.1 * TOOL),
  'opd': Row(
    schema.Opd(reference='stage:sft'), None, ref_kl=ONE, reference='stage:sft'
  ),
  'opsd': Row(schema.Opsd(), None, ref_kl=ONE, reference='init'),
  'sft': Row(schema.Sft(), None, ce=ONE),
}
TABLE = pytest.mark.parametrize('row', ROWS.values(), ids=ROWS.keys())


def test_the_table_has_every_algorithm():
  assert {row.cfg.type for row in ROWS.values()} == set(algorithms.TYPES)


def entry(cfg):
  """Returns options of an environment for the algorithm."""
  if cfg.type == 'sft':
    return schema.EnvEntry(algorithm=cfg)
  return schema.EnvEntry(algorithm=cfg, sampler=schema.Policy(), group_size=2)


@TABLE
def test_options_round_trip_through_the_config(row):
  """From a recipe, from JSON, and from the command line."""
  env = entry(row.cfg)
  run = schema.Run(stages={'main': schema.Stage(envs={'a': env})})
  node = machinery.config_dict(run)
  assert config.build(node) == config.build(
    config.from_dict(config.to_dict(config.build(node)))
  )
  assert config.build(node).stages['main'].envs['a'] == env
  plain = machinery.config_dict(
    schema.Run(
      stages={
        'main': schema.Stage(
          envs={'a': dataclasses.replace(env, algorithm=schema.Grpo())}
        )
      }
    )
  )
  config.override(
    plain, 'main.envs.a.algorithm', json.dumps(dataclasses.asdict(row.cfg))
  )
  assert config.build(plain).stages['main'].envs['a'] == env


def _finalize(row, scorer=None):
  return two_turns.finalize(
    algorithms.make(row.cfg),
    [two_turns.group(1.0, 0.0)],
    scorer or two_turns.Scorer(),
  )


@TABLE
def test_truncated_rollouts_train_nothing_with_mask_truncated(row):
  whole, cut = _finalize(row)
  cfg = dataclasses.replace(row.cfg, mask_truncated=True)
  algorithm = algorithms.make(cfg)
  first, last = two_turns.group(1.0, 0.0)
  for reason in ('max_tokens', 'overflow'):
    group = [first, dataclasses.replace(last, stop_reason=reason)]
    assert [*map(algorithm.trains_on, group)] == [True, False]
    kept, masked = two_turns.finalize(algorithm, [group], two_turns.Scorer())
    for component in ('rl', 'ce', 'ref_kl'):
      name = f'{component}_weights'
      np.testing.assert_array_equal(getattr(kept, name), getattr(whole, name))
      assert not getattr(masked, name).any()
    # The baseline of the group is as before.
    for a, b in ((kept, whole), (masked, cut)):
      np.testing.assert_array_equal(a.advantages, b.advantages)


@TABLE
def test_streams_equal_the_table(row):
  scorer = two_turns.Scorer()
  for i, sample in enumerate(_finalize(row, scorer)):
    if row.credit is None:
      assert sample.advantages is None
    else:
      np.testing.assert_allclose(sample.advantages, row.credit[i] * ONE)
    live = NONE if row.prunes and i else row.rl
    np.testing.assert_array_equal(sample.rl_weights, live)
    np.testing.assert_array_equal(sample.ce_weights, np.float32(row.ce))
    np.testing.assert_array_equal(sample.ref_kl_weights, np.float32(row.ref_kl))
    logprob = -0.5 if row.reference else 0.0
    np.testing.assert_array_equal(sample.ref_logprobs, np.full(9, logprob))
  assert [call[0] for call in scorer.calls] == (
    [row.reference] if row.reference else []
  )


@pytest.fixture(scope='module')
def stepper():
  """Returns a function: batch -> (metrics, largest parameter change)."""
  step, state = fixtures.make()

  def run(batch):
    copy = jax.tree.map(lambda x: x.copy(), state)
    new_state, metrics = step(copy, batch)
    change = fixtures.worst(state.params, new_state.params)
    return jax.device_get(metrics), change

  return run


@TABLE
def test_a_step_trains_on_the_streams(row, stepper):
  samples = _finalize(row)
  if row.reference == 'policy':  # as with a hint
    samples = [
      dataclasses.replace(s, ref_logprobs=s.ref_logprobs - 1) for s in samples
    ]
  batch, left = packing.pack(
    [dataclasses.replace(s, env='arithmetic') for s in samples],
    packing.Layout(rows=1, longest=32, envs=('arithmetic',)),
    micro_batches=2,
    row_tokens=32,
  )
  assert not left
  metrics, change = stepper(batch)
  counts = {
    'rl': 4 * row.rl.any() * (1 if row.prunes else 2),
    'ce': 2 * np.count_nonzero(row.ce),
    'ref_kl': 2 * np.count_nonzero(row.ref_kl),
  }
  for component, count in counts.items():
    assert getattr(batch, f'{component}_count') == count
    assert (metrics[f'loss/{component}'] != 0) == (count > 0)
  assert metrics['optim/grad_norm'] > 0 and change > 0
  assert metrics['optim/skipped'] == 0


def test_packing_order_does_not_change_the_loss(stepper):
  """Samples of all algorithms in one batch, forwards and backwards."""
  samples = []
  for row in ROWS.values():
    samples += [
      dataclasses.replace(s, env='arithmetic') for s in _finalize(row)
    ]
  results = []
  for order in (samples, samples[::-1]):
    batch, left = packing.pack(
      order,
      packing.Layout(rows=1, longest=32, envs=('arithmetic',)),
      micro_batches=12,
      row_tokens=32,
    )
    assert not left
    results.append(stepper(batch)[0])
  for key in ('loss/rl', 'loss/ce', 'loss/ref_kl', 'optim/grad_norm'):
    np.testing.assert_allclose(results[0][key], results[1][key], rtol=2e-6)
