"""Writes the arithmetic demonstrations as TFDS in ArrayRecord.

    python -m posttrain.envs arithmetic DIR --train_tasks=8000
"""

import argparse
import dataclasses

from posttrain import envs, schema
from posttrain.envs import export


def main() -> None:
  parser = argparse.ArgumentParser(prog='python -m posttrain.envs')
  parser.add_argument('env', choices=['arithmetic'])
  parser.add_argument('folder', help='where TFDS keeps its data sets')
  parser.add_argument('--seed', type=int, default=0)
  numbers = [f for f in dataclasses.fields(schema.Arithmetic) if f.type is int]
  for field in numbers:
    parser.add_argument(f'--{field.name}', type=int, default=field.default)
  args = parser.parse_args()
  try:
    env = envs.make('arithmetic', schema.Arithmetic(
        **{field.name: getattr(args, field.name) for field in numbers}
    ))
    print(export.export(env, args.folder, seed=args.seed))
  except ValueError as error:
    parser.error(str(error))


if __name__ == '__main__':
  main()
