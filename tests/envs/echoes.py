"""Environments for `test_registry`, as a user would write them."""

from posttrain import types
from posttrain.data import sources
from posttrain.envs import base

WORDS = ('yes', 'no', 'maybe')


class Echo(base.Env):
  """Asks for a word to be repeated; not graded."""

  max_turns = 1

  def __init__(self, name: str, repeats: int = 1):
    self.name, self._repeats = name, repeats

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    tasks = [
      types.Task(
        id=word,
        env=self.name,
        prompt=({'role': 'user', 'content': word},),
        answer=word,
        demonstration=(
          {'role': 'assistant', 'content': ' '.join([word] * self._repeats)},
        ),
      )
      for word in WORDS
    ]
    return sources.Shuffled(tasks, seed)

  def make(self, task: types.Task) -> base.OneTurn:
    return base.OneTurn(task)


class Plain:
  """The same without inheritance, and with one optional attribute."""

  max_turns, votes = 1, True
  source, make = Echo.source, Echo.make

  def __init__(self, name: str):
    self.name, self._repeats = name, 1


class Sourceless(base.Env):
  """Lacks an abstract method."""

  name, max_turns = 'mine', 1

  def make(self, task):
    return base.OneTurn(task)


class Renamed(Echo):
  """Has another name."""

  def __init__(self, name: str):
    super().__init__(name * 2)


class Raises(Echo):
  """Cannot be built."""

  def __init__(self, name: str):
    raise KeyError(f'{name}\n' + 'x' * 10**6)
