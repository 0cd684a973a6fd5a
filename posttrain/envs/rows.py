"""Rows of a data file as tasks with demonstrations; not graded."""

import logging

import numpy as np

from posttrain import schema, types
from posttrain.data import row_files, rows, sources
from posttrain.envs import base


class Rows(base.Env):
  """`schema.Rows`: a JSONL file, a table, or a TFDS data set in ArrayRecord.

  The prompt of a task is `prompt`, or the messages before the first assistant
  turn of `messages`. The demonstration is the rest, with further user turns as
  the environment's messages; a row that is only a prompt has none. The answer
  is the column `answer`, or the demonstration's first message. The column
  `tools`, a list of tools or its JSON, lists the tools in the prompt; calls
  are not read. The column `chat_template_kwargs` has variables of the chat
  template.
  """

  max_turns = 1

  def __init__(self, name: str, cfg: schema.Rows):
    self.name, self._cfg = name, cfg
    self._read: dict[str, tuple[rows.Rows, str]] = {}  # by option

  def source(self, split: str, seed: int) -> base.Source:
    """Returns the rows of a split; no rows if no option names held-out ones.

    All rows are checked at once, and read again one by one.

    Raises:
      ValueError: the file or split is missing, or a row is malformed.
    """
    cfg, held_out = self._cfg, split == 'eval'
    if held_out and cfg.eval_path is not None:
      parsed, fingerprint = self._rows('eval_path', split)
      indices = range(len(parsed))
    elif held_out and not cfg.eval_fraction:
      return sources.Shuffled((), seed)
    else:
      parsed, fingerprint = self._rows('path', 'train')
      indices = range(len(parsed))
      if cfg.eval_fraction:
        try:
          splits = rows.split(parsed.hashes, cfg.eval_fraction)
        except ValueError as error:
          raise ValueError(f'envs.{self.name}.env.{error}') from None
        indices = splits[held_out]
    tasks = base.Tasks(indices, lambda i: _task(self.name, parsed[int(i)]))
    return sources.Shuffled(tasks, seed, fingerprint)

  def _rows(self, field: str, split: str) -> tuple[rows.Rows, str]:
    """Returns the rows that an option names, and their fingerprint."""
    if field not in self._read:
      path = getattr(self._cfg, field)
      if not row_files.is_tfds(path):
        path = base.find(self.name, field, path, f'; its rows have {rows.FORM}')
      key = f'config.STAGE.envs.{self.name}.env.columns'
      parsed = row_files.read(path, self._cfg.columns, split, key)
      self._read[field] = parsed, row_files.fingerprint(path, split)
      if len(self._read) == 2:
        trained, held_out = (
          np.unique(self._read[x][0].hashes) for x in ('path', 'eval_path')
        )
        if shared := np.isin(held_out, trained).sum():
          logging.getLogger('absl').warning(
            '%d of the %d prompts of envs.%s.env.eval_path are in its path as '
            'well: measurements on them are not held out',
            shared,
            len(held_out),
            self.name,
          )
    return self._read[field]

  def make(self, task: types.Task) -> base.OneTurn:
    return base.OneTurn(task)


class Suite(base.Env):
  """Prompts of `eval.suite` and `eval.suite_path`, answered without a reward.

  `refusals` says of tasks, by id, whether it is right to refuse them.
  """

  name, max_turns = 'suite', 1

  def __init__(self, cfg: schema.Eval):
    """Builds a task per prompt, in the order of display.

    Raises:
      ValueError: the file is missing, or a row is malformed.
    """
    prompts = [
      rows.Row(({'role': 'user', 'content': x},), (), f'eval.suite[{i}]')
      for i, x in enumerate(cfg.suite)
    ]
    if cfg.suite_path is not None:
      prompts += row_files.read(cfg.suite_path)
    self.tasks = tuple(_task(self.name, x) for x in prompts)
    self.refusals = {
      x.where: rows.flag(x.info, 'refusal', x.where)
      for x in prompts
      if 'refusal' in x.info
    }

  def source(self, split: str, seed: int) -> base.Source:
    """Returns the prompts for 'eval', no task for 'train'."""
    return sources.Shuffled(self.tasks if split == 'eval' else (), seed)

  def make(self, task: types.Task) -> base.OneTurn:
    return base.OneTurn(task)


def _task(env: str, row: rows.Row) -> types.Task:
  texts = (message['content'] for message in row.completion)
  return types.Task(
    id=row.where,
    env=env,
    prompt=row.prompt,
    # Shown beside completions, and an argument of reward functions.
    answer=row.info.get('answer', next(texts, None)),
    demonstration=row.completion or None,
    info=row.info,
    as_text=row.as_text,
    tools=row.tools,
    variables=row.variables,
  )
