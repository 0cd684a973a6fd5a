"""At one update per batch all types of the rl loss make one update.

The policy is the one that sampled, so the ratio is 1 and no bound is reached:
each type is the policy gradient. The squared log ratio of dppo and ipo has no
gradient there; `kl_tau` is 0 so that rounding cannot give it one.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from posttrain import schema, scoring
from posttrain.training import objectives, step
from tests import fixtures

# A program is compiled per type.
pytestmark = [pytest.mark.gate, pytest.mark.slow]

LOSSES = {
  'clip': schema.Clip(),
  'dppo': schema.Dppo(kl_tau=0.0),
  'ipo': schema.Ipo(kl_tau=0.0),
  'cispo': schema.Cispo(),
  'dro': schema.Dro(),
  'gspo': schema.Gspo(aggregation='token'),  # as the others
}
# A large eps: Adam's division by small gradients magnifies rounding.
OPTIM = dataclasses.replace(fixtures.OPTIM, eps=1e-3)


def _make(loss):
  objective = objectives.TokenComponents(
    fixtures.MODEL, ('arithmetic',), schema.Loss(rl=loss)
  )
  return fixtures.make(objective=objective, cfg=OPTIM)


@functools.cache
def _batch():
  """Sampled tokens, with the logprobs of the policy that is updated."""
  _, state = _make(LOSSES['clip'])
  batch = fixtures.sampled(*fixtures.batches(1))
  rows = batch.ids.reshape(-1, batch.ids.shape[-1])
  segments = batch.segment_ids.reshape(rows.shape)
  logprobs = np.zeros(rows.shape, np.float32)
  places, sequences = [], []
  for i, (ids, own) in enumerate(zip(rows, segments, strict=True)):
    for segment in range(1, own.max(initial=0) + 1):
      places.append((i, own == segment))
      sequences.append(ids[own == segment])
  scorer = scoring.Scorer(fixtures.MODEL, 4, rows.shape[-1])
  ones = [np.ones(len(x), np.float32) for x in sequences]
  scored = scorer(state.params, sequences, ones)
  for (i, where), values in zip(places, scored, strict=True):
    logprobs[i, where] = values
  zeros = np.zeros_like(batch.ce_weights)
  return dataclasses.replace(
    batch,
    sampler_logprobs=logprobs.reshape(batch.ids.shape),
    # The rl component alone.
    ce_weights=zeros,
    ref_kl_weights=zeros,
    ce_count=np.float32(0),
    ref_kl_count=np.float32(0),
  )


@functools.cache
def _updated(name):
  """Returns (the parameters before, after, metrics) of one update."""
  step, state = _make(LOSSES[name])
  before = jax.device_get(state.params)
  state, metrics = step(state, _batch())
  return before, *jax.device_get((state.params, metrics))


@pytest.mark.parametrize('name', [x for x in LOSSES if x != 'clip'])
def test_one_update_is_that_of_every_type(name):
  before, expected, _ = _updated('clip')
  _, after, metrics = _updated(name)
  assert metrics['mismatch/max'] < 1e-4
  assert metrics['rl/is_masked'] == 0
  way = fixtures.worst(before, expected)
  assert way > 1e-3
  assert fixtures.worst(expected, after) < 1e-4 * way


def test_bfloat16_gradients_are_those_of_float32_up_to_rounding():
  """Of all components together: rl, ce and ref_kl have members."""
  batch = fixtures.sampled(*fixtures.batches(1))
  found = []
  for dtype in ('float32', 'bfloat16'):
    model = dataclasses.replace(fixtures.MODEL, dtype=dtype)
    objective = objectives.TokenComponents(
      model, ('arithmetic',), schema.Loss(rl=LOSSES['clip'])
    )
    _, state = fixtures.make(objective=objective)
    grads, _, loss = jax.jit(
      lambda params, batch, objective=objective: step.accumulate(
        objective, params, batch
      )
    )(state.params, batch)
    leaves = [np.ravel(x) for x in jax.tree.leaves(grads)]
    found.append((float(loss), np.concatenate(leaves)))
  (loss, exact), (rounded_loss, rounded) = found
  assert rounded_loss == pytest.approx(loss, rel=0.01)
  assert not np.array_equal(exact, rounded)
  sizes = np.linalg.norm(exact), np.linalg.norm(rounded)
  assert exact @ rounded / np.prod(sizes) > 0.999
  assert sizes[1] == pytest.approx(sizes[0], rel=0.02)
