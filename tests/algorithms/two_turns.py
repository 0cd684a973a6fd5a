"""A two-turn rollout: prompt, turn, tool message, turn.

ids      1 2 | 3 4 | 5 6 7 | 8 9
role     user  policy  tool  policy
content  . x   x x     . x x x x      (. = chat template)
"""

import dataclasses

import numpy as np

from posttrain import types
from posttrain.algorithms import streams
from posttrain.rollout import side_by_side

MASK = np.array([0, 0, 1, 1, 0, 0, 0, 1, 1], bool)
ROLES = np.array([1, 1, 2, 2, 3, 3, 3, 2, 2], np.int8)
CONTENT = np.array([0, 1, 1, 1, 0, 1, 1, 1, 1], bool)
MESSAGES = (
  {'role': 'user', 'content': 'q'},
  {'role': 'assistant', 'content': 'a'},
  {'role': 'tool', 'name': 'search', 'content': 'o'},
  {'role': 'assistant', 'content': 'b'},
)
TASK = types.Task(
  't',
  'e',
  MESSAGES[:1],
  answer='7',
  demonstration=({'role': 'assistant', 'content': '3 + 4 is 7'},),
  info={'hint': 'add', 'blank': ' ', 'number': 5},
)


def sample(**changes):
  n = len(MASK)
  base = types.Sample(
    env='e',
    row='t',
    ids=np.arange(1, n + 1, dtype=np.int32),
    mask=MASK,
    roles=ROLES,
    is_content=CONTENT,
    sampler_logprobs=np.where(MASK, np.float32(-5), np.float32(0)),
    temperatures=np.ones(n, np.float32),
    versions=np.where(MASK, 0, -1).astype(np.int32),
    message_ids=np.array([0, 0, -1, -1, 2, 2, 2, -1, -1], np.int32),
    task=TASK,
  )
  return dataclasses.replace(base, **changes)


def rollout(reward=1.0, uid=0, samples=1, task=TASK, **changes):
  return types.Rollout(
    uid,
    task,
    MESSAGES,
    tuple(sample(task=task, **changes) for _ in range(samples)),
    types.Score(reward),
    'env_done',
    turns=tuple(
      types.Turn(i, start, 2, value, 'eos')
      for i in range(samples)
      for start, value in ((2, 0.25), (7, 0.5))
    ),
  )


def group(*rewards, **changes):
  return [rollout(reward, i, **changes) for i, reward in enumerate(rewards)]


class Scorer:
  """Returns -0.5 for each token, and records its calls."""

  def __init__(self):
    self.calls = []

  def __call__(self, reference, samples, hints=None):
    self.calls.append((reference, hints))
    return [np.full(len(s), -0.5, np.float32) for s in samples]


def finalize(algorithm, groups, scorer=None):
  """Returns the samples of groups with every stream, as a pipeline does."""
  samples = streams.stamp(algorithm, groups)
  (scored,) = side_by_side.run([streams.scoring(algorithm, samples, scorer)])
  return scored.result()
