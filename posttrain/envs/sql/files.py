"""The data source of questions in a file about real databases (Spider's form).

A split holds whole databases: those with the lowest hashes are for evaluation.
The gold answer is read from the file; if `n_rows` is larger than its number of
rows, the gold SQL is run for the complete answer. A missing difficulty follows
from the number of tables: 1 easy, 2 medium, more hard.
"""

import codecs
import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from posttrain import schema
from posttrain.data import jsonl, sources
from posttrain.envs import base
from posttrain.envs.sql import database, record

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


class Files:
  """`schema.SqlFiles`."""

  def __init__(
    self, name: str, cfg: schema.SqlFiles, difficulties: Sequence[str]
  ):
    """Reads the questions and opens each of their databases once.

    Args:
      name: the environment's name.
      cfg: the options.
      difficulties: difficulties of the questions.

    Raises:
      ValueError: a file is missing, a question is malformed, or no question has
        these difficulties.
    """
    self._name, self._cfg = name, cfg
    # Rows of real tables are longer than generated ones.
    self._limits = database.Limits(steps=cfg.query_steps, length=10_000)
    self._path = base.find(name, 'data.questions', cfg.questions, folders=False)
    self._folder = base.find(
      name, 'data.databases', cfg.databases, folders=True
    )
    rows = [
      (_question(row, where), row.get('n_rows'), where)
      for row, where in _read(self._path)
    ]
    ids = sorted({question.db_id for question, *_ in rows})
    self._tables = {db_id: self._read_tables(db_id) for db_id in ids}
    questions = [self._complete(*row) for row in rows]
    _check_unique(questions, self._path)
    self._questions = [q for q in questions if q.difficulty in difficulties]
    if not self._questions:
      raise ValueError(
        f'envs.{name}.env.difficulties must be difficulties of questions in '
        f'{self._path}: got {tuple(difficulties)}, expected some of '
        f'{sorted({q.difficulty for q in questions})}'
      )
    count = round(cfg.eval_share * len(ids))
    self._eval_ids = set(sorted(ids, key=_hash)[:count])

  def questions(self, split: str) -> Sequence[record.Question]:
    """Returns the questions of a split, in the file's order."""
    evaluates = split == 'eval'
    return [
      q for q in self._questions if (q.db_id in self._eval_ids) == evaluates
    ]

  def fingerprint(self, split: str) -> str:
    """Returns the hash of the questions and their databases."""
    del split
    ids = sorted({question.db_id for question in self._questions})
    return sources.fingerprint(
      *(
        sources.file_fingerprint(path).encode()
        for path in (self._path, *map(self._database, ids))
      )
    )

  def open(self, db_id: str) -> database.Database:
    """Opens a database's file, read-only."""
    return database.Database.from_file(self._database(db_id), self._limits)

  def tables(self, db_id: str) -> tuple[str, ...]:
    """Returns the names of a database's tables."""
    return self._tables[db_id]

  def _complete(
    self, question: record.Question, count: Any, where: str
  ) -> record.Question:
    """Completes a gold answer whose first rows only are in the file."""
    num_rows = len(question.gold_rows)
    count = num_rows if count is None else count
    if type(count) is not int or count < num_rows:
      raise ValueError(
        f"{where} must have 'n_rows', the rows of the whole gold answer: got "
        f'{count!r}, expected a whole number, {num_rows} or more'
      )
    if count == num_rows:
      return question
    limits = dataclasses.replace(self._limits, result=100_000_000)
    path = self._database(question.db_id)
    try:
      with contextlib.closing(database.Database.from_file(path, limits)) as db:
        result = db.query(question.gold_sql, count)
    except database.Timeout as error:
      result = database.Result(error=str(error))
    if result.error or result.more or len(result.rows) != count:
      raise ValueError(
        f'{where} must have the number of rows of its gold_sql: got n_rows='
        f'{count}, expected {result.error or len(result.rows)}'
      )
    return dataclasses.replace(question, gold_rows=result.rows)

  def _read_tables(self, db_id: str) -> tuple[str, ...]:
    """Returns the tables of a database; ValueError if it does not exist."""
    try:
      with contextlib.closing(self.open(db_id)) as db:
        return db.tables
    except ValueError as error:
      raise ValueError(
        f'envs.{self._name}.env.data.databases must hold the database of '
        f'every question: {error}'
      ) from error

  def _database(self, db_id: str) -> pathlib.Path:
    return self._folder / db_id / f'{db_id}.sqlite'


def _read(path: pathlib.Path) -> Iterable[tuple[Any, str]]:
  """Returns the rows of a JSON list or JSONL, each with its position."""
  data = path.read_bytes()
  if not data.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b'['):
    return jsonl.objects(path)
  try:
    rows = json.loads(data)
  except ValueError as error:  # also what bad UTF-8 raises
    raise ValueError(
      f'{path} must be a JSON list of questions, or JSONL, in UTF-8: {error}'
    ) from error
  return [(row, f'{path}:{i}') for i, row in enumerate(rows, start=1)]


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


def _question(row: Any, where: str) -> record.Question:
  if not isinstance(row, Mapping):
    raise ValueError(f'{where} must be an object: got {row!r}')
  fields = {}
  for field, (what, fits) in _FORMS.items():
    names = _NAMES[field]
    value = next((row[name] for name in names if name in row), None)
    if field == 'difficulty' and value is None:
      most = min(len(fields['tables']), len(record.DIFFICULTIES))
      value = record.DIFFICULTIES[most - 1]
    if not fits(value):
      raise ValueError(
        f'{where} must have {names[0]!r}: got {value!r}, expected {what}; '
        f'the fields are {sorted(row)}'
      )
    fields[field] = value
  rows = _rows(fields['gold_rows'], where)
  _check_shape(rows, fields['answer_type'], where)
  return record.Question(
    **{
      **fields,
      'id': str(fields['id']),
      'tables': tuple(fields['tables']),
      'gold_rows': rows,
    }
  )


def _rows(value: Any, where: str) -> record.Rows:
  """Reads a gold answer: rows of cells; a cell or a list stands for rows."""
  rows = value if isinstance(value, list) else [value]
  rows = tuple(tuple(r) if isinstance(r, list) else (r,) for r in rows)
  cells = [cell for row in rows for cell in row]
  for cell in cells:
    if type(cell) not in (int, float, str, type(None)):
      raise ValueError(
        f'{where} must have cells that are numbers, texts or null in its '
        f'gold answer: got {cell!r}'
      )
    if isinstance(cell, float) and not math.isfinite(cell):
      raise ValueError(f'{where} must have finite numbers: got {cell}')
  if all(cell is None for cell in cells):  # a policy that gives up says null
    raise ValueError(
      f'{where} must have a gold answer with a value that is not null: got '
      f'{value!r}'
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
      f'{rows[0][0]!r}'
    )


def _check_unique(
  questions: Sequence[record.Question], path: pathlib.Path
) -> None:
  ids = set()
  for question in questions:
    if question.id in ids:
      raise ValueError(
        f'{path} must have each id once: got {question.id!r} twice'
      )
    ids.add(question.id)


def _hash(db_id: str) -> bytes:
  return hashlib.sha256(db_id.encode()).digest()
