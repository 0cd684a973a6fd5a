"""The data source of questions in a file about real databases (Spider's form).

1. Each question is read (`questions`), its database opened, its gold SQL run.
   If `n_rows` is larger than the number of gold rows in the file, the gold
   SQL's rows are the gold answer; if the order of rows counts, their ties are
   found (`ordering`).
2. All questions that fail are told at once, or left out (`skip_refused`).
3. A split holds whole databases: those with the lowest hashes are for
   evaluation.
"""

import codecs
import contextlib
import dataclasses
import hashlib
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain import schema
from posttrain.data import sources
from posttrain.envs import base
from posttrain.envs.sql import (
  database,
  observations,
  ordering,
  questions,
  record,
  verifier,
)
from posttrain.util import foreign, json_files

_SHOWN = 1200  # characters of refusals in one message


class Files:
  """`schema.SqlFiles`."""

  def __init__(
    self, name: str, cfg: schema.SqlFiles, difficulties: Sequence[str]
  ):
    """Reads the questions and runs their gold SQL.

    Args:
      name: the environment's name.
      cfg: the options.
      difficulties: difficulties of the questions.

    Raises:
      ValueError: a file is missing, questions are refused, or no question has
        these difficulties.
    """
    self._name, self._cfg = name, cfg
    # Rows of real tables are longer than generated ones.
    self._limits = database.Limits(steps=cfg.query_steps, length=10_000)
    self._path = base.find(name, 'data.questions', cfg.questions, folders=False)
    self._folder = base.find(
      name, 'data.databases', cfg.databases, folders=True
    )
    self._tables: dict[str, tuple[str, ...]] = {}
    self._refusals: dict[str, str] = {}  # place of a question -> why
    self._questions = self._load(difficulties)
    ids = sorted(self._tables)
    count = round(cfg.eval_share * len(ids))
    self._eval_ids = set(sorted(ids, key=_hash)[:count])

  def questions(self, split: str) -> Sequence[record.Question]:
    """Returns the questions of a split, in the file's order.

    Warns if there is none for evaluation, although `eval_share` is not 0.
    """
    evaluates = split == 'eval'
    result = [
      q for q in self._questions if (q.db_id in self._eval_ids) == evaluates
    ]
    if evaluates and not result and self._cfg.eval_share:
      logging.getLogger('absl').warning(
        'envs.%s.env.data.eval_share should hold out a database with questions '
        'of these difficulties: got %g of %d databases; there is no evaluation '
        'on this environment',
        self._name,
        self._cfg.eval_share,
        len(self._tables),
      )
    return result

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
    return self._open(db_id, self._limits)

  def tables(self, db_id: str) -> tuple[str, ...]:
    """Returns the names of a database's tables."""
    return self._tables[db_id]

  def _open(self, db_id: str, limits: database.Limits) -> database.Database:
    path = self._database(db_id)
    return database.Database.from_file(path, limits, self._cfg.now)

  def _database(self, db_id: str) -> pathlib.Path:
    return self._folder / db_id / f'{db_id}.sqlite'

  def _load(self, difficulties: Sequence[str]) -> list[record.Question]:
    """Returns the usable questions of these difficulties."""
    rows: dict[str, list[tuple[record.Question, Any, str]]] = {}
    # The keys of `ids` are in the file's order.
    ids: dict[str, None] = {}
    kinds: set[str] = set()
    lines = _read(self._path)
    for row, where in lines:
      try:
        if isinstance(row, bytes):  # a line
          row = json_files.parse(row, where)
        question = questions.parse(row, where)
        if question.id in ids:
          raise ValueError(
            f'{where} must have an id that no earlier question has: got '
            f'{foreign.quote(question.id)}'
          )
      except ValueError as error:
        self._refusals[where] = str(error)
        continue
      ids[question.id] = None
      kinds.add(question.difficulty)
      rows.setdefault(question.db_id, []).append((question, row, where))
    questions_by_id = {}
    for db_id, each in rows.items():
      questions_by_id |= self._check_database(db_id, each, difficulties)
    if self._refusals:
      self._report([where for _, where in lines])
    if not questions_by_id:
      raise ValueError(
        f'envs.{self._name}.env.difficulties must be difficulties of questions '
        f'in {self._path}: got {tuple(difficulties)}, expected some of '
        f'{sorted(kinds)}'
      )
    return [questions_by_id[id] for id in ids if id in questions_by_id]

  def _check_database(
    self,
    db_id: str,
    rows: Sequence[tuple[record.Question, Mapping[str, Any], str]],
    difficulties: Sequence[str],
  ) -> dict[str, record.Question]:
    """Returns the usable questions about a database, completed, by id."""
    found, limits = {}, self._gold_limits()
    with contextlib.ExitStack() as stack:
      try:
        db = stack.enter_context(contextlib.closing(self.open(db_id)))
        wide = stack.enter_context(
          contextlib.closing(self._open(db_id, limits))
        )
      except ValueError as error:
        for _, _, where in rows:
          self._refusals[where] = (
            f'{where}: envs.{self._name}.env.data.databases must hold the '
            f'database of every question: {foreign.text(error)}'
          )
        return {}
      self._tables[db_id] = db.tables
      for question, row, where in rows:
        if question.difficulty not in difficulties:
          continue
        try:
          _check_gold(db, question, where)
          question = _complete(wide, question, row.get('n_rows'), where)
          if questions.is_ordered(row, self._cfg.ordered, where):
            question = _rank(wide, question, 'ordered' in row, where)
          found[question.id] = question
        except ValueError as error:
          self._refusals[where] = str(error)
    return found

  def _gold_limits(self) -> database.Limits:
    """Returns the limits of a gold query: a long result, and more keys."""
    limits = self._limits
    return dataclasses.replace(
      limits,
      steps=10 * limits.steps,
      result=100_000_000,
      sql_length=2 * limits.sql_length,
      column=2 * limits.column,
    )

  def _report(self, places: Sequence[str]) -> None:
    """Logs every refusal; raises ValueError unless they are left out."""
    logger = logging.getLogger('absl')
    refusals = [self._refusals[x] for x in places if x in self._refusals]
    count, skips = len(refusals), self._cfg.skip_refused
    if count > 1 or skips:
      for refusal in refusals:
        logger.warning('refused: %s', refusal)
    if skips:
      logger.warning(
        'envs.%s.env.data: %d of %d questions are left out (skip_refused)',
        self._name,
        count,
        len(places),
      )
      return
    if count == 1:
      raise ValueError(refusals[0])
    shown = foreign.text('; '.join(refusals), _SHOWN)
    raise ValueError(
      f'envs.{self._name}.env.data.questions must hold questions that can be '
      f'used: got {count} refusals for {len(places)} questions, all of them '
      f'listed above; {shown}; correct them, or set skip_refused=True beside '
      'questions, to leave them out'
    )


def _check_gold(
  db: database.Database, question: record.Question, where: str
) -> None:
  """Refuses gold SQL that the policy could not run."""
  error = _query(db, question.gold_sql, observations.QUERY_ROWS).error
  if error:
    raise ValueError(
      f'{where}: question {foreign.text(question.id)} must have a gold_sql '
      f'that its database answers: got {foreign.quote(question.gold_sql)}, '
      f'and: {foreign.text(error)}'
    )


def _complete(
  db: database.Database, question: record.Question, count: Any, where: str
) -> record.Question:
  """Completes a gold answer whose first rows only are in the file."""
  num_rows = len(question.gold_rows)
  count = num_rows if count is None else count
  if type(count) is not int or count < num_rows:
    raise ValueError(
      f"{where} must have 'n_rows', the rows of the whole gold answer: got "
      f'{foreign.quote(count)}, expected a whole number, {num_rows} or more'
    )
  if count == num_rows:
    return question
  result = _query(db, question.gold_sql, count)
  if result.error or result.more or len(result.rows) != count:
    raise ValueError(
      f'{where} must have the number of rows of its gold_sql: got n_rows='
      f'{count}, expected {result.error or len(result.rows)}'
    )
  return dataclasses.replace(question, gold_rows=result.rows)


def _rank(
  db: database.Database, question: record.Question, demanded: bool, where: str
) -> record.Question:
  """Finds the ties of a gold answer whose order counts.

  Args:
    db: the question's database.
    question: the question, with all gold rows.
    demanded: whether the question itself says that the order counts; if only
      the options do, gold SQL without ORDER BY has no order.
    where: its position, for errors.
  """
  rows, kind = question.gold_rows, question.answer_type
  try:
    order = ordering.read(db, question.gold_sql, len(rows))
  except (ValueError, database.Timeout) as error:
    raise ValueError(
      f"{where} must have 'ordered' false or a gold_sql whose order can be "
      f'read: {foreign.text(error)}'
    ) from error
  if order is None and demanded:
    raise ValueError(
      f"{where} must have 'ordered' false where its gold_sql has no ORDER BY: "
      'got true'
    )
  if order is None or len(rows) == 1:
    return question
  part = slice(order.start, order.start + len(order.rows))
  if order.rows and not verifier.correct(
    verifier.answer(order.rows, kind), rows[part], kind, order.ranks[part]
  ):
    raise ValueError(
      f'{where} must have a gold answer in the order of its gold_sql: got '
      f'{foreign.quote(rows[part])}, expected {foreign.quote(order.rows)}'
    )
  return dataclasses.replace(question, ranks=order.ranks)


def _query(db: database.Database, sql: str, rows: int) -> database.Result:
  """Runs a query; a timeout is an error like others."""
  try:
    return db.query(sql, rows)
  except database.Timeout as error:
    return database.Result(error=str(error))


def _read(path: pathlib.Path) -> list[tuple[Any, str]]:
  """Returns the rows of a JSON list, or the lines of JSONL, and their place."""
  data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
  rows = data.splitlines()
  if data.lstrip().startswith(b'['):
    rows = json_files.parse(data, str(path))
  numbered = [
    (row, f'{path}:{i}')
    for i, row in enumerate(rows, start=1)
    if not isinstance(row, bytes) or row.strip()
  ]
  if not numbered:
    raise ValueError(f'{path} must hold questions: got none')
  return numbered


def _hash(db_id: str) -> bytes:
  return hashlib.sha256(db_id.encode()).digest()
