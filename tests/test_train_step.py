"""The train step: the cut does not matter, bad gradients do no harm."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import objectives, schema, train_step, tree
from posttrain.losses import combine
from tests import fixtures


def _grads(batch, objective=None):
  objective = objective or objectives.TokenComponents(
      fixtures.MODEL, ('arithmetic',)
  )
  _, state = fixtures.make()
  return jax.jit(
      lambda params, b: train_step.accumulate(objective, params, b)
  )(state.params, batch)


def test_micro_batches_add_up_to_the_whole():
  """1 against 4 micro-batches: same loss, gradients and metrics."""
  (whole,) = fixtures.batches(1, micro_batch_tokens=512)
  (cut,) = fixtures.batches(1, micro_batch_tokens=128)
  assert whole.live == 1 and cut.live == 4
  grads, metrics, loss = _grads(whole)
  grads_cut, metrics_cut, loss_cut = _grads(cut)
  np.testing.assert_allclose(loss, loss_cut, rtol=1e-6)
  assert fixtures.worst(grads, grads_cut) < 1e-5
  means, means_cut = combine.means(metrics), combine.means(metrics_cut)
  for name, value in means.items():
    np.testing.assert_allclose(value, means_cut[name], rtol=1e-5, atol=1e-7)


def test_packing_does_not_matter():
  (single,) = fixtures.batches(1, row_tokens=64, micro_batch_tokens=512)
  (packed,) = fixtures.batches(1, row_tokens=256, micro_batch_tokens=512)
  grads, _, loss = _grads(single)
  grads_packed, _, loss_packed = _grads(packed)
  np.testing.assert_allclose(loss, loss_packed, rtol=1e-6)
  assert fixtures.worst(grads, grads_packed) < 1e-5


def test_dead_micro_batches_are_not_looked_at():
  (batch,) = fixtures.batches(1, row_tokens=256, micro_batch_tokens=256)
  assert 0 < batch.live < len(batch.ids)
  dirty = dataclasses.replace(batch, ce_weights=batch.ce_weights.copy())
  dirty.ce_weights[batch.live :] = 1e9
  clean, poisoned = _grads(batch), _grads(dirty)
  jax.tree.map(np.testing.assert_array_equal, clean, poisoned)


def test_it_learns_one_batch_and_compiles_once():
  step, state = fixtures.make()
  first, *_ = fixtures.batches(1)
  losses = []
  for _ in range(10):
    state, metrics = step(state, first)
    losses.append(float(metrics['loss/total']))
  assert losses[-1] < 0.5 * losses[0]
  assert np.isclose(losses[0], np.log(fixtures.MODEL.vocab_size), rtol=0.1)
  # Batches with other numbers of live micro-batches do not recompile.
  for prompts in (8, 5, 1):
    batch = _like(first, *fixtures.batches(1, prompts=prompts))
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


def test_a_bad_gradient_changes_nothing_and_is_counted():
  objective = Poisoned(fixtures.MODEL, ('arithmetic',))
  step, state = fixtures.make(objective=objective, average=0.5)
  good, second = fixtures.batches(2)
  bad = dataclasses.replace(second, versions=np.full_like(second.versions, 99))
  state, _ = step(state, good)
  before = jax.device_get(state)
  for row in (1, 2):
    state, metrics = step(state, bad)
    assert metrics['optim/skipped_in_row'] == row
    assert not np.isfinite(metrics['optim/grad_norm'])
  for name in ('params', 'opt_state', 'average'):
    jax.tree.map(
        np.testing.assert_array_equal,
        getattr(before, name), jax.device_get(getattr(state, name)),
    )  # fmt: skip
  state, metrics = step(state, good)
  assert metrics['optim/skipped_in_row'] == 0 and metrics['optim/skipped'] == 2
  assert int(state.step) == 4  # `step` counts batches, skipped ones too
  assert fixtures.worst(before.params, state.params) > 0


def test_the_average_follows_the_weights():
  step, state = fixtures.make(average=0.75)
  old = jax.device_get(state.average)
  state, _ = step(state, *fixtures.batches(1))
  jax.tree.map(
      lambda a, p, now: np.testing.assert_allclose(
          now, 0.75 * a + 0.25 * p, rtol=1e-5, atol=1e-7
      ),
      old, jax.device_get(state.params), jax.device_get(state.average),
  )  # fmt: skip


MANY = """
import sys
import jax, numpy as np
from posttrain import objectives, schema, train_step, tree
from tests import fixtures
objective = objectives.TokenComponents(fixtures.MODEL, ('arithmetic',))
batches = fixtures.batches(2, micro_batch_tokens=256)
for name, mesh in (('a', (1, 2, 2)), ('b', (2, 2, 1))):
  step, state = fixtures.make(mesh=schema.Mesh(*mesh))
  kernel = state.params['layers']['mlp']['up']['kernel']
  assert len(kernel.sharding.device_set) == 4
  shard = kernel.addressable_shards[0].data.shape
  assert shard == (1, 32 // mesh[1], 64 // mesh[2]), shard
  grads, _, loss = jax.block_until_ready(jax.jit(
      lambda p, b: train_step.accumulate(objective, p, b)
  )(state.params, step.place(batches[0])))
  losses = [float(loss)]
  for batch in batches:
    state, metrics = step(state, batch)
    losses.append(float(metrics['loss/total']))
  assert step.compiles == 1
  np.savez(sys.argv[1] + name, losses=losses, **{
      k.replace('/', '.'): v for k, v in tree.flat(grads).items()})
"""


def test_one_device_equals_four(tmp_path):
  """fsdp x tensor, and data x fsdp, against a single device."""
  flags = '--xla_force_host_platform_device_count=4'
  # Told of more threads, the collectives of 4 devices do not deadlock.
  env = {**os.environ, 'XLA_FLAGS': flags, 'NPROC': '16'}
  done = subprocess.run(
      [sys.executable, '-c', MANY, str(tmp_path / 'mesh_')], env=env,
      capture_output=True, text=True, timeout=300,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-2000:]
  batches = fixtures.batches(2, micro_batch_tokens=256)
  grads, _, loss = _grads(batches[0])
  step, state = fixtures.make()
  losses = [float(loss)]
  for batch in batches:
    state, metrics = step(state, batch)
    losses.append(float(metrics['loss/total']))
  for name in 'ab':
    saved = dict(np.load(tmp_path / f'mesh_{name}.npz'))
    np.testing.assert_allclose(losses, saved.pop('losses'), rtol=1e-5)
    mine = {k.replace('/', '.'): v for k, v in tree.flat(grads).items()}
    assert mine.keys() == saved.keys()
    assert fixtures.worst(mine, saved) < 1e-5, name


@pytest.mark.parametrize(
    ('sizes', 'message'),
    [((3, 1, 1), 'must multiply to the 1 devices'), ((2, 1, 1), 'multiply')],
)
def test_a_mesh_that_does_not_fit_is_refused(sizes, message):
  with pytest.raises(ValueError, match=message):
    fixtures.make(mesh=schema.Mesh(*sizes))
