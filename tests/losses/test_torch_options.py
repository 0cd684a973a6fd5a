"""Against PyTorch: options of rl, the baseline of KTO, the linear head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.losses import logprobs, preference, rl

torch = pytest.importorskip('torch')
from tests.losses import helpers  # noqa: E402
from tests.losses import test_torch as peer  # noqa: E402

pytestmark = pytest.mark.gate

T = peer.T


def _loss(x, inputs, **options):
  """Returns our loss: the sum of the terms by the denominator."""
  _, old, _, credit, weights, segments = inputs
  constant = options.pop('constant_tokens', None)
  terms, _ = rl.loss(
    x, old, credit, weights, segments, -2 * x, helpers.options(**options)
  )
  member = weights != 0
  return terms.sum() / rl.denominator(
    jnp.float32(member.sum()),
    jnp.float32(np.unique(segments[member]).size),
    aggregation=options.get('aggregation', 'token'),
    constant_tokens=constant,
  )


def _tensors(inputs):
  _, old, _, credit, weights, segments = map(torch.tensor, inputs)
  return old, credit, weights, segments


@pytest.mark.parametrize('delta', [1.3, 2.0])
def test_clip_with_a_delta_equals_torch(delta):
  inputs = peer._inputs()
  old, credit, weights, _ = _tensors(inputs)

  def theirs(x):
    rho = (x - old).exp()
    terms = -torch.minimum(
      torch.clamp(rho, max=delta) * credit, rho.clamp(0.8, 1.28) * credit
    )
    return (weights * terms).sum() / (weights != 0).sum()

  peer._compare(
    lambda x: _loss(x, inputs, type='clip', delta=delta), theirs, inputs[0]
  )


@pytest.mark.parametrize('norm', ['sum', 'mean'])
@pytest.mark.parametrize(
  'mode', ['token_truncate', 'token_mask', 'sequence_truncate', 'sequence_mask']
)
def test_importance_weights_equal_torch(mode, norm):
  inputs = peer._inputs()
  old, credit, weights, segments = _tensors(inputs)
  low, high = 0.7, 1.1

  def theirs(x):
    gap, member = (x - old).detach(), weights != 0
    c = gap.exp()
    if mode.startswith('sequence'):
      for s in (1, 2):
        mine = gap[(segments == s) & member]
        c[segments == s] = (mine.sum() if norm == 'sum' else mine.mean()).exp()
    inside = (c >= low) & (c <= high)
    c = c * inside if mode.endswith('mask') else c.clamp(low, high)
    # Some ratios are cut, not all.
    assert 0 < (inside & member).sum() < member.sum() or norm == 'mean'
    return (weights * c * -credit * x).sum() / member.sum()

  def ours(x):
    return _loss(
      x,
      inputs,
      type='clip',
      sampler_is_mode=mode,
      sampler_is_norm=norm,
      sampler_is_clip_min=low,
      sampler_is_clip_max=high,
    )

  # The value of ours is -c A rho, with rho = 1: gradients are the same.
  _, grad = peer._ours(ours, inputs[0])
  _, expected = peer._theirs(theirs, inputs[0])
  np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6)
  assert np.abs(expected).max() > 0


@pytest.mark.parametrize(
  ('aggregation', 'constant'),
  [('token', None), ('sequence', None), ('constant', 5)],
)
def test_aggregation_and_entropy_equal_torch(aggregation, constant):
  inputs = peer._inputs()
  old, credit, weights, segments = _tensors(inputs)

  def theirs(x):
    rho, member = (x - old).exp(), weights != 0
    terms = weights * -torch.minimum(
      rho * credit, rho.clamp(0.8, 1.28) * credit
    ) - 0.3 * member * (-2 * x)
    if aggregation == 'token':
      return terms.sum() / member.sum()
    each = [terms[(segments == s) & member] for s in (1, 2)]
    if aggregation == 'sequence':
      return sum(x.mean() for x in each) / 2
    return sum(x.sum() for x in each) / (2 * constant)

  peer._compare(
    lambda x: _loss(
      x,
      inputs,
      type='clip',
      aggregation=aggregation,
      constant_tokens=constant,
      entropy_coef=0.3,
    ),
    theirs,
    inputs[0],
  )


@pytest.mark.parametrize('shift', [0.5, -0.5])
def test_baseline_of_kto_equals_torch(shift):
  """The mean log ratio over `where`, at least 0, without gradient."""
  h = np.float32(np.random.default_rng(0).normal(shift, 0.1, T))
  where = np.arange(T) % 3 != 1
  expected = max(0.0, torch.tensor(h)[torch.tensor(where)].mean().item())
  value, grad = jax.value_and_grad(preference.kto_baseline)(h, where)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  assert (expected > 0) == (shift > 0) and not grad.any()


@pytest.mark.parametrize('chunks', [{}, {'vocab_chunk': 4, 'row_chunk': 2}])
@pytest.mark.parametrize('softcap', [None, 1.5])
def test_linear_head_equals_torch(softcap, chunks):
  """Gradients of logprobs and entropies in hidden states and weights."""
  rng = np.random.default_rng(0)
  hidden, weight = rng.normal(size=(5, 8)), rng.normal(size=(8, 11))
  new = np.float32(np.concatenate([hidden.ravel(), weight.ravel()]))
  targets, tau = rng.integers(0, 11, 5), np.float32(rng.uniform(0.5, 2, 5))
  a, b = np.float32(rng.normal(size=(2, 5)))

  def ours(x):
    values, entropy = logprobs.linear(
      x[:40].reshape(5, 8),
      x[40:].reshape(8, 11),
      targets,
      tau,
      softcap=softcap,
      **chunks,
    )
    return (a * values + b * entropy).sum()

  def theirs(x):
    z = x[:40].reshape(5, 8) @ x[40:].reshape(8, 11)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    log_probs = torch.log_softmax(z / torch.tensor(tau)[:, None], dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    values = log_probs[torch.arange(5), torch.tensor(targets)]
    return (torch.tensor(a) * values + torch.tensor(b) * entropy).sum()

  peer._compare(ours, theirs, new)
