"""Components do not dilute each other: gradients of a mixed batch add up."""

import dataclasses

import jax
import numpy as np
import pytest

from posttrain import algorithms, schema
from posttrain.algorithms import streams
from posttrain.data import packing
from posttrain.training import objectives
from posttrain.training import step as train_step
from tests import fixtures
from tests.algorithms import two_turns

OTHERS = {
  'sft': schema.Sft(),
  'opd': schema.Opd(reference='stage:sft'),
  'opsd': schema.Opsd(),
}


def make_samples(cfg, offset=0):
  """Returns an algorithm's samples of a group; `offset` shifts the ids."""
  samples = two_turns.finalize(
    algorithms.make(cfg), [two_turns.group(1.0, 0.0, 0.5)], two_turns.Scorer()
  )
  return [
    dataclasses.replace(s, ids=s.ids + np.int32(offset + 10 * i))
    for i, s in enumerate(samples)
  ]


@pytest.fixture(scope='module')
def gradient():
  """Returns a function: samples -> gradient of the tiny model."""
  objective = objectives.TokenComponents(fixtures.MODEL, ('e',))
  params = fixtures.params()
  run = jax.jit(lambda batch: train_step.accumulate(objective, params, batch))

  def gradient_of(samples):
    batch, left = packing.pack(
      samples,
      packing.Layout(rows=1, longest=32, envs=('e',)),
      micro_batches=4,
      row_tokens=32,
    )
    assert not left
    grads, _, loss = jax.device_get(run(batch))
    return grads, loss

  return gradient_of


def assert_adds(whole, *parts):
  total = jax.tree.map(lambda *x: sum(x), *(grads for grads, _ in parts))
  assert fixtures.worst(whole[0], total) < 2e-6
  np.testing.assert_allclose(
    whole[1], sum(loss for _, loss in parts), rtol=1e-6
  )


@pytest.mark.parametrize('other', OTHERS)
def test_another_environment_does_not_change_the_rl_gradient(other, gradient):
  ours, theirs = (
    make_samples(schema.Grpo()),
    make_samples(OTHERS[other], offset=100),
  )
  assert_adds(gradient(ours + theirs), gradient(ours), gradient(theirs))
  assert_adds(gradient(theirs + ours), gradient(ours), gradient(theirs))


def test_observations_do_not_change_the_rl_gradient(gradient):
  """Echo is grpo plus cross-entropy on observations."""
  echo = make_samples(schema.Echo())
  observed = [
    dataclasses.replace(s, rl_weights=np.zeros_like(s.rl_weights)) for s in echo
  ]
  assert_adds(
    gradient(echo), gradient(make_samples(schema.Grpo())), gradient(observed)
  )


def test_components_on_the_same_tokens_add_up(gradient):
  """All three on the same tokens, which no algorithm does."""
  grpo = make_samples(schema.Grpo())
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
  gradients = [
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
  assert_adds(*gradients)


def test_opd_does_not_dilute_a_leash(gradient):
  """Both are the ref_kl component; each has a mean of its own."""
  leash = [
    dataclasses.replace(s, rl_weights=np.zeros_like(s.rl_weights))
    for s in make_samples(schema.Grpo(kl_beta=0.5))
  ]
  opd = make_samples(schema.Opd(reference='stage:sft'), offset=100)
  opd = opd[:2]  # so that the counts differ
  apart = streams.apart({'a': leash, 'b': opd}, {'b'})
  assert_adds(gradient(apart['a'] + apart['b']), gradient(leash), gradient(opd))
  for alone in {'a': leash}, {'b': opd}, {'a': leash, 'b': []}:
    assert streams.apart(alone, {'b'}) is alone


def test_denominators_count_only_members_of_the_component(gradient):
  """An environment twice has the gradient of once, with another beside it."""
  ours, theirs = (
    make_samples(schema.Grpo()),
    make_samples(schema.Sft(), offset=100),
  )
  assert_adds(gradient(ours + ours + theirs), gradient(ours), gradient(theirs))


@pytest.mark.parametrize('other', OTHERS)
def test_a_weight_scales_the_gradient(other, gradient):
  quarter = dataclasses.replace(OTHERS[other], weight=0.25)
  assert_adds(
    gradient(make_samples(OTHERS[other])),
    *4 * [gradient(make_samples(quarter))],
  )
