"""Writes generated databases and questions as files.

    python -m posttrain.envs.sql DIR --databases=100 --split=eval

The form is that of real data: DIR/questions.json, a list of objects, and
DIR/database/<db_id>/<db_id>.sqlite. DIR/tokenizer.json knows their words; it is
what configs/sql_tokenizer.json holds.
"""

import argparse
import json
import pathlib
from collections import Counter
from collections.abc import Sequence

from posttrain.envs.sql import record, schemas, synth, tokenizer


def export(folder: str, seeds: range, split: str) -> str:
  """Writes databases and the questions about them.

  Args:
    folder: a new or an empty one.
    seeds: numbers of databases within their split.
    split: of `schemas.SPLITS`.

  Returns:
    What was written, in words.

  Raises:
    ValueError: the folder has something in it, or a seed is none.
  """
  path = pathlib.Path(folder)
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise ValueError(
      f'DIR must be a new or an empty folder: got {folder!r}; name another'
    )
  if not 0 <= seeds.start < seeds.stop <= schemas.SPLIT_SEEDS:
    raise ValueError(
      f'--seed0 and --databases must name some of the databases 0 .. '
      f'{schemas.SPLIT_SEEDS - 1}: got --seed0={seeds.start} '
      f'--databases={len(seeds)}'
    )
  asked: list[record.Question] = []
  for seed in seeds:
    asked += synth.questions(seed, split)
    db_id = asked[-1].db_id
    place = path / 'database' / db_id
    place.mkdir(parents=True)
    (place / f'{db_id}.sqlite').write_bytes(synth.database(seed, split))
  text = ',\n'.join(json.dumps(_object(question)) for question in asked)
  (path / 'questions.json').write_text(f'[\n{text}\n]\n')
  (path / 'tokenizer.json').write_text(tokenizer.make(tokenizer.vocabulary()))
  counts = Counter(question.difficulty for question in asked)
  return (
    f'{folder}: {len(seeds)} databases, {len(asked)} questions ('
    + ', '.join(f'{counts[kind]} {kind}' for kind in record.DIFFICULTIES)
    + f'), fingerprint {synth.fingerprint(seeds, split)}'
  )


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(prog='python -m posttrain.envs.sql')
  parser.add_argument('folder', metavar='DIR', help='new or empty')
  parser.add_argument('--databases', type=int, default=100)
  parser.add_argument('--split', choices=schemas.SPLITS, default='train')
  parser.add_argument(
    '--seed0', type=int, default=0, help='the first database of the split'
  )
  args = parser.parse_args(argv)
  seeds = range(args.seed0, args.seed0 + args.databases)
  try:
    print(export(args.folder, seeds, args.split))
  except ValueError as error:
    parser.error(str(error))


def _object(question: record.Question) -> dict:
  return {
    'id': question.id,
    'db_id': question.db_id,
    'question': question.text,
    'gold_sql': question.gold_sql,
    'answer_type': question.answer_type,
    'gold_answer': question.gold_rows,
    'n_rows': len(question.gold_rows),
    'tables': question.tables,
    'difficulty': question.difficulty,
  }


if __name__ == '__main__':
  main()
