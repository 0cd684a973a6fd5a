"""Training on tokens against PyTorch: sft, and grpo with a leash.

1. Groups of rollouts are drawn; the peer scores them under the start, which
   is the sampler (but for noise) and the reference.
2. Ours: algorithm -> streams -> packing -> the train step.
3. Theirs: each sequence alone, and the loss as its paper writes it.
"""

import dataclasses
import functools

import numpy as np
import pytest

from posttrain import algorithms, schema, types
from posttrain.data import packing
from posttrain.training import objectives
from tests.algorithms import two_turns
from tests.training import torch_peer, torch_trajectories

torch = pytest.importorskip('torch')
pytestmark = pytest.mark.slow  # a program is compiled per objective

STEPS, PROMPT = torch_trajectories.STEPS, torch_trajectories.PROMPT
START = {
  model: torch_trajectories.start(model)
  for model in (torch_trajectories.TIED, torch_trajectories.FULL)
}
HOT = 0.7  # the temperature of what was sampled
BETA = 0.3  # of the leash


def _groups(rng):
  """Two tasks with three rollouts each; rewards of one are all the same."""
  groups, same = [], rng.integers(2)
  for number in range(2):
    rewards = [0.5] * 3 if number == same else rng.normal(size=3)
    task = types.Task(str(number), 'toy', ())
    groups.append(
      [
        types.Rollout(
          i,
          task,
          (),
          (torch_trajectories.sample(rng, int(rng.integers(5, 14))),),
          types.Score(float(reward)),
          'eos',
        )
        for i, reward in enumerate(rewards)
      ]
    )
  return groups


def _data():
  rng = np.random.default_rng(1)
  return [_groups(rng) for _ in range(STEPS)]


@functools.cache
def _sampled(model):
  """(the data, as some policy near the start sampled it; its logprobs)."""
  rng = np.random.default_rng(2)
  params = torch_peer.tensors(START[model])
  logprobs = {}

  def draw(rollout):
    (sample,) = rollout.samples
    frozen = torch_trajectories.answer(params, model, sample, HOT).numpy()
    frozen = np.concatenate([np.zeros(PROMPT), frozen])
    logprobs[sample.ids.tobytes()] = np.float32(frozen)
    noise = 0.2 * rng.normal(size=len(sample)) * sample.mask
    temperatures = np.where(sample.mask, np.float32(HOT), np.float32(1))
    return dataclasses.replace(
      rollout,
      samples=(
        dataclasses.replace(
          sample,
          sampler_logprobs=np.float32(frozen + noise),
          temperatures=temperatures,
        ),
      ),
    )

  drawn = [[[draw(r) for r in group] for group in x] for x in _data()]
  return drawn, logprobs


def _batches(algorithm, data, scorer=None):
  """What a pipeline makes of groups."""
  made = algorithms.make(algorithm)
  for groups in data:
    batch, left = packing.pack(
      two_turns.finalize(made, groups, scorer),
      packing.Layout(rows=2, longest=26, envs=('toy',)),
      micro_batches=3,
      row_tokens=26,
    )
    assert (
      not left and batch.num_micro_batches == 2 and batch.segment_ids.max() > 1
    )
    yield batch


def test_sft():
  model, data = torch_trajectories.FULL, _data()

  def theirs(params, i):
    return -torch.cat(
      [
        torch_trajectories.answer(params, model, rollout.samples[0])
        for group in data[i]
        for rollout in group
      ]
    ).mean()

  torch_trajectories.compare(
    objectives.TokenComponents(model, ('toy',)),
    START[model],
    _batches(schema.Sft(), data),
    theirs,
  )


def _clip(new, old, advantage):
  """Schulman et al., arXiv 1707.06347, eq. 7, with the two bounds of DAPO."""
  ratio = (new - old).exp()
  bounded = ratio.clamp(1 - 0.2, 1 + 0.28)
  return -torch.minimum(ratio * advantage, bounded * advantage)


def _dppo(new, old, advantage):
  """Qi et al., arXiv 2602.04879; the square is that of arXiv 2602.02276."""
  moved = (new.exp() - old.exp()).detach()
  keep = moved <= 0.01 if advantage > 0 else moved >= -0.01
  return 1e-3 * (new - old) ** 2 - keep * advantage * (new - old).exp()


def _reverse(new, old, ref):
  """Policy gradient of KL(pi || q), with log q - log pi as the credit."""
  keep = (new.exp() - old.exp()).detach() >= -0.2
  credit = (ref - new).detach()
  return 1e-3 * (new - old) ** 2 - keep * credit * (new - old).exp()


def _k3(new, old, ref):
  """Shao et al., arXiv 2402.03300, eq. 4."""
  return (ref - new).exp() - (ref - new) - 1


RL = {
  'clip': (schema.Loss(schema.Clip(), schema.RefKl('k3')), _clip, _k3),
  'dppo': (schema.Loss(schema.Dppo(low=0.01, high=0.01)), _dppo, _reverse),
}


@pytest.mark.parametrize(
  'name', ['clip', pytest.param('dppo', marks=pytest.mark.gate)]
)
def test_grpo(name):
  """Advantages, temperatures, a reference, tokens that a bound drops."""
  loss, policy_gradient, kl = RL[name]
  model = torch_trajectories.TIED
  data, logprobs = _sampled(model)

  def scorer(reference, samples, hints=None):
    assert reference == 'init' and hints is None
    return [logprobs[sample.ids.tobytes()] for sample in samples]

  def theirs(params, i):
    rl, leash = [], []
    for group in data[i]:
      rewards = torch.tensor([r.score.reward for r in group]).double()
      advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
      for rollout, advantage in zip(group, advantages, strict=True):
        (sample,) = rollout.samples
        new = torch_trajectories.answer(params, model, sample, HOT)
        old, ref = (
          torch.tensor(x[PROMPT:]).double()
          for x in (sample.sampler_logprobs, logprobs[sample.ids.tobytes()])
        )
        leash.append(kl(new, old, ref))
        if advantage != 0:  # else its tokens are none of those counted
          rl.append(policy_gradient(new, old, advantage))
    return torch.cat(rl).mean() + BETA * torch.cat(leash).mean()

  algorithm = schema.Grpo(scale_rewards='group', kl_beta=BETA)
  metrics = torch_trajectories.compare(
    objectives.TokenComponents(model, ('toy',), loss),
    START[model],
    _batches(algorithm, data, scorer),
    theirs,
  )
  dropped = [x['rl/is_masked'] for x in metrics]
  assert max(dropped) > 0.1 and max(dropped) < 0.9
