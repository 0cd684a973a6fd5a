"""Rows of a data file as tasks; demonstrations to imitate, not graded."""

import dataclasses

from posttrain import schema, types
from posttrain.data import jsonl, sources, tfds
from posttrain.data import rows as data_rows
from posttrain.envs import base


class Rows(base.Env):
  """`schema.Rows`: a JSONL file, or a TFDS folder in ArrayRecord.

  A row's task prompts with what comes before the first assistant turn of
  `messages` (or with `prompt`), and demonstrates the rest: further user
  turns are part of the demonstration, as the environment's moves.
  """

  max_turns = 1

  def __init__(self, name: str, cfg: schema.Rows):
    self.name, self._cfg = name, cfg

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns the rows of `path`, or of `eval_path`; none where it is None.

    Raises:
      ValueError: no such file, no such split, or a row is malformed.
    """
    base.check_split(split)
    field = 'path' if split == 'train' else 'eval_path'
    path = getattr(self._cfg, field)
    if path is None:
      return sources.Shuffled((), seed)
    file = base.find(self.name, field, path, folders=True)
    read = tfds.read(file, split) if file.is_dir() else jsonl.read(file)
    return sources.Shuffled(
      [self._task(row) for row in read], seed, sources.file_fingerprint(file)
    )

  def make(self, task: types.Task) -> 'Episode':
    return Episode(task)

  def _task(self, row: data_rows.Row) -> types.Task:
    return types.Task(
      id=row.where,
      env=self.name,
      prompt=row.prompt,
      answer=row.completion[0]['content'],  # shown beside what is said
      demonstration=row.completion,
      info=row.info,
    )


@dataclasses.dataclass(frozen=True)
class Episode:
  """One turn, whatever it says; nobody can grade it."""

  task: types.Task

  def reset(self) -> types.Messages:
    return self.task.prompt

  def step(self, text: str, truncated: bool) -> types.StepOut:
    del text, truncated
    return types.StepOut()

  def grade(self) -> types.Score:
    return types.Score(reward=None)

  def close(self) -> None:
    pass
