import jax
import jax.numpy as jnp
import numpy as np

from posttrain.losses import ce, combine


def test_total_by_hand():
  parts = {
    'rl': (jnp.float32(6.0), {'clipped': (jnp.float32(1), jnp.float32(2))}),
    'ce': (jnp.float32(2.0), {'nll': (jnp.float32(4), jnp.float32(8))}),
  }
  counts = {'rl': jnp.float32(3), 'ce': jnp.float32(8)}
  loss, metrics = combine.total(parts, counts)
  assert loss == 2.25
  assert combine.means(metrics) == {
    'rl/clipped': 0.5,
    'ce/nll': 0.5,
    'loss/rl': 2.0,
    'loss/ce': 0.25,
    'loss/total': 2.25,
  }


def test_ce_weights_scale_the_loss():
  logprobs, weights = jnp.array([-0.1, -0.5, -0.2]), jnp.array([1.0, 0.0, 1.0])
  parts = {'ce': ce.loss(logprobs, weights)}
  loss, metrics = combine.total(parts, {'ce': jnp.float32(2)})
  np.testing.assert_allclose(loss, 0.15, rtol=1e-6)
  assert set(metrics) == {'ce/nll', 'loss/ce', 'loss/total'}


def test_no_members_give_loss_and_gradient_0():
  def loss(logprobs):
    part = ce.loss(logprobs, jnp.zeros(4))
    return combine.total({'ce': part}, {'ce': jnp.float32(0)})

  (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(-jnp.ones(4))
  assert value == 0.0 and not grad.any()
  assert not any(combine.means(metrics).values())


def test_micro_batched_equals_whole():
  rng = np.random.default_rng(0)
  logprobs = jnp.asarray(-rng.random((3, 7)), jnp.float32)
  weights = jnp.asarray(rng.random((3, 7)) < 0.6, jnp.float32)
  counts = {'ce': jnp.sum(weights != 0).astype(jnp.float32)}
  whole, expected = combine.total({'ce': ce.loss(logprobs, weights)}, counts)
  pieces = [
    combine.total({'ce': ce.loss(logprobs[i], weights[i])}, counts)
    for i in range(3)
  ]
  np.testing.assert_allclose(sum(p[0] for p in pieces), whole, rtol=1e-6)
  added = jax.tree.map(lambda *x: sum(x), *(p[1] for p in pieces))
  ours, expected = combine.means(added), combine.means(expected)
  assert ours.keys() == expected.keys()
  for name in ours:
    np.testing.assert_allclose(ours[name], expected[name], rtol=1e-6)
  np.testing.assert_allclose(ours['loss/ce'], whole, rtol=1e-6)


def test_components_on_the_same_tokens_add_up():
  logprobs = jnp.array([-0.3, -0.7])
  one, half = jnp.ones(2), jnp.array([0.5, 0.0])
  counts = {'rl': jnp.float32(4), 'ce': jnp.float32(8)}
  parts = {'rl': ce.loss(logprobs, one), 'ce': ce.loss(logprobs, half)}
  loss, _ = combine.total(parts, counts)
  np.testing.assert_allclose(loss, 1.0 / 4 + 0.15 / 8, rtol=1e-6)


def test_pair_and_largest_ignore_values_outside_where():
  values = jnp.array([1.0, jnp.nan, 3.0, jnp.inf])
  where = jnp.array([True, False, True, False])
  metrics = {'none': combine.pair(values, 0 * where != 0)}
  assert combine.sums(metrics) == {'none': (0.0, 0.0)}
  metrics = {
    'some': combine.pair(values, where),
    'share': (values[0], 0 * values[0]),
  }
  assert combine.sums(metrics) == {'some': (4.0, 2.0), 'share': (1.0, 0.0)}
  copies = jnp.array([1, 5, 2, 5])
  assert combine.sums(metrics, copies)['some'] == (7.0, 3.0)
  assert combine.sums(metrics, copies)['share'] == (1.0, 0.0)
  assert combine.largest(values, where) == combine.Max(jnp.float32(3))
  assert combine.largest(values, 0 * where != 0).value == 0.0


def test_merge_adds_pairs_and_takes_the_maximum():
  def metrics(total, count, top):
    return {
      'mean': (jnp.float32(total), jnp.float32(count)),
      'top': combine.Max(jnp.float32(top)),
    }

  parts = [metrics(1, 2, 5), metrics(3, 4, 7), metrics(5, 2, 6)]
  merged = metrics(0, 0, 0)  # neutral
  for part in parts:
    merged = combine.merge(merged, part)
  assert combine.means(merged) == {'mean': 9 / 8, 'top': 7.0}
  assert isinstance(merged['top'], combine.Max)
