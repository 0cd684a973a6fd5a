"""Reward functions for the tests, named by import path."""

import asyncio
import threading
import time

ended = threading.Event()  # ends `hangs`
turns = []  # of `by_turns`
events = []  # what calls did after their timeout


def length(completions, judge, answer, log_metric):
  replies = judge(
    [
      [{'role': 'user', 'content': f'{turns[-1]["content"]} or {right}?'}]
      for turns, right in zip(completions, answer, strict=True)
    ],
    max_tokens=4,
  )
  log_metric('letters', sum(map(len, replies)) / len(replies))
  return [len(text) / 4 for text in replies]


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


def logs_one(rollouts, log_metric, log_extra, value):
  log_metric(name='metric', value=value)
  log_extra(column='extra', values=[value, 'a'])
  return [0.0 for _ in rollouts]


def says(rollouts, values):
  return values


def wants_level(rollouts, level):
  return [0.0 if x is None else x for x in level]


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


def hangs(rollouts, log_metric):
  log_metric('count', 1.0)
  ended.wait()
  return [5.0 for _ in rollouts]


async def hangs_on(rollouts):
  try:
    await asyncio.Event().wait()
  except asyncio.CancelledError:
    events.append('cancelled')
    raise


def by_turns(rollouts):
  """Calls the next function of `turns`, by its name here."""
  return globals()[turns.pop(0)](rollouts)


class Unprintable(Exception):
  def __str__(self):
    raise RuntimeError('no text')

  __repr__ = __str__


def raises_unprintable(rollouts):
  raise Unprintable


def edits(prompts, completions, completion_ids, answer, rollouts, options):
  """Edits everything it gets; returns 1, and 0 where something was edited."""
  clean = [
    float(
      'edited' not in f'{prompts[i]}{completions[i]}{answer[i]}{options}'
      and -7 not in completion_ids[i]
      and 'edited' not in rollout.task.info
      and rollout.samples[0].ids[0] != -7
    )
    for i, rollout in enumerate(rollouts)
  ]
  for i, rollout in enumerate(rollouts):
    for message in (*prompts[i], *completions[i], *rollout.messages):
      message['content'] = 'edited'
    prompts[i].append('edited')
    completions[i].clear()
    completion_ids[i].insert(0, -7)
    if isinstance(answer[i], list):
      answer[i].append('edited')
    rollout.task.info['edited'] = True
    for sample in rollout.samples:
      sample.ids[:] = -7
    options['nested'].append('edited')
  rollouts.clear()
  return clean


def nan_first(rollouts):
  return [float('nan'), *(1.0 for _ in rollouts[1:])]


def words_last(rollouts):
  return [*(None for _ in rollouts[1:]), 'good']


def fine(rollouts):
  return [1.0 for _ in rollouts]


def huge(rollouts):
  return [10**400 for _ in rollouts]


def exits(rollouts):
  raise SystemExit(3)


def asks(rollouts, judge):
  return [float(len(judge([]))) for _ in rollouts]


def sleeps(rollouts, seconds):
  time.sleep(seconds)
  return [1.0 for _ in rollouts]
