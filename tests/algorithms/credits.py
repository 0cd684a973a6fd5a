"""Functions that the tests name by import path."""


def centered(inputs, scale=1.0):
  return inputs.broadcast(scale * (inputs.rewards - inputs.rewards.mean()))


def ramp(inputs):
  return [[float(i) for i in range(n)] for n in inputs.completion_lengths]


def short(inputs):
  return [[1.0] * (n - 1) for n in inputs.completion_lengths]


def one(inputs):
  return inputs.broadcast([1.0])


def infinite(inputs):
  return inputs.broadcast([float('inf')] * len(inputs.rollouts))


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
