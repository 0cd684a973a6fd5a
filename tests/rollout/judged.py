"""Reward functions that the tests name by import path."""


def length(completions, judge, answer, log_metric):
  said = judge([
      [{'role': 'user', 'content': f'{turns[-1]["content"]} or {right}?'}]
      for turns, right in zip(completions, answer, strict=True)
  ], max_tokens=4)
  log_metric('letters', sum(map(len, said)) / len(said))
  return [len(text) / 4 for text in said]


async def slow(completion_ids, **columns):
  return [float(len(ids)) for ids in completion_ids]


def some(rollouts):
  return [None if i else 1.0 for i, _ in enumerate(rollouts)]


def none(rollouts):
  return [None for _ in rollouts]


def one(rollouts):
  return [1.0]


def infinite(rollouts):
  return [float('inf') for _ in rollouts]


def logs(completions, log_metric, log_extra):
  log_metric('count', len(completions))
  log_extra('length', [len(c) for c in completions])
  log_extra('text', ['a' for _ in completions])
  return [0.0 for _ in completions]


def wants(trainer_state, rollouts):
  return [0.0 for _ in rollouts]


def takes(rollouts, scale=1.0):
  return [scale for _ in rollouts]


def nothing(rollouts):
  return None


def words(rollouts):
  return ['good' for _ in rollouts]


def broken(rollouts):
  raise KeyError('no')
