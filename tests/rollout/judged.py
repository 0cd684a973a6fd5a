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
