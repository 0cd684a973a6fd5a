"""The command that writes generated databases and questions as files.

    python -m posttrain.envs.sql spider_like --databases=100 --split=eval

The layout is that of real data: DIR/questions.json, a list of objects, and
DIR/database/<db_id>/<db_id>.sqlite. DIR/tokenizer.json is a tokenizer of their
words, the same as configs/sql_tokenizer.json.

Exit codes: 0 done, 2 the command line is wrong, 130 interrupted.
"""

import dataclasses
import functools
import json
import pathlib
import sys
from collections import Counter

from posttrain.envs.sql import synth
from posttrain.util import commands


@dataclasses.dataclass
class Flags:
  """The command line."""

  folder: str = commands.required(
    'DIR', 'The output; a folder without databases.', by_position=True
  )
  databases: int = commands.flag(100, 'Number of databases.', least=1)
  split: str = commands.flag(
    'train', 'The split they belong to.', choices=synth.SPLITS
  )
  seed0: int = commands.flag(
    0, 'Number of the first database of the split.', least=0
  )


PARSER = commands.Parser(Flags, __doc__)


def export(args: Flags) -> None:
  """Writes databases and the questions about them; prints their counts.

  Raises:
    FileExistsError: the folder has databases.
  """
  folder = pathlib.Path(args.folder)
  numbers = synth.numbers(args.split, args.databases, args.seed0)
  records, counts = [], Counter()
  (folder / 'database').mkdir(parents=True)
  for number in numbers:
    db_id = f'synth_{number}'
    file = folder / 'database' / db_id / f'{db_id}.sqlite'
    file.parent.mkdir()
    file.write_bytes(synth.write(number))
    for question in synth.ask(number):
      counts[question.difficulty] += 1
      records.append(
        {
          'id': question.id,
          'db_id': db_id,
          'question': question.text,
          'gold_sql': question.gold_sql,
          'answer_type': question.answer_type,
          'gold_answer': question.gold_rows,
          'n_rows': len(question.gold_rows),
          'tables': question.tables,
          'difficulty': question.difficulty,
        }
      )
  text = ',\n'.join(map(json.dumps, records))
  (folder / 'questions.json').write_text(f'[\n{text}\n]\n')
  (folder / 'tokenizer.json').write_text(synth.tokenizer())
  print(
    f'{folder}: {len(numbers)} databases, {len(records)} questions ('
    + ', '.join(f'{counts[kind]} {kind}' for kind in synth.TEMPLATES)
    + f'), fingerprint {synth.fingerprint(numbers)}'
  )


# Returns the exit code; takes the arguments, None = those of the process.
main = functools.partial(PARSER.run, export)

if __name__ == '__main__':
  sys.exit(main())
