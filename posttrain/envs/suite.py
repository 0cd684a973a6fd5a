"""Prompts of a config (`eval.suite`), which nobody grades but the reader."""

from collections.abc import Sequence

from posttrain import types
from posttrain.data import sources
from posttrain.envs import base, rows


class Suite(base.Env):
  """A fixed set of user messages, each answered in one turn; not graded."""

  name, max_turns = 'suite', 1

  def __init__(self, prompts: Sequence[str]):
    """Args: prompts: in the order in which they are to be shown."""
    self.tasks = tuple(
      types.Task(
        id=f'eval.suite[{i}]',
        env=self.name,
        prompt=({'role': 'user', 'content': prompt},),
      )
      for i, prompt in enumerate(prompts)
    )

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns the prompts; they are for evaluation alone."""
    base.check_split(split)
    return sources.Shuffled(self.tasks if split == 'eval' else (), seed)

  def make(self, task: types.Task) -> rows.Episode:
    return rows.Episode(task)
