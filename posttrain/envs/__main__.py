"""The command that writes arithmetic demonstrations as TFDS in ArrayRecord.

    python -m posttrain.envs arithmetic datasets --train_tasks=8000 \\
        --ops="('+', 'x')" --worked=false

Prints the folder of the data set, which `path` of a `rows` environment takes.

Exit codes: 0 done, 2 the command line is wrong, 130 interrupted.
"""

import dataclasses
import functools
import pathlib
import sys
from typing import Any

from posttrain import schema
from posttrain.data import row_files, rows
from posttrain.envs import base, registry
from posttrain.util import commands

OPTIONS = dataclasses.fields(schema.Arithmetic)[1:]  # all but `type`


@dataclasses.dataclass
class Common:
  """The flags besides the options of the environment."""

  env: str = commands.required(
    'ENV', 'The environment.', choices=('arithmetic',), by_position=True
  )
  folder: str = commands.required(
    'DIR', 'The folder of all TFDS data sets.', by_position=True
  )
  seed: int = commands.flag(0, 'The seed of the training questions.')


Flags = dataclasses.make_dataclass(
  'Flags',
  [
    (x.name, x.type, commands.option(schema.Arithmetic, x.name))
    for x in OPTIONS
  ],
  bases=(Common,),
)
PARSER = commands.Parser(Flags, __doc__)


def _run(args: Any) -> None:
  options = {field.name: getattr(args, field.name) for field in OPTIONS}
  env = registry.make(args.env, schema.Arithmetic(**options))
  print(export(env, args.folder, seed=args.seed))


def export(
  env: base.Env, folder: str | pathlib.Path, *, seed: int
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
  return row_files.write_tfds(splits, env.name, folder)


# Returns the exit code; takes the arguments, None = those of the process.
main = functools.partial(PARSER.run, _run)

if __name__ == '__main__':
  sys.exit(main())
