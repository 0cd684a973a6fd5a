"""Questions about databases, and their format in a file.

    {"id": "pets_3", "db_id": "pets", "question": "How many dogs are there?",
     "gold_sql": "SELECT count(*) FROM dog", "gold_answer": [[2]],
     "answer_type": "integer", "tables": ["dog"], "difficulty": "easy"}

`gold_answers`, a list of golds, may stand for `gold_answer`: an answer that
equals any is correct, and the first is that of `gold_sql`. `ordered` tells
whether the order of the rows counts. A missing difficulty follows from the
number of tables: 1 easy, 2 medium, more hard. Other keys are ignored, except
`n_rows` (`files`).
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from posttrain import schema
from posttrain.envs.sql import cells
from posttrain.util import errors

ANSWER_TYPES = ('integer', 'float', 'string', 'list', 'table')
DIFFICULTIES = schema.DIFFICULTIES


@dataclasses.dataclass(frozen=True)
class Question:
  """A question in words, with its gold SQL and answer."""

  id: str  # unique within its data set
  db_id: str
  text: str
  gold_sql: str
  gold_rows: cells.Rows  # result of `gold_sql`; never empty
  answer_type: str  # one of `ANSWER_TYPES`
  difficulty: str  # one of `DIFFICULTIES`
  tables: tuple[str, ...]  # tables that `gold_sql` reads
  template: str = ''  # template of a generated question
  other_golds: tuple[cells.Rows, ...] = ()  # further correct answers
  # The position of each gold row's key in the order of `gold_sql`, ties having
  # one; () = the order of an answer's rows does not count.
  ranks: tuple[int, ...] = ()


def _is_text(value: Any) -> bool:
  return isinstance(value, str) and bool(value.strip())


# Field of a question -> (its keys in files, those of SQLEnv last; requirement
# in words; check of a value).
_FIELDS = {
  'id': (
    ('id', 'question_id'),
    'a text or a whole number',
    lambda x: _is_text(x) or type(x) is int,
  ),
  'db_id': (
    ('db_id', 'database_name'),
    'the name of a folder',
    lambda x: _is_text(x) and x == pathlib.PurePath(x).name and x != '..',
  ),
  'text': (('question', 'question_text'), 'a text', _is_text),
  'gold_sql': (('gold_sql',), 'a text', _is_text),
  'gold_rows': (
    ('gold_answer', 'gold_rows', 'answer'),
    'rows of cells',
    lambda x: x not in (None, [], ''),
  ),
  'answer_type': (
    ('answer_type',),
    f'one of {ANSWER_TYPES}',
    lambda x: x in ANSWER_TYPES,
  ),
  'tables': (
    ('tables', 'tables_involved'),
    'a list of names',
    lambda x: isinstance(x, list) and bool(x) and all(map(_is_text, x)),
  ),
  'difficulty': (
    ('difficulty',),
    f'one of {DIFFICULTIES}',
    lambda x: x in DIFFICULTIES,
  ),
}


def parse(row: Any, where: str) -> Question:
  """Returns the question of an object, without ranks.

  Args:
    row: a value of a JSON file.
    where: its position, 'file:line', for errors.

  Raises:
    ValueError: it is no question; begins with `where`.
  """
  if not isinstance(row, Mapping):
    raise ValueError(f'{where} must be an object: got {errors.quote(row)}')
  golds = row.get('gold_answers', [None])
  if 'gold_answers' in row:
    if not isinstance(golds, list) or not golds:
      raise ValueError(
        f"{where} must have 'gold_answers', a list of one or more golds: got "
        f'{errors.quote(golds)}'
      )
    row = {**row, 'gold_answer': golds[0]}
  fields = {}
  for field, (names, requirement, fits) in _FIELDS.items():
    value = next((row[name] for name in names if name in row), None)
    if field == 'difficulty' and value is None:
      most = min(len(fields['tables']), len(DIFFICULTIES))
      value = DIFFICULTIES[most - 1]
    if not fits(value):
      raise ValueError(
        f'{where} must have {names[0]!r}: got {errors.quote(value)}, expected '
        f'{requirement}; the fields are {errors.text(sorted(row))}'
      )
    fields[field] = value
  first, *others = (
    _rows(gold, fields['answer_type'], where)
    for gold in (fields['gold_rows'], *golds[1:])
  )
  return Question(
    **fields
    | {
      'id': str(fields['id']),
      'tables': tuple(fields['tables']),
      'gold_rows': first,
      'other_golds': tuple(others),
    }
  )


def is_ordered(row: Mapping[str, Any], default: bool, where: str) -> bool:
  """Returns whether the order of a question's rows counts; see `parse`."""
  value = row.get('ordered', default)
  if not isinstance(value, bool):
    raise ValueError(
      f"{where} must have 'ordered' that is true or false: got "
      f'{errors.quote(value)}'
    )
  return value


def _rows(value: Any, answer_type: str, where: str) -> cells.Rows:
  """Reads a gold answer: rows of cells; a cell or a list stands for rows."""
  rows = value if isinstance(value, list) else [value]
  rows = tuple(tuple(r) if isinstance(r, list) else (r,) for r in rows)
  values = [cell for row in rows for cell in row]
  for cell in values:
    if type(cell) not in (int, float, str, type(None)) or (
      isinstance(cell, float) and not math.isfinite(cell)
    ):
      raise ValueError(
        f'{where} must have cells that are finite numbers, texts or null in '
        f'its gold answer: got {errors.quote(cell)}'
      )
  # A policy that gives up says null, or nothing.
  if value == '' or all(cell is None for cell in values):
    raise ValueError(
      f'{where} must have a gold answer with a value that is not null: got '
      f'{errors.quote(value)}'
    )
  widths, is_list = {len(row) for row in rows}, answer_type == 'list'
  kind = {'integer': int, 'float': int | float, 'string': str}.get(
    answer_type, cells.Cell
  )
  fits = len(widths) == 1 and (
    answer_type == 'table' or widths == {1} and (is_list or len(rows) == 1)
  )
  if not fits or not isinstance(rows[0][0], kind):
    raise ValueError(
      f'{where} must have a gold answer that is one {answer_type}: got '
      f'{len(rows)} rows of {sorted(widths)} cells, {errors.quote(value)}'
    )
  return rows
