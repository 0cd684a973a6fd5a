"""The format of questions in a file: objects, read and checked.

    {"id": "pets_3", "db_id": "pets", "question": "How many dogs are there?",
     "gold_sql": "SELECT count(*) FROM dog", "gold_answer": [[2]],
     "answer_type": "integer", "tables": ["dog"], "difficulty": "easy"}

`gold_answers`, a list of golds, may stand for `gold_answer`: an answer that
equals any is correct, and the first is that of `gold_sql`. `ordered` tells
whether the order of the rows counts. A missing difficulty follows from the
number of tables: 1 easy, 2 medium, more hard. Other keys are ignored, except
`n_rows` (`files`).
"""

import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from posttrain.envs.sql import record
from posttrain.util import foreign

# Field of a question -> its keys in files; those of SQLEnv come second.
_NAMES = {
  'id': ('id', 'question_id'),
  'db_id': ('db_id', 'database_name'),
  'text': ('question', 'question_text'),
  'gold_sql': ('gold_sql',),
  'gold_rows': ('gold_answer', 'gold_rows', 'answer'),
  'answer_type': ('answer_type',),
  'difficulty': ('difficulty',),
  'tables': ('tables', 'tables_involved'),
}
_GOLDS = 'gold_answers'


def _is_text(value: Any) -> bool:
  return isinstance(value, str) and bool(value.strip())


# Field of a question -> (requirement in words, check of a value).
_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
  'id': ('a text or a whole number', lambda x: _is_text(x) or type(x) is int),
  'db_id': (
    'the name of a folder',
    lambda x: _is_text(x) and x == pathlib.PurePath(x).name and x != '..',
  ),
  'text': ('a text', _is_text),
  'gold_sql': ('a text', _is_text),
  'gold_rows': ('rows of cells', lambda x: x not in (None, [], '')),
  'answer_type': (
    f'one of {record.ANSWER_TYPES}',
    lambda x: x in record.ANSWER_TYPES,
  ),
  'tables': (
    'a list of names',
    lambda x: isinstance(x, list) and bool(x) and all(map(_is_text, x)),
  ),
  'difficulty': (
    f'one of {record.DIFFICULTIES}',
    lambda x: x in record.DIFFICULTIES,
  ),
}


def parse(row: Any, where: str) -> record.Question:
  """Returns the question of an object, without ranks.

  Args:
    row: a value of a JSON file.
    where: its position, 'file:line', for errors.

  Raises:
    ValueError: it is no question; begins with `where`.
  """
  if not isinstance(row, Mapping):
    raise ValueError(f'{where} must be an object: got {foreign.quote(row)}')
  _check_names(row, where)
  first, *others = _golds(row, where)
  fields = {}
  for field, (what, fits) in _FORMS.items():
    names = _NAMES[field]
    value = next((row[name] for name in names if name in row), None)
    if field == 'gold_rows':
      value = first
    if field == 'difficulty' and value is None:
      most = min(len(fields['tables']), len(record.DIFFICULTIES))
      value = record.DIFFICULTIES[most - 1]
    if not fits(value):
      raise ValueError(
        f'{where} must have {names[0]!r}: got {foreign.quote(value)}, expected '
        f'{what}; the fields are {foreign.text(sorted(row))}'
      )
    fields[field] = value
  golds = [_rows(gold, where) for gold in (first, *others)]
  for rows in golds:
    _check_shape(rows, fields['answer_type'], where)
  return record.Question(
    **{
      **fields,
      'id': str(fields['id']),
      'tables': tuple(fields['tables']),
      'gold_rows': golds[0],
      'other_golds': tuple(golds[1:]),
    }
  )


def _check_names(row: Mapping[str, Any], where: str) -> None:
  """Checks that a row has all fields; names all that it lacks."""
  optional = {'difficulty'} | ({'gold_rows'} if _GOLDS in row else set())
  missing = [
    names[0]
    for field, names in _NAMES.items()
    if field not in optional and not any(name in row for name in names)
  ]
  if missing:
    raise ValueError(
      f'{where} must have {", ".join(map(repr, missing))}: got the fields '
      f'{foreign.text(sorted(row))}; see posttrain/schema/sql.py'
    )


def is_ordered(row: Mapping[str, Any], default: bool, where: str) -> bool:
  """Returns whether the order of a question's rows counts; see `parse`."""
  value = row.get('ordered', default)
  if not isinstance(value, bool):
    raise ValueError(
      f"{where} must have 'ordered' that is true or false: got "
      f'{foreign.quote(value)}'
    )
  return value


def _golds(row: Mapping[str, Any], where: str) -> list[Any]:
  """Returns the gold answers as they are in the file; one or more."""
  singular = [name for name in _NAMES['gold_rows'] if name in row]
  if _GOLDS not in row:
    return [row[singular[0]] if singular else None]
  golds = row[_GOLDS]
  if singular or not isinstance(golds, list) or not golds:
    raise ValueError(
      f'{where} must have {_GOLDS!r}, a list of one or more golds, or a '
      f'{_NAMES["gold_rows"][0]!r}, not both: got {foreign.quote(golds)}'
    )
  if any(gold in (None, [], '') for gold in golds):
    raise ValueError(
      f'{where} must have {_GOLDS!r} that are rows of cells: got '
      f'{foreign.quote(golds)}'
    )
  return golds


def _rows(value: Any, where: str) -> record.Rows:
  """Reads a gold answer: rows of cells; a cell or a list stands for rows."""
  rows = value if isinstance(value, list) else [value]
  rows = tuple(tuple(r) if isinstance(r, list) else (r,) for r in rows)
  cells = [cell for row in rows for cell in row]
  for cell in cells:
    if type(cell) not in (int, float, str, type(None)):
      raise ValueError(
        f'{where} must have cells that are numbers, texts or null in its '
        f'gold answer: got {foreign.quote(cell)}'
      )
    if isinstance(cell, float) and not math.isfinite(cell):
      raise ValueError(f'{where} must have finite numbers: got {cell}')
  if all(cell is None for cell in cells):  # a policy that gives up says null
    raise ValueError(
      f'{where} must have a gold answer with a value that is not null: got '
      f'{foreign.quote(value)}'
    )
  return rows


def _check_shape(rows: record.Rows, answer_type: str, where: str) -> None:
  """Checks that an answer has the shape of its type."""
  widths, one = {len(row) for row in rows}, len(rows) == 1
  fits = len(widths) == 1 and (
    answer_type == 'table' or widths == {1} and (one or answer_type == 'list')
  )
  if not fits:
    raise ValueError(
      f'{where} must have a gold answer that is one {answer_type}: got '
      f'{len(rows)} rows of {sorted(widths)} cells'
    )
  kinds = {'integer': int, 'float': int | float, 'string': str}
  if not isinstance(rows[0][0], kinds.get(answer_type, record.Cell)):
    raise ValueError(
      f'{where} must have a gold answer that is one {answer_type}: got '
      f'{foreign.quote(rows[0][0])}'
    )
