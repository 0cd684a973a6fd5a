"""The sampling distribution against plain numpy in double precision."""

import jax
import numpy as np
import pytest

from posttrain.decode import sampling

# Bounds on rounding are those of the program that runs use.
pytestmark = pytest.mark.usefixtures('optimized')
ROWS, VOCAB = 64, 264
draw = jax.jit(sampling.draw)


def logits(seed=0, rows=ROWS, vocab=VOCAB, spread=3.0):
  rng = np.random.default_rng(seed)
  return spread * rng.standard_normal((rows, vocab), np.float32)


def numbers(seed, count=ROWS):
  return np.random.default_rng(seed).random(count, np.float32)


def options(rows=ROWS, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  return (
    np.full(rows, temperature, np.float32),
    np.full(rows, top_k, np.int32),
    np.full(rows, top_p, np.float32),
    np.full(rows, min_p, np.float32),
  )


def softmax(z, temperature):
  z = np.asarray(z, np.float64) / temperature
  p = np.exp(z - z.max(-1, keepdims=True))
  return p / p.sum(-1, keepdims=True)


def truncated(p, top_k, top_p, min_p):
  """Returns one row's distribution after the three rules, by sorting."""
  keep = np.ones(len(p), bool)
  if top_k:
    keep &= p >= np.sort(p)[-min(top_k, len(p))]
  if top_p < 1:
    q = np.where(keep, p, 0)
    order = np.argsort(-q, kind='stable')
    mass = np.cumsum(q[order])
    last = np.argmax(mass >= top_p * mass[-1] * (1 - 1e-9))
    keep &= q >= q[order[last]]
  keep &= p >= min_p * p.max()
  q = np.where(keep, p, 0)
  return q / q.sum()


def invert(p, u):
  return int(np.searchsorted(np.cumsum(p), u, side='right'))


@pytest.mark.parametrize('temperature', [0.3, 1.0, 2.5])
@pytest.mark.parametrize('vocab', [2, 264, 5000])
def test_token_is_the_inverse_cdf_of_the_number(temperature, vocab):
  z = logits(vocab=vocab)
  u = numbers(1)
  tokens, logprobs = draw(z, u, *options(temperature=temperature))
  p = softmax(z, temperature)
  for row in range(ROWS):
    cdf = np.cumsum(p[row])
    if np.abs(cdf - u[row]).min() > 1e-6:  # not on an edge, to rounding
      assert tokens[row] == invert(p[row], u[row])
  chosen = p[np.arange(ROWS), np.asarray(tokens)]
  np.testing.assert_allclose(logprobs, np.log(chosen), atol=2e-6)


def test_temperature_zero_takes_the_first_argmax():
  z = np.array(logits())
  z[3, [7, 200]] = 50.0
  tokens, logprobs = draw(z, np.full(ROWS, 0.9), *options(temperature=0.0))
  np.testing.assert_array_equal(tokens, np.argmax(z, -1))
  p = softmax(z, 1.0)
  chosen = p[np.arange(ROWS), np.asarray(tokens)]
  np.testing.assert_allclose(logprobs, np.log(chosen), atol=2e-6)


@pytest.mark.parametrize(
  'rules',
  [
    {'top_k': 1},
    {'top_k': 5},
    {'top_k': 10_000},
    {'top_p': 0.1},
    {'top_p': 0.9},
    {'top_p': 0.9999},
    {'min_p': 0.2},
    {'min_p': 0.999},
    {'top_k': 20, 'top_p': 0.8, 'min_p': 0.05},
  ],
)
def test_truncation_matches_sorting(rules):
  z, temperature = logits(2), 1.3
  u = numbers(3)
  tokens, logprobs = draw(z, u, *options(temperature=temperature, **rules))
  p = softmax(z, temperature)
  rules = {'top_k': 0, 'top_p': 1.0, 'min_p': 0.0, **rules}
  for row in range(ROWS):
    q = truncated(p[row], **rules)
    if np.abs(np.cumsum(q) - u[row]).min() > 1e-6:
      assert tokens[row] == invert(q, u[row])
  # Logprobs are those before truncation.
  chosen = p[np.arange(ROWS), np.asarray(tokens)]
  np.testing.assert_allclose(logprobs, np.log(chosen), atol=2e-6)


def test_tokens_tied_with_a_threshold_are_kept():
  z = np.full((ROWS, VOCAB), -1e4, np.float32)
  z[:, [3, 50, 51, 200]] = np.log([0.4, 0.2, 0.2, 0.2])
  u = np.linspace(0, 0.999, ROWS)
  for rules, kept in (
    ({'top_k': 2}, {3, 50, 51, 200}),
    ({'top_p': 0.5}, {3, 50, 51, 200}),
    ({'min_p': 0.5}, {3, 50, 51, 200}),
    ({'top_k': 1}, {3}),
  ):
    assert set(np.asarray(draw(z, u, *options(**rules))[0])) == kept, rules


def test_each_row_has_its_own_rules():
  z, u = logits(4), np.full(ROWS, 0.7, np.float32)
  mixed = [np.array(x) for x in options()]
  mixed[1][::2] = 3  # top_k on every other row
  tokens, _ = draw(z, u, *mixed)
  alone, _ = draw(z, u, *options())
  cut, _ = draw(z, u, *options(top_k=3))
  np.testing.assert_array_equal(tokens[::2], cut[::2])
  np.testing.assert_array_equal(tokens[1::2], alone[1::2])


def test_tokens_without_probability_are_never_drawn():
  z = np.full((ROWS, VOCAB), -1e4, np.float32)  # exp underflows to 0
  z[:, [10, 100, 263 - 5]] = 0.0
  last = np.nextafter(np.float32(1), np.float32(0))
  u = np.resize(np.array([0.0, 1 / 3, 2 / 3, last], np.float32), ROWS)
  tokens, logprobs = draw(z, u, *options())
  assert set(np.asarray(tokens)) == {10, 100, 258}
  np.testing.assert_allclose(logprobs, np.log(1 / 3), rtol=1e-6)


def test_frequencies_match_softmax():
  """Chi-square over 200,000 draws; 40 degrees of freedom, p = 1e-4."""
  count, vocab = 200_000, 41
  z = logits(5, 1, vocab, spread=1.5)
  u = numbers(6, count)
  wide = np.broadcast_to(z, (count, vocab))
  tokens, _ = draw(wide, u, *options(count))
  counts = np.bincount(tokens, minlength=vocab)
  expected = softmax(z, 1.0)[0] * count
  assert ((counts - expected) ** 2 / expected).sum() < 84.0
