"""Questions of a file, about real databases, such as Spider's.

A split holds whole databases: those whose hash is lowest are for evaluation.
What the file says the answer is, is taken as it stands, unless `n_rows` says
that there is more of it, which the database then tells; a difficulty that it
does not say is told by the number of tables: 1 easy, 2 medium, more hard.
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

# Field of a question -> what files call it; those of SQLEnv come second.
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
    """Reads the questions, and looks for their databases.

    Raises:
      ValueError: a file is missing (names it), a question is malformed (names
        its place), or none is left.
    """
    self._name, self._cfg = name, cfg
    # Rows of real tables are longer than generated ones.
    self._limits = database.Limits(steps=cfg.query_steps, length=10_000)
    self._path = base.find(name, 'data.questions', cfg.questions, folders=False)
    self._folder = base.find(
      name, 'data.databases', cfg.databases, folders=True
    )
    read = [
      (_question(row, where), row.get('n_rows'), where)
      for row, where in _read(self._path)
    ]
    ids = sorted({question.db_id for question, *_ in read})
    self._tables = {db_id: self._look(db_id) for db_id in ids}
    found = [self._whole(*each) for each in read]
    _check_unique(found, self._path)
    self._questions = [q for q in found if q.difficulty in difficulties]
    if not self._questions:
      raise ValueError(
        f'envs.{name}.env.difficulties must be of questions that '
        f'{self._path} has: got {tuple(difficulties)}, expected some of '
        f'{sorted({q.difficulty for q in found})}'
      )
    count = round(cfg.eval_share * len(ids))
    self._kept = set(sorted(ids, key=_hash)[:count])

  def questions(self, split: str) -> Sequence[record.Question]:
    """Returns the questions of a split, in the file's order."""
    kept = split == 'eval'
    return [q for q in self._questions if (q.db_id in self._kept) == kept]

  def fingerprint(self, split: str) -> str:
    """The hash of the questions and of the databases they ask about."""
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
    """The names of a database's tables."""
    return self._tables[db_id]

  def _whole(
    self, question: record.Question, count: Any, where: str
  ) -> record.Question:
    """Completes a gold answer of which the file has the first rows alone."""
    has = len(question.gold_rows)
    count = has if count is None else count
    if type(count) is not int or count < has:
      raise ValueError(
        f"{where} must have 'n_rows', the rows of the whole gold answer: got "
        f'{count!r}, expected a whole number, {has} or more'
      )
    if count == has:
      return question
    limits = dataclasses.replace(self._limits, result=100_000_000)
    path = self._database(question.db_id)
    try:
      with contextlib.closing(database.Database.from_file(path, limits)) as db:
        found = db.query(question.gold_sql, count)
    except database.Timeout as error:
      found = database.Result(error=str(error))
    if found.error or found.more or len(found.rows) != count:
      raise ValueError(
        f'{where} must say how many rows its gold_sql gives: got n_rows='
        f'{count}, expected {found.error or len(found.rows)}'
      )
    return dataclasses.replace(question, gold_rows=found.rows)

  def _look(self, db_id: str) -> tuple[str, ...]:
    """Opens a database for its tables; ValueError where there is none."""
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
  """Returns the rows of a JSON list, or of JSONL, with their places."""
  data = path.read_bytes()
  if not data.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b'['):
    return jsonl.objects(path)
  try:
    rows = json.loads(data)
  except ValueError as error:  # also what bad UTF-8 raises
    raise ValueError(
      f'{path} must be a JSON list of questions, or JSONL, in UTF-8: {error}'
    ) from error
  return [(row, f'{path}:{at}') for at, row in enumerate(rows, start=1)]


def _is_text(value: Any) -> bool:
  return isinstance(value, str) and bool(value.strip())


# Field of a question -> (what it must be, whether a value is).
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
  if all(cell is None for cell in cells):  # who gives up says so too
    raise ValueError(
      f'{where} must have a gold answer with a value that is not null: got '
      f'{value!r}'
    )
  return rows


def _check_shape(rows: record.Rows, answer_type: str, where: str) -> None:
  """Refuses an answer that is not of its type."""
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


def _check_unique(found: Sequence[record.Question], path) -> None:
  seen = set()
  for question in found:
    if question.id in seen:
      raise ValueError(
        f'{path} must have each id once: got {question.id!r} twice'
      )
    seen.add(question.id)


def _hash(db_id: str) -> bytes:
  return hashlib.sha256(db_id.encode()).digest()
