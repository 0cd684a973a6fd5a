"""The environment protocol: text in, text out; synchronous, without tokens.

    for task in env.source('train', seed):
      episode = env.make(task)
      messages = episode.reset()
      while not done: step = episode.step(text, truncated)
      score = episode.grade(); episode.close()

If the task has tools, a turn with calls of them goes to `episode.call` instead,
call by call; see `ToolEpisode`.

A bad answer is not an error: it gets an observation or a low reward. An episode
that cannot be graded has reward None and is left out of its group; it is never
0.
"""

import abc
import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from posttrain import types
from posttrain.data import row_files, sources
from posttrain.util import errors

SPLITS = ('train', 'eval')
Source = sources.Shuffled[types.Task]  # of a split


class Episode(Protocol):
  """One attempt at a task."""

  def reset(self) -> types.Messages:
    """Returns the prompt's messages."""

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Plays an assistant turn; `truncated`: it was cut off before its end."""

  def grade(self) -> types.Score:
    """Returns the reward of the episode so far."""

  def close(self) -> None:
    """Frees the episode's resources."""


class ToolEpisode(Episode, Protocol):
  """One attempt at a task with tools (`types.Task.tools`).

  A turn with calls is not passed to `step`. Each call is checked against its
  tool's schema and passed to `call`; the results are the messages of the next
  turn. A call that cannot be read or does not fit its tool gets an error
  instead, and so does one whose `call` raises: an error is returned to the
  policy as a message, and does not end the episode. A turn without calls is
  passed to `step`, as of any episode.
  """

  def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
    """Runs a tool and returns its result; `str` of it is shown.

    Args:
      name: one of the task's tools.
      arguments: all that the schema requires, of simple types as it says.
    """


class Env(Protocol):
  """A distribution of tasks and the rules of their episodes.

  Environments inherit from it, for the defaults of the optional attributes.

  Attributes:
    name: the environment's name in the config, also `Task.env`.
    max_turns: assistant turns of an episode, at most.
    votes: whether its scores have an `answer`. The majority of answers none of
      which can be parsed is then wrong, rather than unknown.
    blocking: whether its calls wait for something (a network, a process).
      `make` and the methods of its episodes are then called from a thread
      pool, different episodes at the same time.
    repeats: whether an episode that is played again, with the same turns, goes
      the same way. Where not, checkpoints store batches that were sampled ahead
      of their step, see `rollout.max_lag`.
    judge: the model of the entry's `judge`, from conversations to one reply
      per conversation; set before the first episode, None if there is none.
  """

  name: str
  max_turns: int
  votes: bool = False
  blocking: bool = False
  repeats: bool = True
  judge: Callable[..., Sequence[str]] | None = None

  @abc.abstractmethod
  def source(self, split: str, seed: int) -> Source:
    """Returns the tasks of a split ('train' or 'eval')."""

  @abc.abstractmethod
  def make(self, task: types.Task) -> Episode:
    """Returns a fresh episode of a task."""


@dataclasses.dataclass(frozen=True)
class Tasks(Sequence):
  """A sequence of tasks or questions, each built on access."""

  keys: Sequence
  make: Callable[[Any], Any]

  def __len__(self) -> int:
    return len(self.keys)

  def __getitem__(self, index: int) -> Any:
    return self.make(self.keys[index])


class OneTurn:
  """An episode of one answer; not scorable without an answer."""

  def __init__(
    self,
    task: types.Task,
    grade: Callable[[str, bool], types.Score] | None = None,
  ):
    """Builds an episode.

    Args:
      task: the task.
      grade: grades (text, truncated); None = no answer is scorable.
    """
    self._task, self._grade = task, grade
    self._score = types.Score(reward=None)

  def reset(self) -> types.Messages:
    self._score = types.Score(reward=None)
    return self._task.prompt

  def step(self, text: str, truncated: bool) -> types.StepOut:
    if self._grade is not None:
      self._score = self._grade(text, truncated)
    return types.StepOut(reward=self._score.reward or 0.0)

  def grade(self) -> types.Score:
    return self._score

  def close(self) -> None:
    pass


def find(env: str, field: str, path: str, hint: str = '') -> pathlib.Path:
  """Returns the path of existing data, with variables and ~ expanded.

  Args:
    env: the environment's name.
    field: the option that holds `path`.
    path: the option's value.
    hint: where the file is from, and in which form, after '; ', for errors.

  Raises:
    ValueError: a file does not exist; names the key.
  """
  file = pathlib.Path(os.path.expandvars(path)).expanduser()
  try:
    row_files.files(file)
  except ValueError as error:
    if '$' in path:
      hint += f'; the variable in {path} must name a folder of data'
    raise ValueError(
      f'envs.{env}.env.{field} must name existing data: {error}{hint}'
    ) from None
  return file


def build(key: str, make: Callable[[], Any]) -> Any:
  """Returns what a user's class builds.

  Args:
    key: dotted key of the class's import path.
    make: calls the class.

  Raises:
    ValueError: it raises an exception; names the place.
  """
  try:
    return make()
  except (Exception, SystemExit) as error:
    raise ValueError(
      f'{key} must name a class that can be built with these options: got '
      f'{errors.describe(error)} ({errors.place(error)})'
    ) from error


def check_count(env: str, split: str, count: int, most: int) -> None:
  """Raises ValueError if a split has fewer than `count` distinct tasks."""
  if count > most:
    raise ValueError(
      f'envs.{env}.env.{split}_tasks must be at most {most}, the distinct '
      f'tasks of that split: got {count!r}'
    )
