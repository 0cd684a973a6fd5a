"""Components do not dilute each other: gradients add, whoever is beside."""

import dataclasses

import jax
import numpy as np
import pytest

from posttrain import algorithms, schema
from posttrain.algorithms import streams
from posttrain.data import packing
from posttrain.models import transformer
from posttrain.training import objectives
from posttrain.training import step as train_step
from tests import fixtures
from tests.algorithms import two_turns

OTHERS = {
  'sft': schema.Sft(),
  'opd': schema.Opd(reference='stage:sft'),
  'opsd': schema.Opsd(),
}


def made(cfg, offset=0):
  """Samples of a group by an algorithm; `offset` makes their tokens others."""
  samples = streams.finalize(
    algorithms.make(cfg), [two_turns.group(1.0, 0.0, 0.5)], two_turns.Scorer()
  )
  return [
    dataclasses.replace(s, ids=s.ids + np.int32(offset + 10 * i))
    for i, s in enumerate(samples)
  ]


@pytest.fixture(scope='module')
def gradient():
  """samples -> gradient of the tiny model on a batch of them."""
  objective = objectives.TokenComponents(fixtures.MODEL, ('e',))
  params = transformer.init(jax.random.key(0), fixtures.MODEL)
  run = jax.jit(lambda batch: train_step.accumulate(objective, params, batch))

  def of(samples):
    batch, left = packing.pack(
      samples, row_tokens=32, rows=1, micro_batches=4, envs=('e',)
    )
    assert not left
    grads, _, loss = jax.device_get(run(batch))
    return grads, loss

  return of


def assert_adds(whole, *parts):
  total = jax.tree.map(lambda *x: sum(x), *(grads for grads, _ in parts))
  assert fixtures.worst(whole[0], total) < 2e-6
  np.testing.assert_allclose(
    whole[1], sum(loss for _, loss in parts), rtol=1e-6
  )


@pytest.mark.parametrize('other', OTHERS)
def test_another_environment_leaves_the_rl_gradient_alone(other, gradient):
  ours, theirs = made(schema.Grpo()), made(OTHERS[other], offset=100)
  assert_adds(gradient(ours + theirs), gradient(ours), gradient(theirs))
  assert_adds(gradient(theirs + ours), gradient(ours), gradient(theirs))


def test_observations_leave_the_rl_gradient_alone(gradient):
  """Echo is grpo, and the cross-entropy of what is observed."""
  echo = made(schema.Echo())
  observed = [
    dataclasses.replace(s, rl_weights=np.zeros_like(s.rl_weights)) for s in echo
  ]
  assert_adds(gradient(echo), gradient(made(schema.Grpo())), gradient(observed))


def test_components_that_share_a_token_add(gradient):
  """All three on the same tokens, as no algorithm of ours would have it."""
  grpo = made(schema.Grpo())
  parts = []
  for field, weight in (
    ('rl_weights', 1.0),
    ('ce_weights', 0.5),
    ('ref_kl_weights', 0.25),
  ):
    weights = dict.fromkeys(
      ('rl_weights', 'ce_weights', 'ref_kl_weights'), np.zeros(9, np.float32)
    )
    weights[field] = np.float32(weight * two_turns.MASK)
    parts.append(weights)
  both = {field: sum(part[field] for part in parts) for field in parts[0]}
  found = [
    gradient(
      [
        dataclasses.replace(
          s, ref_logprobs=np.full(9, -0.5, np.float32), **weights
        )
        for s in grpo
      ]
    )
    for weights in (both, *parts)
  ]
  assert_adds(*found)


def test_denominators_count_members_of_the_component_alone(gradient):
  """Twice the environment gives the gradient of one, beside any other."""
  ours, theirs = made(schema.Grpo()), made(schema.Sft(), offset=100)
  assert_adds(gradient(ours + ours + theirs), gradient(ours), gradient(theirs))
