"""The environment protocol: text in, text out, synchronous, never tokens.

    for task in env.source('train', seed):
      episode = env.make(task)
      messages = episode.reset()
      while not done: step = episode.step(text, truncated)
      score = episode.grade(); episode.close()

A bad answer is no error: it is an observation or a low reward. What cannot
be graded scores None, which is excluded from its group, never 0.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

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
  """A distribution of tasks, and the rules by which they are played.

  One whose scores have an `answer` says `votes = True`, so that the majority
  of answers none of which can be parsed is wrong, rather than unknown.

  One whose calls may wait for something (a network, a process) says
  `blocking = True`: `make` and the calls of its episodes then come from other
  threads, those of different episodes at a time.
  """

  name: str
  max_turns: int  # assistant turns of an episode

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns the tasks of a split ('train' or 'eval')."""

  def make(self, task: types.Task) -> Episode:
    """Returns a fresh episode of a task."""


@dataclasses.dataclass(frozen=True)
class Tasks(Sequence):
  """Tasks made when asked for."""

  keys: Sequence
  make: Callable[[Any], types.Task]

  def __len__(self) -> int:
    return len(self.keys)

  def __getitem__(self, index: int) -> types.Task:
    return self.make(self.keys[index])


def find(env: str, field: str, path: str, *, folders: bool) -> pathlib.Path:
  """Returns an existing data file, with variables and ~ expanded.

  Args:
    env: name of the environment.
    field: of its options that says `path`.
    path: as it was given.
    folders: whether a folder will do.

  Raises:
    ValueError: there is none; names the key.
  """
  file = pathlib.Path(os.path.expandvars(path)).expanduser()
  if file.exists() if folders else file.is_file():
    return file
  unset = '; a variable in it is not set' if '$' in str(file) else ''
  raise ValueError(
    f'envs.{env}.env.{field} must name an existing file'
    f'{" or folder" if folders else ""}: got {path!r}{unset}'
  )


def check_split(split: str) -> None:
  assert split in SPLITS, f'split must be one of {SPLITS}: got {split!r}'
