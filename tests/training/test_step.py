"""The train step: the cut does not matter, bad gradients do no harm."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema, tree
from posttrain.losses import combine
from posttrain.training import objectives
from posttrain.training import step as train_step
from tests import fixtures

REFERENCES = ('ema:0.75', 'snapshot:2')
# Whatever looks at whole sequences of a row.
SEQUENCES = schema.Loss(
  rl=schema.Gspo(sampler_is_mode='sequence_truncate', entropy_coef=0.1)
)


@functools.cache
def _program():
  """(gradients of a batch at some parameters, such parameters)."""
  objective = objectives.TokenComponents(fixtures.MODEL, ('arithmetic',))
  _, state = fixtures.make()
  return jax.jit(
    lambda params, b: train_step.accumulate(objective, params, b)
  ), state.params


def _grads(batch):
  program, params = _program()
  return program(params, batch)


def test_micro_batches_add_up_to_the_whole():
  """4 micro-batches of rows of two samples against one of rows of one."""
  (whole,) = fixtures.batches(1, micro_batch_tokens=512)
  (cut,) = fixtures.batches(1, row_tokens=128, micro_batch_tokens=128)
  assert whole.num_micro_batches == 1 and cut.num_micro_batches == 4
  grads, metrics, loss = _grads(whole)
  grads_cut, metrics_cut, loss_cut = _grads(cut)
  np.testing.assert_allclose(loss, loss_cut, rtol=1e-6)
  assert fixtures.worst(grads, grads_cut) < 1e-5
  means, means_cut = combine.means(metrics), combine.means(metrics_cut)
  for name, value in means.items():
    np.testing.assert_allclose(value, means_cut[name], rtol=1e-5, atol=1e-7)


def test_a_micro_batch_is_traced_once():
  (batch,), traced = fixtures.batches(1), []

  def objective(params, micro):
    traced.append(micro.ids.shape)
    return jnp.sum(params * jnp.sum(micro.ids)), {}

  jax.eval_shape(
    lambda params, batch: train_step.accumulate(objective, params, batch),
    jax.ShapeDtypeStruct((), jnp.float32),
    batch,
  )
  assert traced == [batch.ids.shape[1:]]


def test_dead_micro_batches_are_not_looked_at():
  (batch,) = fixtures.batches(1, row_tokens=128, micro_batch_tokens=128)
  assert 0 < batch.num_micro_batches < len(batch.ids)
  dirty = dataclasses.replace(batch, ce_weights=batch.ce_weights.copy())
  dirty.ce_weights[batch.num_micro_batches :] = 1e9
  clean, poisoned = _grads(batch), _grads(dirty)
  jax.tree.map(np.testing.assert_array_equal, clean, poisoned)


def test_it_learns_one_batch_and_compiles_once():
  step, state = _shared()
  (first,), losses = _batches(1), []
  for _ in range(10):
    state, metrics = step(state, first)
    losses.append(float(metrics['loss/total']))
  assert losses[-1] < 0.5 * losses[0]
  assert np.isclose(losses[0], np.log(fixtures.MODEL.vocab_size), rtol=0.1)
  # Batches with other numbers of live micro-batches do not recompile.
  for prompts in (8, 5, 1):
    batch = _like(first, *_batches(1, prompts=prompts))
    state, _ = step(state, batch)
  assert step.compiles == 1
  assert int(state.step) == 13


def _like(big, small):
  """`small` with as many (dead) micro-batches as `big`."""
  short = len(big.ids) - len(small.ids)
  pad = ((0, short), (0, 0), (0, 0))
  return jax.tree.map(lambda x: np.pad(x, pad) if x.ndim else x, small)


class Poisoned(objectives.TokenComponents):
  """NaN where the batch says so, through an id that never occurs."""

  def __call__(self, params, micro):
    loss, metrics = super().__call__(params, micro)
    bad = (micro.versions == 99).any()
    return loss * jnp.where(bad, jnp.nan, 1.0), metrics


def _batches(count, **options):
  return fixtures.batches(count, micro_batch_tokens=256, **options)


def _bad(batch):
  return dataclasses.replace(batch, versions=np.full_like(batch.versions, 99))


@functools.cache
def _made(updates):
  objective = Poisoned(fixtures.MODEL, ('arithmetic',))
  step, state = fixtures.make(
    objective=objective,
    average=0.75,
    updates=updates,
    ema_and_snapshots=REFERENCES,
  )
  places = jax.tree.map(lambda x: x.sharding, state)
  return step, jax.device_get(state), places


def _shared(updates=1):
  """(step, fresh state), compiled once for all tests that use it."""
  step, state, places = _made(updates)
  return step, jax.device_put(state, places)


def test_a_bad_gradient_changes_nothing_and_is_counted():
  step, state = _shared()
  good, second = _batches(2)
  bad = _bad(second)
  state, _ = step(state, good)
  before = jax.device_get(state)
  for row in (1, 2):
    state, metrics = step(state, bad)
    assert metrics['optim/skipped_in_row'] == row
    assert not np.isfinite(metrics['optim/grad_norm'])
  for name in ('params', 'opt_state', 'average'):
    jax.tree.map(
      np.testing.assert_array_equal,
      getattr(before, name),
      jax.device_get(getattr(state, name)),
    )
  state, metrics = step(state, good)
  assert metrics['optim/skipped_in_row'] == 0 and metrics['optim/skipped'] == 2
  assert int(state.step) == 4  # `step` counts batches, skipped ones too
  assert fixtures.worst(before.params, state.params) > 0


def test_two_updates_are_two_calls():
  """The same program twice; `step` counts the batch, optax the updates."""
  batch = fixtures.sampled(*_batches(1))
  once, state = _shared(updates=1)
  measured = []
  for _ in range(2):
    state, metrics = once(state, batch)
    measured.append(jax.device_get(metrics))
  twice, both = _shared(updates=2)
  both, metrics = twice(both, batch)
  assert int(both.step) == 1 and int(state.step) == 2
  for name in ('params', 'opt_state', 'average'):
    assert fixtures.worst(getattr(state, name), getattr(both, name)) < 2e-6
  assert metrics.keys() == measured[0].keys()
  first, last = measured
  assert first['mismatch/max'] != last['mismatch/max'] > 0
  for name, value in metrics.items():
    mean = (first[name] + last[name]) / 2
    if name.startswith('mismatch/'):
      mean = first[name]
    np.testing.assert_allclose(value, mean, rtol=1e-4, err_msg=name)


def test_metrics_of_several_passes():
  values = jnp.array([1.0, 2.0, 6.0])
  names = (
    'mismatch/max',
    'optim/lr',
    'optim/skipped',
    'optim/grad_norm',
    'loss/total',
  )
  merged = train_step._over_passes({name: values for name in names})
  assert list(merged.values()) == [1.0, 6.0, 6.0, 3.0, 3.0]


def test_two_updates_count_what_they_skip():
  step, state = _shared(updates=2)
  good, second = _batches(2)
  for batch, skipped, in_row in (
    (good, 0, 0),
    (_bad(second), 2, 2),
    (good, 2, 0),
  ):
    state, metrics = step(state, batch)
    assert metrics['optim/skipped'] == skipped
    assert metrics['optim/skipped_in_row'] == in_row
  assert int(state.step) == 3 and step.compiles == 1


@pytest.mark.parametrize('updates', [1, 2])
def test_a_batch_without_members_moves_nothing(updates):
  """Neither momentum nor weight decay: all rollouts were pruned."""
  step, state = _shared(updates)
  batch, _ = _batches(2)
  state, metrics = step(state, batch)
  assert metrics['optim/empty'] == 0
  state, _ = step(state, _bad(batch))
  before = jax.device_get(state)
  none = np.zeros_like(batch.ce_weights)
  empty = dataclasses.replace(batch, ce_weights=none, ce_count=np.float32(0))
  for count in (
    batch.num_micro_batches,
    np.zeros_like(batch.num_micro_batches),
  ):
    state, metrics = step(
      state, dataclasses.replace(empty, num_micro_batches=count)
    )
    assert metrics['optim/empty'] == 1 and metrics['loss/total'] == 0
  # Nor does it end a row of bad gradients.
  for name in ('params', 'opt_state', 'average', 'skipped', 'skipped_in_row'):
    jax.tree.map(
      np.testing.assert_array_equal,
      getattr(before, name),
      jax.device_get(getattr(state, name)),
    )
  assert metrics['optim/skipped_in_row'] == updates
  assert int(state.step) == 4 and step.compiles == 1


def test_the_average_follows_the_weights():
  step, state = _shared()
  old = jax.device_get(state.average)
  state, _ = step(state, *_batches(1))
  jax.tree.map(
    lambda a, p, now: np.testing.assert_allclose(
      now, 0.75 * a + 0.25 * p, rtol=1e-5, atol=1e-7
    ),
    old,
    jax.device_get(state.params),
    jax.device_get(state.average),
  )


CUTS = (  # mesh (data, fsdp, tensor), updates, loss, reduce
  ((1, 2, 2), 1, SEQUENCES),
  ((2, 2, 1), 1, SEQUENCES, 'update'),
  ((1, 2, 2), 1, None),
  ((2, 2, 1), 2, None),
)


@functools.cache
def _outcome(mesh, updates, loss, reduce='micro_batch'):
  """What two steps measure, and leave, on a mesh."""
  objective = objectives.TokenComponents(fixtures.MODEL, ('arithmetic',), loss)
  step, state = fixtures.make(
    mesh=schema.Mesh(*mesh),
    objective=objective,
    # A large eps: Adam's division by small gradients magnifies rounding.
    cfg=dataclasses.replace(fixtures.OPTIM, eps=1e-3),
    updates=updates,
    reduce=reduce,
  )
  kernel = state.params['layers']['mlp']['up']['kernel']
  shard = kernel.addressable_shards[0].data.shape
  assert shard == (1, 32 // mesh[1], 64 // mesh[2]), shard
  batches = [fixtures.sampled(batch) for batch in _batches(2)]
  names, numbers = ('loss/total', 'mismatch/max', 'optim/grad_norm'), []
  for batch in batches:
    state, metrics = step(state, batch)
    numbers += [float(metrics[name]) for name in names]
  assert step.compiles == 1
  return {'numbers': np.array(numbers)} | {
    name: np.asarray(x) for name, x in tree.flat(state.params).items()
  }


@pytest.mark.parametrize(
  'cuts', [(0, 1), pytest.param((2, 3), marks=pytest.mark.slow)]
)
def test_one_device_equals_four(cuts, tmp_path):
  """fsdp x tensor, and data x fsdp, against one device."""
  module = 'tests.training.test_step'
  fixtures.run_on_devices(4, '-m', module, str(tmp_path), *map(str, cuts))
  for cut in cuts:
    four = dict(np.load(tmp_path / f'{cut}.npz'))
    one = {**_outcome((1, 1, 1), *CUTS[cut][1:3])}  # however it reduces
    numbers = four.pop('numbers')
    np.testing.assert_allclose(numbers, one.pop('numbers'), rtol=1e-5)
    assert len(one) > 5 and four.keys() == one.keys()
    assert fixtures.worst(one, four) < 1e-5


@pytest.mark.parametrize(
  ('sizes', 'message'),
  [((3, 1, 1), 'must multiply to the 1 devices'), ((2, 1, 1), 'multiply')],
)
def test_a_mesh_that_does_not_fit_is_refused(sizes, message):
  with pytest.raises(ValueError, match=message):
    fixtures.make(mesh=schema.Mesh(*sizes))


@pytest.mark.parametrize('updates', [1, 2])
def test_references_follow_the_policy(updates):
  """By the step and not by the update; a snapshot is the policy to the bit."""
  step, state = _shared(updates)
  start = ema = jax.device_get(state.params)
  snapshot = start
  for i, batch in enumerate(_batches(3), 1):
    state, _ = step(state, batch)
    params = jax.device_get(state.params)
    ema = jax.tree.map(lambda r, p: 0.75 * r + 0.25 * p, ema, params)
    snapshot = params if i == 2 else snapshot
    late = jax.device_get(state.ema_and_snapshots)
    jax.tree.map(np.testing.assert_array_equal, late['snapshot:2'], snapshot)
    assert fixtures.worst(late['ema:0.75'], ema) < 1e-6
  assert fixtures.worst(start, params) > 1e-3
  assert step.compiles == 1


if __name__ == '__main__':
  assert jax.device_count() == 4
  for number in sys.argv[2:]:
    np.savez(f'{sys.argv[1]}/{number}', **_outcome(*CUTS[int(number)]))
