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
from posttrain.envs.sql import database, dialogue, ordering, questions, verifier
from posttrain.util import disk, errors


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
    self._questions = self._load(difficulties)
    ids = sorted(
      self._tables, key=lambda db_id: hashlib.sha256(db_id.encode()).digest()
    )
    self._eval_ids = set(ids[: round(cfg.eval_share * len(ids))])

  def select(self, split: str) -> Sequence[questions.Question]:
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
    files = [self._path, *map(self._database, ids)]
    return sources.fingerprint(
      *(sources.file_fingerprint(file).encode() for file in files)
    )

  def open(
    self, db_id: str, limits: database.Limits | None = None
  ) -> database.Database:
    """Opens a database's file, read-only."""
    return database.Database.from_file(
      self._database(db_id), limits or self._limits, self._cfg.now
    )

  def tables(self, db_id: str) -> tuple[str, ...]:
    """Returns the names of a database's tables."""
    return self._tables[db_id]

  def _database(self, db_id: str) -> pathlib.Path:
    return self._folder / db_id / f'{db_id}.sqlite'

  def _load(self, difficulties: Sequence[str]) -> list[questions.Question]:
    """Returns the usable questions of these difficulties."""
    rows, refusals = _read(self._path), {}  # by place in the file
    by_database: dict[str, dict[str, questions.Question]] = {}
    ids, kinds = set(), set()
    for where, row in rows.items():
      try:
        if isinstance(row, bytes):  # a line
          rows[where] = row = disk.parse_json(row, where)
        question = questions.parse(row, where)
        if question.id in ids:
          raise ValueError(
            f'{where} must have an id that no earlier question has: got '
            f'{errors.quote(question.id)}'
          )
        ids.add(question.id)
        kinds.add(question.difficulty)
        by_database.setdefault(question.db_id, {})[where] = question
      except ValueError as error:
        refusals[where] = str(error)
    usable = {}
    for db_id, parsed in by_database.items():
      with contextlib.ExitStack() as stack:
        try:
          db, wide = (
            stack.enter_context(contextlib.closing(self.open(db_id, limits)))
            for limits in (self._limits, self._gold_limits())
          )
        except ValueError as error:
          for where in parsed:
            refusals[where] = (
              f'{where}: envs.{self._name}.env.data.databases must hold the '
              f'database of every question: {errors.text(error)}'
            )
          continue
        self._tables[db_id] = db.tables
        for where, question in parsed.items():
          if question.difficulty in difficulties:
            try:
              _check_gold(db, question, where)
              usable[where] = self._complete(wide, question, rows[where], where)
            except ValueError as error:
              refusals[where] = str(error)
    if refusals:
      self._report([refusals[x] for x in rows if x in refusals], len(rows))
    if not usable:
      raise ValueError(
        f'envs.{self._name}.env.difficulties must be difficulties of questions '
        f'in {self._path}: got {tuple(difficulties)}, expected some of '
        f'{sorted(kinds)}'
      )
    return [usable[where] for where in rows if where in usable]

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

  def _complete(
    self,
    db: database.Database,
    question: questions.Question,
    row: Mapping[str, Any],
    where: str,
  ) -> questions.Question:
    """Adds gold rows that are not in the file, and the ties of their order."""
    num_rows = len(question.gold_rows)
    count = row.get('n_rows')
    count = num_rows if count is None else count
    if type(count) is not int or count < num_rows:
      raise ValueError(
        f"{where} must have 'n_rows', the rows of the whole gold answer: got "
        f'{errors.quote(count)}, expected a whole number, {num_rows} or more'
      )
    if count > num_rows:
      result = _query(db, question.gold_sql, count)
      if result.error or result.more or len(result.rows) != count:
        raise ValueError(
          f'{where} must have the number of rows of its gold_sql: got n_rows='
          f'{count}, expected {result.error or len(result.rows)}'
        )
      question = dataclasses.replace(question, gold_rows=result.rows)
    if questions.is_ordered(row, self._cfg.ordered, where):
      return _rank(db, question, 'ordered' in row, where)
    return question

  def _report(self, refusals: Sequence[str], num_rows: int) -> None:
    """Logs every refusal; raises ValueError unless they are left out."""
    logger, skips = logging.getLogger('absl'), self._cfg.skip_refused
    count = len(refusals)
    if count == 1 and not skips:
      raise ValueError(refusals[0])
    for refusal in refusals:
      logger.warning('refused: %s', refusal)
    if not skips:
      raise ValueError(
        f'envs.{self._name}.env.data.questions must hold questions that can be '
        f'used: got {count} refusals for {num_rows} questions, all of them '
        f'listed above; {errors.text("; ".join(refusals), 1200)}; correct '
        'them, or set skip_refused=True beside questions, to leave them out'
      )
    logger.warning(
      'envs.%s.env.data: %d of %d questions are left out (skip_refused)',
      self._name,
      count,
      num_rows,
    )


def _check_gold(
  db: database.Database, question: questions.Question, where: str
) -> None:
  """Refuses gold SQL that the policy could not run."""
  error = _query(db, question.gold_sql, dialogue.QUERY_ROWS).error
  if error:
    raise ValueError(
      f'{where}: question {errors.text(question.id)} must have a gold_sql '
      f'that its database answers: got {errors.quote(question.gold_sql)}, '
      f'and: {error}'
    )


def _rank(
  db: database.Database,
  question: questions.Question,
  demanded: bool,
  where: str,
) -> questions.Question:
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
      f'read: {error}'
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
      f'{errors.quote(rows[part])}, expected {errors.quote(order.rows)}'
    )
  return dataclasses.replace(question, ranks=order.ranks)


def _query(db: database.Database, sql: str, rows: int) -> database.Result:
  """Runs a query; a timeout is an error like others."""
  try:
    return db.query(sql, rows)
  except database.Timeout as error:
    return database.Result(error=str(error))


def _read(path: pathlib.Path) -> dict[str, Any]:
  """Returns the rows of a JSON list, or the lines of JSONL, by their place."""
  data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
  rows = data.splitlines()
  if data.lstrip().startswith(b'['):
    rows = disk.parse_json(data, str(path))
  rows = {
    f'{path}:{i}': row
    for i, row in enumerate(rows, start=1)
    if not isinstance(row, bytes) or row.strip()
  }
  if not rows:
    raise ValueError(f'{path} must hold questions: got none')
  return rows
