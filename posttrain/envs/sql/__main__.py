"""The command that writes generated databases and questions as files.

    python -m posttrain.envs.sql spider_like --databases=100 --split=eval

The layout is that of real data: DIR/questions.json, a list of objects, and
DIR/database/<db_id>/<db_id>.sqlite. DIR/tokenizer.json is a tokenizer of their
words, the same as configs/sql_tokenizer.json.

Exit codes: 0 done, 2 the command line is wrong, 130 interrupted.
"""

import dataclasses
import json
import pathlib
import sys
from collections import Counter
from collections.abc import Sequence

from posttrain.envs.sql import synth
from posttrain.util import commands


@dataclasses.dataclass
class Flags:
  """The command line."""

  folder: str = commands.required(
    'DIR', 'The output; a new or empty folder.', by_position=True
  )
  databases: int = commands.flag(100, 'Number of databases.')
  split: str = commands.flag(
    'train', 'The split they belong to.', choices=synth.SPLITS
  )
  seed0: int = commands.flag(0, 'Number of the first database of the split.')


PARSER = commands.Parser(Flags, __doc__)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code. `argv=None`: the process's."""
  return PARSER.run(export, argv)


def export(args: Flags) -> None:
  """Writes databases and the questions about them; prints their counts.

  Raises:
    ValueError: the folder is not empty, or a seed is out of range.
  """
  path, split = pathlib.Path(args.folder), args.split
  seeds = range(args.seed0, args.seed0 + args.databases)
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise ValueError(
      f'DIR must be a new or empty folder: got {args.folder!r}; choose another'
    )
  if not 0 <= seeds.start < seeds.stop <= synth.SPLIT_SEEDS:
    raise ValueError(
      f'--seed0 and --databases must name some of the databases 0 .. '
      f'{synth.SPLIT_SEEDS - 1}: got --seed0={args.seed0} '
      f'--databases={args.databases}'
    )
  records, counts = [], Counter()
  for seed in seeds:
    for question in synth.ask(seed, split):
      counts[question.difficulty] += 1
      fields = vars(question)
      records.append(
        {x: fields[x] for x in ('id', 'db_id')}
        | {'question': question.text}
        | {x: fields[x] for x in ('gold_sql', 'answer_type')}
        | {'gold_answer': question.gold_rows, 'n_rows': len(question.gold_rows)}
        | {x: fields[x] for x in ('tables', 'difficulty')}
      )
    db_id = records[-1]['db_id']
    db_folder = path / 'database' / db_id
    db_folder.mkdir(parents=True)
    (db_folder / f'{db_id}.sqlite').write_bytes(synth.write(seed, split))
  text = ',\n'.join(map(json.dumps, records))
  (path / 'questions.json').write_text(f'[\n{text}\n]\n')
  (path / 'tokenizer.json').write_text(synth.tokenizer())
  print(
    f'{path}: {len(seeds)} databases, {len(records)} questions ('
    + ', '.join(f'{counts[kind]} {kind}' for kind in synth.TEMPLATES)
    + f'), fingerprint {synth.fingerprint(seeds, split)}'
  )


if __name__ == '__main__':
  sys.exit(main())
