"""The episode benchmark: medians, and the requests of the lock-step engine."""

import numpy as np

from experiments.benchmarks import episodes
from posttrain.decode import requests


def _variant(ids, *seconds):
  """A variant with its tokens, and (wall, env, engine) per repeat."""
  variant = object.__new__(episodes.Variant)
  variant.ids, variant.seconds = ids, list(seconds)
  return variant


def test_the_table_has_medians_and_ratios_within_repeats(capsys):
  held = _variant(
    {0: [1, 2], 1: [3]}, (1.0, 0.1, 0.5), (2.0, 0.2, 1.6), (4, 0.4, 2)
  )
  slow = _variant(
    {0: [1, 2], 1: [4]}, (3.0, 1.5, 1.5), (4.0, 2.0, 2.0), (4, 2, 2)
  )
  episodes.report({'lock-step': slow, 'held': held}, 'heading')
  heading, _, _, *rows = capsys.readouterr().out.splitlines()
  assert heading == 'heading'
  # 2 episodes of 3 tokens in 4 and in 2 s; 3, 2 and 1 times as fast.
  assert rows == [
    '| lock-step | 0.5 | 1 | 1.00 | 50.0% | 50.0% | 0.0% | 1 |',
    '| held | 1.0 | 2 | 2.00 | 10.0% | 50.0% | 40.0% | 0 |',
  ]


class Engine:
  """Samples 7 for every request, and records the requests."""

  def __init__(self):
    self.prompts = []

  def generate(self, batch):
    self.prompts += [(request.id, request.ids.tolist()) for request in batch]
    return [
      requests.Completion(
        request.id, np.array([7]), np.zeros(1), 'eos', version=0
      )
      for request in batch
    ]


def test_lock_step_prefills_whole_histories():
  engine = Engine()
  lock_step = episodes.LockStepEngine(engine)
  lock_step.submit(requests.Request(3, np.array([1, 2]), 4, hold=True))
  lock_step.poll()
  lock_step.extend(3, np.array([5]), 4)
  lock_step.poll()
  assert engine.prompts == [(3, [1, 2]), (3, [1, 2, 7, 5])]
  lock_step.release(3)
