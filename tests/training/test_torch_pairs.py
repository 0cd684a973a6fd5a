"""Training on choices against PyTorch: dpo, ipo, simpo, kto, a reward model.

1. Choices are drawn, pairs and answers alone; the reference is off by about 1
   nat from what the peer finds under the start.
2. Ours: packing -> the train step.
3. Theirs: each answer alone, and the loss as its paper writes it.
"""

import functools

import numpy as np
import pytest

from posttrain import schema, types
from posttrain.data import preferences
from posttrain.training import pair_objectives
from tests.training import torch_peer, torch_trajectories

torch = pytest.importorskip('torch')
pytestmark = pytest.mark.slow  # a program is compiled per objective

STEPS = torch_trajectories.STEPS
TIED = torch_trajectories.TIED
START = torch_trajectories.start(TIED)


@functools.cache
def _data():
  """Of every step (pairs, of two of which an answer is missing; others).

  The others are answers to other prompts; of half of the steps the reference
  likes them more than the start does.
  """
  rng = np.random.default_rng(3)
  params = torch_peer.tensors(START)

  def sample():
    return torch_trajectories.sample(rng, int(rng.integers(5, 12)))

  def ref(made, shift):
    found = torch_trajectories.answer(params, TIED, made).sum()
    return float(found) + rng.normal(shift, 1)

  def choice(i, shift=0.0):
    chosen, rejected = sample(), sample()
    return types.Pair(
      None if i == 3 else chosen,
      None if i >= 4 else rejected,
      np.float32([ref(chosen, shift), ref(rejected, shift)]),
      margin=float(rng.random()),
    )

  return [
    (
      [choice(i) for i in range(5)],
      [choice(9, shift=(-1) ** step) for _ in range(4)],
    )
    for step in range(STEPS)
  ]


def _batches(others=False):
  for step in _data():
    batch = preferences.pack(
      step[0], step[1] if others else (), rows=2, row_tokens=40, per_row=2
    )
    assert (
      batch.num_micro_batches == 2 and batch.present.all(-1).any(-1).sum() > 1
    )
    yield batch


def _pairs(i):
  """What has both answers, in step i."""
  return [x for x in _data()[i][0] if x.chosen and x.rejected]


def _dpo(values, lengths):
  """Rafailov et al., arXiv 2305.18290, eq. 7."""
  chosen, rejected = values
  return -torch.log(torch.sigmoid(0.3 * chosen - 0.3 * rejected))


def _ipo(values, lengths):
  """Azar et al., arXiv 2310.12036, eq. 17."""
  chosen, rejected = values
  return (chosen - rejected - 1 / (2 * 0.3)) ** 2


def _simpo(values, lengths):
  """Meng et al., arXiv 2405.14734, eq. 6."""
  chosen, rejected = (2.0 * x / n for x, n in zip(values, lengths, strict=True))
  return -torch.log(torch.sigmoid(chosen - rejected - 0.5))


def _per_token(formula):
  return lambda values, lengths: formula(
    [x / n for x, n in zip(values, lengths, strict=True)], lengths
  )


PAIRS = {
  'dpo': (schema.Sigmoid(beta=0.3), _dpo),
  'dpo_norm': (schema.SigmoidNorm(beta=0.3), _per_token(_dpo)),
  'ipo_norm': (schema.IpoNorm(beta=0.3), _per_token(_ipo)),
  'ipo': (schema.IpoPairs(beta=0.3), _ipo),
  'simpo': (schema.SimPo(gamma=0.5), _simpo),
}


def _preference(options):
  return pair_objectives.Preference(TIED, (), schema.Loss(preference=options))


@pytest.mark.parametrize(
  'name',
  [
    pytest.param('dpo', marks=pytest.mark.gate),
    *(x for x in PAIRS if x != 'dpo'),
  ],
)
def test_pairs(name):
  options, formula = PAIRS[name]

  def theirs(params, i):
    terms = []
    for choice in _pairs(i):
      logps = [
        torch_trajectories.answer(params, TIED, x)
        for x in (choice.chosen, choice.rejected)
      ]
      values = [x.sum() for x in logps]
      if name != 'simpo':  # which has no reference
        refs = choice.ref_logprobs.tolist()
        values = [x - q for x, q in zip(values, refs, strict=True)]
      terms.append(formula(values, [len(x) for x in logps]))
    return torch.stack(terms).mean()

  torch_trajectories.compare(_preference(options), START, _batches(), theirs)


def test_kto():
  """Ethayarajh et al., arXiv 2402.01306, eq. 8; z off the other answers."""
  options = schema.Kto(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
  baselines = []

  def log_ratio(params, choice, a):
    made = (choice.chosen, choice.rejected)[a]
    found = torch_trajectories.answer(params, TIED, made)
    return found.sum() - float(choice.ref_logprobs[a])

  def theirs(params, i):
    choices, others = _data()[i]
    drift = torch.stack([log_ratio(params, x, 0) for x in others]).mean()
    z = drift.detach().clamp(min=0)
    baselines.append(float(z))
    terms = []
    for choice in choices:
      if choice.chosen is not None:
        v = torch.sigmoid(0.3 * (log_ratio(params, choice, 0) - z))
        terms.append(1.5 * (1 - v))
      if choice.rejected is not None:
        v = torch.sigmoid(0.3 * (z - log_ratio(params, choice, 1)))
        terms.append(0.5 * (1 - v))
    return torch.stack(terms).mean()

  metrics = torch_trajectories.compare(
    _preference(options), START, _batches(others=True), theirs
  )
  np.testing.assert_allclose(
    [x['kto/baseline'] for x in metrics], baselines, rtol=1e-5, atol=1e-5
  )
  assert min(baselines) == 0 and np.count_nonzero(baselines) >= STEPS // 3


@pytest.mark.parametrize('lm_coef', [0.0, 0.5])
def test_ranking(lm_coef):
  """Bradley and Terry, with a margin (arXiv 2307.09288, eq. 2), centred."""

  def theirs(params, i):
    terms = []
    for choice in _pairs(i):
      chosen, rejected = (
        torch_peer.hidden(params, TIED, x.ids)[-1] @ params['reward/kernel']
        for x in (choice.chosen, choice.rejected)
      )
      wins = torch.sigmoid(chosen - rejected - choice.margin)
      said = torch_trajectories.answer(params, TIED, choice.chosen)
      terms.append(
        0.01 * (chosen + rejected) ** 2
        - torch.log(wins)
        - lm_coef * said.mean()
      )
    return torch.stack(terms).mean()

  options = schema.Loss(
    ranking=schema.Ranking(center_coef=0.01, lm_coef=lm_coef)
  )
  torch_trajectories.compare(
    pair_objectives.Ranking(TIED, (), options),
    torch_trajectories.start(TIED, ranks=True),
    _batches(),
    theirs,
  )
