"""Prompts of `eval.suite`: tasks without an expected answer."""

from collections.abc import Sequence

from posttrain import types
from posttrain.data import sources
from posttrain.envs import base, rows


class Suite(base.Env):
  """A fixed set of user messages, answered in one turn without a reward."""

  name, max_turns = 'suite', 1

  def __init__(self, prompts: Sequence[str]):
    """Builds a task per prompt: user messages, in the order of display."""
    self.tasks = tuple(
      types.Task(
        id=f'eval.suite[{i}]',
        env=self.name,
        prompt=({'role': 'user', 'content': prompt},),
      )
      for i, prompt in enumerate(prompts)
    )

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns the prompts for 'eval', no task for 'train'."""
    base.check_split(split)
    return sources.Shuffled(self.tasks if split == 'eval' else (), seed)

  def make(self, task: types.Task) -> rows.Episode:
    return rows.Episode(task)
