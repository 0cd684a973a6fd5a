"""Writes the arithmetic demonstrations as TFDS in ArrayRecord.

    python -m posttrain.envs arithmetic DIR --train_tasks=8000 \\
        --ops="('+', 'x')" --worked=False

Every option of `schema.Arithmetic` is a flag, its value a Python literal, or a
text as it is.
"""

import argparse
import ast
import dataclasses
from collections.abc import Callable
from typing import Any

from posttrain import envs, schema
from posttrain.envs import export


def _literal(kind: type) -> Callable[[str], Any]:
  """Returns a parser of literals of exactly that type: True is no int."""
  if kind is str:
    return str

  def parse(text: str) -> Any:
    try:
      value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
      value = None
    if type(value) is not kind:
      raise argparse.ArgumentTypeError(
        f'must be a literal of type {kind.__name__}: got {text!r}'
      )
    return value

  return parse


def main() -> None:
  parser = argparse.ArgumentParser(prog='python -m posttrain.envs')
  parser.add_argument('env', choices=['arithmetic'])
  parser.add_argument('folder', help='where TFDS keeps its data sets')
  parser.add_argument('--seed', type=int, default=0)
  fields = [
    field
    for field in dataclasses.fields(schema.Arithmetic)
    if field.name != 'type'
  ]
  for field in fields:
    parser.add_argument(
      f'--{field.name}',
      type=_literal(type(field.default)),
      default=field.default,
      help=f'default: {field.default!r}',
    )
  args = parser.parse_args()
  try:
    env = envs.make(
      'arithmetic',
      schema.Arithmetic(
        **{field.name: getattr(args, field.name) for field in fields}
      ),
    )
    print(export.export(env, args.folder, seed=args.seed))
  except ValueError as error:
    parser.error(str(error))


if __name__ == '__main__':
  main()
