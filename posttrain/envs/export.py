"""Writes an environment's tasks and demonstrations as a data set."""

import pathlib

from posttrain.data import rows, tfds
from posttrain.envs import base


def export(
  env: base.Env, folder: str | pathlib.Path, *, seed: int = 0
) -> pathlib.Path:
  """Writes every task of both splits as TFDS in ArrayRecord.

  Args:
    env: one whose tasks carry demonstrations.
    folder: where TFDS keeps its data sets; `folder/<env.name>/...` is new.
    seed: of the training source.

  Returns:
    The folder that `schema.Rows.path` (and `eval_path`) can name.
  """
  splits = {}
  for split in base.SPLITS:
    source = env.source(split, seed)
    splits[split] = [
      rows.Row(
        prompt=task.prompt,
        completion=task.demonstration,
        where=f'{env.name}:{split}:{task.id}',
        info={'id': task.id, 'answer': task.answer, **task.info},
      )
      for task in source.take(len(source))
    ]
  return tfds.write(splits, env.name, folder)
