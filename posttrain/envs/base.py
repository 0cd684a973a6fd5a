"""The environment protocol: text in, text out, synchronous, never tokens.

    for task in env.source('train', seed):
      episode = env.make(task)
      messages = episode.reset()
      while not done: step = episode.step(text, truncated)
      score = episode.grade(); episode.close()

A bad answer is no error: it is an observation or a low reward. What cannot
be graded scores None, which is excluded from its group, never 0.
"""

from typing import Protocol

from posttrain import types
from posttrain.data import sources

SPLITS = ('train', 'eval')


class Episode(Protocol):
  """One attempt at a task."""

  def reset(self) -> types.Messages:
    """Returns the prompt."""

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Takes an assistant turn; `truncated`: cut off before its end."""

  def grade(self) -> types.Score:
    """Returns the reward of the episode so far."""

  def close(self) -> None:
    """Frees what the episode holds."""


class Env(Protocol):
  """A distribution of tasks, and the rules by which they are played."""

  name: str
  max_turns: int  # assistant turns of an episode

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns the tasks of a split ('train' or 'eval')."""

  def make(self, task: types.Task) -> Episode:
    """Returns a fresh episode of a task."""


def check_split(split: str) -> None:
  assert split in SPLITS, f'split must be one of {SPLITS}: got {split!r}'
