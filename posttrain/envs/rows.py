"""Rows of a data file as tasks with demonstrations; not graded."""

import dataclasses

from posttrain import schema, types
from posttrain.data import jsonl, sources, tfds
from posttrain.data import rows as data_rows
from posttrain.envs import base


class Rows(base.Env):
  """`schema.Rows`: a JSONL file, or a TFDS folder in ArrayRecord.

  The prompt of a task is `prompt`, or the messages before the first assistant
  turn of `messages`. The demonstration is the rest, with further user turns as
  the environment's messages.
  """

  max_turns = 1

  def __init__(self, name: str, cfg: schema.Rows):
    self.name, self._cfg = name, cfg
    self._read: dict[str, tuple[list[types.Task], str]] = {}  # by split

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns the rows of `path` or `eval_path`; no rows if that is None.

    Raises:
      ValueError: the file or split is missing, or a row is malformed.
    """
    base.check_split(split)
    field = 'path' if split == 'train' else 'eval_path'
    path = getattr(self._cfg, field)
    if path is None:
      return sources.Shuffled((), seed)
    if split not in self._read:
      file = base.find(self.name, field, path, folders=True)
      rows = tfds.read(file, split) if file.is_dir() else jsonl.read(file)
      fingerprint = sources.file_fingerprint(file)
      self._read[split] = [self._task(row) for row in rows], fingerprint
    tasks, fingerprint = self._read[split]
    return sources.Shuffled(tasks, seed, fingerprint)

  def make(self, task: types.Task) -> 'Episode':
    return Episode(task)

  def _task(self, row: data_rows.Row) -> types.Task:
    return types.Task(
      id=row.where,
      env=self.name,
      prompt=row.prompt,
      answer=row.completion[0]['content'],  # shown beside completions
      demonstration=row.completion,
      info=row.info,
    )


@dataclasses.dataclass(frozen=True)
class Episode:
  """One turn with any text; not scorable."""

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
