"""Functions and classes that the tests name by import path."""

import numpy as np

from posttrain.algorithms import base


def centered(inputs, scale=1.0):
  return inputs.broadcast(scale * (inputs.rewards - inputs.rewards.mean()))


def ramp(inputs):
  return [[float(i) for i in range(n)] for n in inputs.completion_lengths]


def short(inputs):
  return [[1.0] * (n - 1) for n in inputs.completion_lengths]


def flat(inputs):
  return list(inputs.rewards)


def number(inputs):
  return 1.0


def one(inputs):
  return inputs.broadcast([1.0])


def infinite(inputs):
  return inputs.broadcast([float('inf')] * len(inputs.rollouts))


class NoCredit(base.Algorithm):
  """Has the hooks of its base alone."""


def reward_to_go(inputs):
  rewards = inputs.turn_rewards
  return inputs.broadcast_turns([r[::-1].cumsum()[::-1] for r in rewards])


def last_turn(inputs):
  return inputs.broadcast_turns([r[-1:] for r in inputs.turn_rewards])


def all_but(rollout, ids=()):
  return [[bool(i not in ids) for i in s.ids] for s in rollout.samples]


def no_list(rollout):
  return None


def too_short(rollout):
  return [[True] for _ in rollout.samples]


def numbers(rollout):
  return [[1] * len(s) for s in rollout.samples]


def hidden_answer(task):
  return f'the answer to {task.id} is hidden'


class Hooks(base.Algorithm):
  """Overrides several hooks; component 'rl'."""

  only_rewards = True

  def __init__(self, cfg, scale=1.0, alpha=0.1):
    super().__init__(cfg)
    self._scale, self._alpha = scale, alpha

  def observation_weights(self, rollout):
    contents = base.contents(rollout)
    return [np.where(content, self._alpha, 0) for content in contents]

  def assign(self, group):
    return base.centered(base.rewards(group)).tolist()

  def rescale(self, groups, credits):
    return [[self._scale * x for x in credit] for credit in credits]


class Distils(base.Algorithm):
  component, weight = 'ref_kl', 0.5


class NoAlgorithm:
  """A class that is no algorithm."""
