"""posttrain.models.experts: routing, sorting and adding up."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.test_util import check_grads

from posttrain import schema
from posttrain.models import experts, lora, transformer
from tests import fixtures


def draw(seed, tokens=7, count=5, width=6, hidden=4):
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  params = {
    'gate': {'kernel': normal(count, width, hidden)},
    'up': {'kernel': normal(count, width, hidden)},
    'down': {'kernel': normal(count, hidden, width)},
  }
  return params, normal(tokens, width), normal(tokens, count)


def loop(params, x, index, weights):
  """The definition, one choice at a time, in float64."""
  params = jax.tree.map(lambda w: np.asarray(w, float), params)
  out = np.zeros(x.shape)

  def times(row, name, e):
    return row @ params[name]['kernel'][e]

  for n, row in enumerate(np.asarray(x, float)):
    for e, weight in zip(
      np.asarray(index[n]), np.asarray(weights[n]), strict=True
    ):
      if not 0 <= e < len(params['gate']['kernel']):
        continue
      gate, up = times(row, 'gate', e), times(row, 'up', e)
      hidden = gate / (1 + np.exp(-gate)) * up
      out[n] += weight * times(hidden, 'down', e)
  return out


def route(logits, count, normalize):
  index = jax.lax.top_k(logits, count)[1]
  return experts.weigh(logits, index, normalize), index


def test_weigh():
  logits = jnp.log(jnp.array([[0.1, 0.4, 0.3, 0.2]]))
  index = jnp.array([[1, 0]])
  weights = experts.weigh(logits, index, False)
  np.testing.assert_allclose(weights, [[0.4, 0.1]], rtol=1e-5)
  weights = experts.weigh(logits, index, True)
  np.testing.assert_allclose(weights, [[0.8, 0.2]], rtol=1e-5)


def test_flips():
  index = jnp.array([[0, 2], [1, 2], [3, 0], [0, 1]])
  routes = jnp.array([[2, 0], [1, 3], [-1, -1], [-1, -1]])
  stats = experts.flips(index, routes)
  assert stats == {'recorded': 2, 'flipped': 1}


def test_apply():
  params, x, logits = draw(0)
  weights, index = route(logits, 2, True)
  index = index.at[2].set(5).at[4, 1].set(-1)  # a pad, another device's
  out = jax.jit(experts.apply)(params, x, index, weights)
  want = loop(params, x, index, weights)
  np.testing.assert_allclose(out, want, atol=2e-5)
  assert not out[2].any()

  def loss(params, x, weights):
    return experts.apply(params, x, index, weights)

  check_grads(
    loss, (params, x, weights), 1, ('rev',), atol=3e-2, rtol=3e-2, eps=1e-3
  )
  # What a pad holds reaches no gradient.
  grads = jax.jit(jax.grad(lambda *args: jnp.sum(loss(*args) ** 2)))
  other = grads(params, x.at[2].set(99.0), weights)
  jax.tree.map(np.testing.assert_array_equal, grads(params, x, weights), other)


def test_one_token():
  """As in decoding, where most experts have no row."""
  params, x, logits = draw(0, tokens=1, count=9)
  weights, index = route(logits, 3, False)
  out = jax.jit(experts.apply)(params, x, index, weights)
  np.testing.assert_allclose(out, loop(params, x, index, weights), atol=2e-5)


def test_adapted_experts_are_merged_ones():
  params, x, logits = draw(1)
  weights, index = route(logits, 2, True)
  rng = np.random.default_rng(2)

  def adapt(w):
    a = rng.normal(size=(*w.shape[:2], 2)).astype(np.float32)
    b = rng.normal(size=(len(w), 2, w.shape[2])).astype(np.float32)
    return lora.Adapted(w, jnp.asarray(a), jnp.asarray(b), 0.5)

  adapted = jax.tree.map(adapt, params)
  out = experts.apply(adapted, x, index, weights)
  want = experts.apply(lora.merge(adapted), x, index, weights)
  np.testing.assert_allclose(out, want, rtol=1e-3, atol=1e-3)


def test_statistics():
  logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1, 1, 1]]))
  stats = experts.statistics(logits, jnp.array([[0], [1], [3]]))
  np.testing.assert_array_equal(stats['load'], [1, 1, 0])
  np.testing.assert_allclose(stats['probs'], [0.6, 1.05, 0.35], rtol=1e-5)
  entropy = 1.5 * np.log(2) - 0.8 * np.log(0.8) - 0.2 * np.log(0.1)
  np.testing.assert_allclose(stats['entropy'], entropy, rtol=1e-5)
  # 3 (0.5 x 0.3 + 0.5 x 0.525)
  np.testing.assert_allclose(experts.balance(stats), 1.2375, rtol=1e-5)
  none = experts.statistics(logits, jnp.full((3, 1), 3))
  assert experts.balance(none) == 0


def test_balance_is_one_to_the_number_of_experts():
  even = {'load': jnp.ones(4), 'probs': jnp.full(4, 0.5), 'tokens': 2.0}
  assert experts.balance(jax.tree.map(jnp.asarray, even)) == 1
  one = jnp.array([3.0, 0, 0, 0])
  alone = {'load': one, 'probs': one, 'tokens': jnp.asarray(3.0)}
  assert experts.balance(alone) == 4


def test_the_router_of_a_decode_view_is_not_rounded():
  cfg = schema.Model(
    vocab_size=8, layers=1, experts=schema.Experts(count=4), dtype='bfloat16'
  )
  params = fixtures.params(cfg)
  (own,) = params['layers']['experts']['router']['kernel']
  view = transformer.decode_view(params, cfg)['layers'][0]['experts']
  assert view['gate']['kernel'].dtype == 'bfloat16'
  np.testing.assert_array_equal(view['router']['kernel'], own)
