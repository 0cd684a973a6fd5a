"""Reward functions for the tests, named by import path."""

import threading

ended = threading.Event()  # ends `hangs`


def length(completions, judge, answer):
  replies = judge(
    [
      [{'role': 'user', 'content': f'{turns[-1]["content"]} or {right}?'}]
      for turns, right in zip(completions, answer, strict=True)
    ],
    max_tokens=4,
  )
  return [len(text) / 4 for text in replies]


async def slow(completion_ids, **columns):
  return [float(len(ids)) for ids in completion_ids]


def some(rollouts):
  return [None if i else 1.0 for i, _ in enumerate(rollouts)]


def none(rollouts):
  return [None for _ in rollouts]


def one(rollouts):
  return [1.0]


def logs_one(rollouts, log_metric, log_extra, value):
  log_metric(name='metric', value=value)
  log_extra(column='extra', values=[value, 'a'])
  return [0.0 for _ in rollouts]


def says(rollouts, values):
  return values


def wants_level(rollouts, level):
  return [0.0 if x is None else x for x in level]


def takes(rollouts, scale=1.0):
  return [scale for _ in rollouts]


def words(rollouts):
  return ['good' for _ in rollouts]


def broken(rollouts):
  raise KeyError('no')


def typed(completions):
  return [text.strip() for text in completions]


def hangs(rollouts):
  ended.wait()
  return [5.0 for _ in rollouts]


def nan_first(rollouts):
  return [float('nan'), *(1.0 for _ in rollouts[1:])]


def asks(rollouts, judge):
  return [float(len(judge([]))) for _ in rollouts]


def edits(completions, rollouts, options):
  """Edits what it gets; returns 0 where an earlier call has edited it."""
  clean = [float(c[-1]['content'] != 'edited') for c in completions]
  for messages, rollout in zip(completions, rollouts, strict=True):
    messages[-1]['content'] = rollout.messages[-1]['content'] = 'edited'
    rollout.task.info['edited'] = True
    rollout.samples[0].ids[:] = -7
  options.append('edited')
  rollouts.clear()
  return clean


def scalar(rollouts):
  return 0.5


def doubles_level(rollouts, level):
  return [2 * float(x) for x in level]


def doubles_column(rollouts, **columns):
  return [2 * float(x) for x in columns['level']]


def apart(rollouts):
  async def one():
    return 1.0

  return [one() for _ in rollouts]
