"""Loss cores against PyTorch: values and gradients of the formulas.

The PyTorch side follows the papers' notation, in float32, with loops over
tokens where that is clearer; it shares no code with the code under test.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.losses import ce, preference, rl
from tests.losses import helpers

torch = pytest.importorskip('torch')

pytestmark = pytest.mark.gate

T = 12


def _inputs(seed=0):
  """Returns one row of two sequences, the arguments of the losses."""
  rng = np.random.default_rng(seed)
  new = -rng.exponential(size=T)
  old = np.minimum(new + 0.4 * rng.normal(size=T), -1e-3)
  ref = np.minimum(new + 0.5 * rng.normal(size=T), -1e-3)
  credit = rng.normal(size=T)
  weights = rng.uniform(0.5, 1.5, T) * (rng.random(T) < 0.8)
  segments = np.repeat([1, 2], [7, 5])
  floats = (np.float32(x) for x in (new, old, ref, credit, weights))
  return (*floats, segments.astype(np.int32))


def _ours(loss, new):
  value, grad = jax.jit(jax.value_and_grad(loss))(jnp.asarray(new))
  return float(value), np.asarray(grad)


def _theirs(loss, new):
  x = torch.tensor(new, requires_grad=True)
  value = loss(x)
  value.backward()
  return float(value.detach()), x.grad.numpy()


def _compare(ours, theirs, new):
  value, grad = _ours(ours, new)
  expected, expected_grad = _theirs(theirs, new)
  np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-6)
  assert np.abs(expected_grad).max() > 0


def _dppo(x, old, credit, low=0.2, high=0.2, tau=1e-3, symmetric=None):
  for logp, mu, a in zip(x, old, credit, strict=True):
    moved = (logp.exp() - mu.exp()).detach()
    if symmetric is not None:
      keep = moved.abs() <= symmetric
    else:
      keep = moved <= high if a > 0 else moved >= -low
    yield tau * (logp - mu) ** 2 - keep * a * (logp - mu).exp()


def _clip(x, old, credit, low=0.2, high=0.28):
  for logp, mu, a in zip(x, old, credit, strict=True):
    rho = (logp - mu).exp()
    yield -torch.minimum(rho * a, rho.clamp(1 - low, 1 + high) * a)


def _cispo(x, old, credit, low=1.0, high=4.0):
  for logp, mu, a in zip(x, old, credit, strict=True):
    rho = (logp - mu).exp().detach()
    yield -rho.clamp(1 - low, 1 + high) * a * logp


def _dro(x, old, credit, beta=0.05):
  for logp, mu, a in zip(x, old, credit, strict=True):
    yield 0.5 * beta * (logp - mu) ** 2 - a * logp


RL = {
  'dppo': _dppo,
  'ipo': functools.partial(_dppo, symmetric=0.1),
  'clip': _clip,
  'cispo': _cispo,
  'dro': _dro,
}


@pytest.mark.parametrize('name', RL)
@pytest.mark.parametrize('seed', [0, 1])
def test_rl_equals_torch(name, seed):
  new, old, _, credit, weights, segments = _inputs(seed)

  def ours(x):
    terms, _ = rl.loss(
      x,
      old,
      credit,
      weights,
      segments,
      jnp.zeros(T),
      helpers.options(type=name),
    )
    return terms.sum()

  def theirs(x):
    terms = RL[name](x, torch.tensor(old), torch.tensor(credit))
    return sum(w * t for w, t in zip(torch.tensor(weights), terms, strict=True))

  _compare(ours, theirs, new)


@pytest.mark.parametrize(
  ('low', 'high'), [(0.5, 0.5), (0.05, 0.5), (0.5, 0.05)]
)
def test_gspo_equals_torch(low, high):
  """A ratio per sequence, from the mean over members; mean over sequences."""
  new, old, _, _, weights, segments = _inputs()
  member = weights != 0
  credit = np.where(segments == 1, 0.7, -1.3).astype(np.float32)

  def ours(x):
    terms, _ = rl.loss(
      x,
      old,
      credit,
      np.float32(member),
      segments,
      jnp.zeros(T),
      helpers.options(type='gspo', aggregation='sequence', low=low, high=high),
    )
    return terms.sum() / 2

  def theirs(x):
    total = 0
    for s, a in ((1, 0.7), (2, -1.3)):
      here = torch.tensor((segments == s) & member)
      rho = (x - torch.tensor(old))[here].mean().exp()
      total = total - torch.minimum(rho * a, rho.clamp(1 - low, 1 + high) * a)
    return total / 2

  _compare(ours, theirs, new)


def test_ce_equals_torch():
  new, *_, weights, _ = _inputs()
  _compare(
    lambda x: ce.loss(x, weights)[0].sum(),
    lambda x: -(torch.tensor(weights) * x).sum(),
    new,
  )


@pytest.mark.parametrize('estimator', ['reverse', 'k3'])
def test_ref_kl_equals_torch(estimator):
  new, old, ref, _, weights, _ = _inputs()

  def theirs(x):
    q, mu, total = torch.tensor(ref), torch.tensor(old), 0
    for i in range(T):
      gap, move = q[i] - x[i], x[i] - mu[i]
      if estimator == 'k3':
        term = gap.exp() - gap - 1
      else:
        keep = float((x[i].exp() - mu[i].exp()).detach() >= -0.2)
        term = -keep * gap.detach() * move.exp() + 1e-3 * move**2
      total = total + weights[i] * term
    return total

  _compare(
    lambda x: helpers.ref_kl_loss(x, old, ref, weights, estimator=estimator)[
      0
    ].sum(),
    theirs,
    new,
  )


def _logp_of_two(x, split=7, prompt=2):
  """Returns the logprobs of two answers, each after a prompt of two tokens."""
  return x[prompt:split].sum(), x[split + prompt :].sum()


PAIRS = {
  'sigmoid': (
    functools.partial(helpers.sigmoid, beta=0.3),
    lambda d: -torch.nn.functional.logsigmoid(0.3 * d),
  ),
  'smoothed': (
    functools.partial(helpers.sigmoid, beta=0.3, label_smoothing=0.1),
    lambda d: (
      -0.9 * torch.nn.functional.logsigmoid(0.3 * d)
      - 0.1 * torch.nn.functional.logsigmoid(-0.3 * d)
    ),
  ),
  'ipo': (
    functools.partial(preference.ipo, beta=0.3),
    lambda d: (d - 1 / 0.6) ** 2,
  ),
  'simpo': (
    functools.partial(helpers.simpo, beta=2.0, gamma=0.5),
    lambda d: -torch.nn.functional.logsigmoid(2 * d - 0.5),
  ),
  'ranking': (
    functools.partial(helpers.ranking, margins=0.2),
    lambda d: -torch.log(torch.sigmoid(d - 0.2)),
  ),
}


@pytest.mark.parametrize('name', PAIRS)
def test_pairs_equal_torch(name):
  """Log ratios of whole answers minus the reference's logprobs."""
  new, _, ref, *_ = _inputs()
  mask = np.zeros((2, T), bool)
  mask[0, 2:7] = mask[1, 9:] = True
  ours, theirs = PAIRS[name]

  def log_ratios(x):
    both = jnp.stack([x - ref, x - ref])
    return jnp.sum(jnp.where(mask, both, 0.0), axis=-1)

  _compare(
    lambda x: ours(*log_ratios(x)),
    lambda x: theirs(
      _logp_of_two(x)[0] - _logp_of_two(x)[1] - (ref[2:7].sum() - ref[9:].sum())
    ),
    new,
  )


def test_kto_equals_torch():
  new, *_ = _inputs()
  desirable = np.arange(T) % 3 == 0
  options = {'beta': 0.4, 'desirable_weight': 1.5, 'undesirable_weight': 0.5}

  def theirs(h):
    total = 0
    for value, good in zip(h, desirable, strict=True):
      gain = 0.4 * (value - 0.25)
      v = torch.sigmoid(gain if good else -gain)
      total = total + (1.5 if good else 0.5) * (1 - v)
    return total

  _compare(
    lambda h: helpers.kto(h, desirable, 0.25, **options).sum(), theirs, new
  )


def test_ranking_equals_torch():
  new, *_ = _inputs()

  def theirs(r):
    a, b = r[:6], r[6:]
    return (-torch.log(torch.sigmoid(a - b)) + 0.1 * (a + b) ** 2).sum()

  _compare(
    lambda r: helpers.ranking(r[:6], r[6:], center_coef=0.1).sum(), theirs, new
  )
