"""Export of an environment's tasks and demonstrations as a data set."""

import pathlib

from posttrain.data import rows, tfds
from posttrain.envs import base


def export(
  env: base.Env, folder: str | pathlib.Path, *, seed: int = 0
) -> pathlib.Path:
  """Writes every task of both splits as TFDS in ArrayRecord.

  Args:
    env: an environment whose tasks have demonstrations.
    folder: parent of TFDS data sets; `folder/<env.name>/...` must be new.
    seed: seed of the training source.

  Returns:
    The written folder, for `schema.Rows.path` and `eval_path`.
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
