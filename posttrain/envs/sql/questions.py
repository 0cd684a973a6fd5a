"""Questions about databases: their format in a file, and the file as a source.

    {"id": "pets_3", "db_id": "pets", "question": "How many dogs are there?",
     "gold_sql": "SELECT count(*) FROM dog", "gold_answer": [[2]],
     "answer_type": "integer", "tables": ["dog"], "difficulty": "easy"}

`gold_answers`, a list of golds, may stand for `gold_answer`: an answer that
equals any is correct, and the first is that of `gold_sql`. `ordered` tells
whether the order of the rows counts. A missing difficulty follows from the
number of tables: 1 easy, 2 medium, more hard. Other keys are ignored, except
`n_rows`.

Spider's own JSON has the gold SQL as `query`, and neither answer nor id: the
answer is the query's result, and the tables are those that it names. Questions
of it that are refused, most of them for an empty result, are left out.

1. Each question of the file is read, its database opened, its gold SQL run. If
   `n_rows` is larger than the number of gold rows in the file, the gold SQL's
   rows are the gold answer; if the order of rows counts, their ties are found.
2. All questions that fail are told at once, or left out (`skip_refused`).
3. A split holds whole databases: those with the lowest hashes are for
   evaluation.

Rows with equal keys of ORDER BY may come in any order. The keys need not be
columns of the result, so the ties are found by two runs of the query, whose
ORDER BY has all columns of the result as further keys: ascending, then
descending. Both runs hold the same rows up to a place if and only if no tie
goes over it.

    SELECT name FROM pet ORDER BY age         ages  1    2    2    5
      ORDER BY age, 1 COLLATE BINARY                Ann  Bob  Cid  Eve
      ORDER BY age, 1 COLLATE BINARY DESC           Ann  Cid  Bob  Eve
                                              ranks 0    1    1    2
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import logging
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain import schema
from posttrain.data import row_files, sources
from posttrain.envs import base
from posttrain.envs.sql import database, dialogue, verifier
from posttrain.util import errors


@dataclasses.dataclass(frozen=True)
class Question:
  """A question in words, with its gold SQL and answer."""

  id: str  # unique within its data set
  db_id: str
  text: str
  gold_sql: str
  gold_rows: database.Rows  # result of `gold_sql`; never empty
  answer_type: str  # one of `verifier.ANSWER_TYPES`
  difficulty: str  # one of `schema.DIFFICULTIES`
  tables: tuple[str, ...]  # tables that `gold_sql` reads
  template: str = ''  # template of a generated question
  other_golds: tuple[database.Rows, ...] = ()  # further correct answers
  # The position of each gold row's key in the order of `gold_sql`, ties having
  # one; () = the order of an answer's rows does not count.
  ranks: tuple[int, ...] = ()


# Where the data are from, for errors.
_HINT = (
  "; Spider's dev.json and its folder database/ are read as they are: "
  'https://yale-lily.github.io/spider'
)
_MOST_ROWS = 100_000  # of a gold answer
# Key of a question in a file -> its type or its values.
_KINDS: dict[str, Any] = {
  'id': str | int,
  'db_id': str,
  'question': str,
  'gold_sql': str,
  'gold_answer': object,
  'answer_type': verifier.ANSWER_TYPES,
  'tables': list,
  'difficulty': schema.DIFFICULTIES,
}


def parse(row: Mapping[str, Any]) -> Question:
  """Returns the question of a JSON object, without ranks.

  Raises:
    ValueError: it is no question.
  """
  golds = row.get('gold_answers', [row.get('gold_answer')])
  some = isinstance(golds, list) and golds
  row = {**row, 'gold_answer': golds[0] if some else None}
  fields: dict[str, Any] = {}
  for field, kind in _KINDS.items():
    value = row.get(field)
    if field == 'difficulty' and value is None:
      most = min(len(fields['tables']), len(schema.DIFFICULTIES))
      value = schema.DIFFICULTIES[most - 1]
    fits = value in kind if isinstance(kind, tuple) else isinstance(value, kind)
    if not fits or value in (None, '', []):
      raise ValueError(
        f'{field!r} must be of {kind}: got {errors.quote(value)}; the fields '
        f'are {errors.text(sorted(row))}'
      )
    fields[field] = value
  # Gold answers are rows of cells; a cell or a list stands for rows.
  kinds = {'integer': int, 'float': int | float, 'string': str}
  kind = fields['answer_type']
  parsed = []
  for value in (fields.pop('gold_answer'), *golds[1:]):
    rows = value if isinstance(value, list) else [value]
    rows = tuple(tuple(r) if isinstance(r, list) else (r,) for r in rows)
    values = [cell for row in rows for cell in row]
    widths = {len(row) for row in rows}
    fits = (
      all(type(x) in (int, float, str, type(None)) for x in values)
      and all(math.isfinite(x) for x in values if isinstance(x, float))
      # A policy that gives up says null, or nothing.
      and any(x is not None for x in values)
      and value != ''
      and len(widths) == 1
      and (kind == 'table' or widths == {1})
      and (kind in ('list', 'table') or len(rows) == 1)
      and isinstance(rows[0][0], kinds.get(kind, object))
    )
    if not fits:
      raise ValueError(
        f'a gold answer must be one {kind} of finite numbers, texts and nulls, '
        f'with a value that is not null: got {errors.quote(value)}'
      )
    parsed.append(rows)
  fields['id'], fields['tables'] = str(fields['id']), tuple(fields['tables'])
  return Question(
    text=fields.pop('question'),
    gold_rows=parsed[0],
    other_golds=tuple(parsed[1:]),
    **fields,
  )


class Files:
  """`schema.SqlFiles`: a data source."""

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
    # A gold query may have a long result, and more keys of ORDER BY.
    self._wide = dataclasses.replace(
      self._limits,
      steps=10 * self._limits.steps,
      result=100_000_000,
      sql_length=2 * self._limits.sql_length,
      column=2 * self._limits.column,
    )
    self._path = base.find(name, 'data.questions', cfg.questions, _HINT)
    self._folder = base.find(name, 'data.databases', cfg.databases, _HINT)
    folders = {x.parents[1] for x in self._folder.rglob('*.sqlite')}
    if self._folder not in folders:
      raise ValueError(
        f'envs.{name}.env.data.databases must hold a folder per database, as '
        f'NAME/NAME.sqlite: got {self._folder}, which has none; folders in it '
        f'that have: {", ".join(map(str, folders)) or "none"}'
      )
    self._tables: dict[str, tuple[str, ...]] = {}
    self._questions = self._load(difficulties)
    ids = sorted(
      self._tables, key=lambda db_id: hashlib.sha256(db_id.encode()).digest()
    )
    self._eval_ids = set(ids[: round(cfg.eval_share * len(ids))])

  def select(self, split: str) -> Sequence[Question]:
    """Returns the questions of a split, in the file's order."""
    evaluates = split == 'eval'
    return [
      q for q in self._questions if (q.db_id in self._eval_ids) == evaluates
    ]

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
    return database.Database(
      self._database(db_id), limits or self._limits, self._cfg.now
    )

  def tables(self, db_id: str) -> tuple[str, ...]:
    """Returns the names of a database's tables."""
    return self._tables[db_id]

  def _database(self, db_id: str) -> pathlib.Path:
    return self._folder / db_id / f'{db_id}.sqlite'

  def _load(self, difficulties: Sequence[str]) -> list[Question]:
    """Returns the usable questions of these difficulties."""
    usable, refusals, ids = [], [], set()
    skips = self._cfg.skip_refused
    for row, where in row_files.objects(self._path):
      try:
        if 'query' in row and 'gold_sql' not in row:
          name, skips = pathlib.Path(where).name, True
          row = {'id': name, **self._answered(row)}
        question = parse(row)
        if question.id in ids:
          raise ValueError(
            "'id' must not be that of an earlier question: got "
            f'{errors.quote(question.id)}'
          )
        ids.add(question.id)
        with contextlib.closing(self.open(question.db_id)) as db:
          self._tables[question.db_id] = db.tables
          if question.difficulty in difficulties:
            usable.append(self._complete(db, question, row))
      except (ValueError, database.Timeout) as error:
        refusals.append(f'{where}: {error}')
    logger = logging.getLogger('absl')
    for refusal in refusals[:20]:
      logger.warning('refused: %s', refusal)
    if not usable or (refusals and not skips):
      raise ValueError(
        f'envs.{self._name}.env.data.questions must hold questions that can be '
        f'used, of difficulties {tuple(difficulties)}: got {len(usable)} and '
        f'{len(refusals)} refusals, the first ones listed above '
        f'({errors.text("; ".join(refusals), 1200)}); skip_refused=True beside '
        'questions leaves them out'
      )
    if refusals:
      logger.warning(
        'envs.%s.env.data: %d of %d questions are refused, and left out',
        self._name,
        len(refusals),
        len(refusals) + len(usable),
      )
    return usable

  def _answered(self, row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a question of Spider's JSON with our keys, by its query."""
    sql = str(row['query'])
    with contextlib.closing(self.open(str(row.get('db_id')), self._wide)) as db:
      result = db.query(sql, _MOST_ROWS)
      words = set(database.TOKEN.findall(sql.lower()))
      tables = [x for x in db.tables if x.lower() in words]
    if not result.rows:
      raise ValueError(
        f"'query' must have a result: got {errors.quote(sql)}, and: "
        f'{result.error or "no rows"}'
      )
    first, *others = result.rows
    kind = {int: 'integer', float: 'float'}.get(type(first[0]), 'string')
    kind = 'table' if first[1:] else 'list' if others else kind
    return {
      **row,
      'gold_sql': sql,
      'gold_answer': list(map(list, result.rows)),
      'answer_type': kind,
      'tables': tables,
    }

  def _complete(
    self, db: database.Database, question: Question, row: Mapping[str, Any]
  ) -> Question:
    """Adds gold rows that are not in the file, and the ties of their order.

    Args:
      db: the question's database.
      question: the question.
      row: its object in the file.

    Raises:
      ValueError: the gold SQL does not run, or has another result.
      Timeout: it takes too long.
    """
    gold_sql, rows = question.gold_sql, question.gold_rows
    if error := db.query(gold_sql, dialogue.QUERY_ROWS).error:
      raise ValueError(
        f"'gold_sql' must be a query that its database answers: got "
        f'{errors.quote(gold_sql)}, and: {error}'
      )
    count = row.get('n_rows') or len(rows)
    ordered = row.get('ordered', self._cfg.ordered)
    if type(count) is not int or count < len(rows) or type(ordered) is not bool:
      raise ValueError(
        f"'n_rows' must be a whole number, {len(rows)} or more, and 'ordered' "
        f'true or false: got {errors.quote((count, ordered))}'
      )
    with contextlib.closing(self.open(question.db_id, self._wide)) as wide:
      if count > len(rows):
        rows = _run(wide, gold_sql, count)
        question = dataclasses.replace(question, gold_rows=rows)
      order = read_order(wide, gold_sql, count) if ordered else None
    # If only the options say that the order counts, gold SQL without ORDER BY
    # has no order.
    if ordered and order is None and 'ordered' in row:
      raise ValueError("'ordered' must be false without ORDER BY: got true")
    if order is None or count == 1:
      return question
    part = slice(order.start, order.start + len(order.rows))
    kind, sure = question.answer_type, verifier.answer(order.rows)
    if order.rows and not verifier.correct(
      sure, rows[part], kind, order.ranks[part]
    ):
      raise ValueError(
        'a gold answer must be in the order of its gold_sql: got '
        f'{errors.quote(rows[part])}, expected {errors.quote(order.rows)}'
      )
    return dataclasses.replace(question, ranks=order.ranks)


@dataclasses.dataclass(frozen=True)
class Order:
  """The order of a query's rows."""

  # i[rows], the position of each row's key, ascending; ties have one.
  ranks: tuple[int, ...]
  # Rows of the result from `start` on that are sure: those of whole ties. Which
  # rows of a tie LIMIT and OFFSET keep is open.
  start: int
  rows: database.Rows


def find_order(sql: str) -> tuple[int, str] | None:
  """Finds the ORDER BY of a query; not those of subqueries and windows.

  Returns:
    (where further keys can be inserted, the expression of what LIMIT skips);
    None without ORDER BY.
  """
  depth, tokens = 0, []  # those outside of parentheses
  for match in database.TOKEN.finditer(sql):
    depth += (match[0] == '(') - (match[0] == ')')
    if depth == 0 and match[0] == ';':
      break
    if depth == 0 and not match[0].startswith(('--', '/*')):
      tokens.append(match)
  words = [match[0].lower() for match in tokens]
  pairs = list(itertools.pairwise(words))
  if ('order', 'by') not in pairs:
    return None
  end, offset = tokens[-1].end(), '0'
  first = pairs.index(('order', 'by'))
  if 'limit' in words[first:]:
    limit = words.index('limit', first)
    if 'offset' in words[limit:]:
      offset = sql[tokens[words.index('offset', limit)].end() : end]
    elif ',' in words[limit:]:
      comma = words.index(',', limit)
      offset = sql[tokens[limit].end() : tokens[comma].start()]
    end = tokens[limit - 1].end()
  return end, offset


def read_order(db: database.Database, sql: str, count: int) -> Order | None:
  """Returns the order of the gold rows.

  Args:
    db: the database, with limits for a query twice as long as `sql`.
    sql: the gold query.
    count: the number of its rows.

  Returns:
    The order; None if the query has no ORDER BY.

  Raises:
    ValueError: the query does not run, or has another number of rows.
    Timeout: as `Database.query`.
  """
  place = find_order(sql)
  if place is None:
    return None
  keys_end, skipped = place
  width = len(_run(db, sql, count)[0])
  ((offset,),) = _run(db, f'SELECT max(0, 0 + ({skipped}\n))', 1)
  limit = f'\nLIMIT {offset + count}'
  rising, falling = (
    _run(
      db,
      sql[:keys_end]
      + ''.join(f', {i + 1} COLLATE BINARY{way}' for i in range(width))
      + limit,
      offset + count,
    )
    for way in ('', ' DESC')
  )
  ranks, rank, whole = [], 0, 0
  surplus: collections.Counter = collections.Counter()
  for up, down in zip(rising, falling, strict=True):
    ranks.append(rank)
    surplus[up] += 1
    surplus[down] -= 1
    for row in (up, down):
      if not surplus[row]:
        del surplus[row]
    rank += not surplus
    whole = whole if surplus else len(ranks)
  cut = ranks[offset - 1] if offset else -1
  start = sum(rank <= cut for rank in ranks)
  return Order(
    tuple(ranks[offset:]), start - offset, rising[start : max(whole, start)]
  )


def _run(db: database.Database, sql: str, count: int) -> database.Rows:
  """Returns the rows of a query; ValueError unless there are `count`."""
  result = db.query(sql, count)
  if result.error or result.more or len(result.rows) != count:
    raise ValueError(
      f'the query must have {count} rows: got {len(result.rows)} (more: '
      f'{result.more}, error: {result.error})'
    )
  return result.rows
