"""The order that a gold query gives its rows, with its ties.

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
import dataclasses
import itertools
import re
from collections.abc import Sequence

from posttrain.envs.sql import database, record

_TOKEN = re.compile(
  r"""--[^\n]*|/\*.*?(?:\*/|\Z)|"[^"]*"|'[^']*'|`[^`]*`|\[[^]]*]|"""
  r'[\w$\x80-\U0010ffff]+|\S',
  re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Clause:
  """Where a query's own ORDER BY is, and what LIMIT skips."""

  end: int  # where further keys can be inserted
  offset: str = '0'  # an expression


@dataclasses.dataclass(frozen=True)
class Order:
  """The order of a query's rows."""

  # i[rows], the position of each row's key, ascending; ties have one.
  ranks: tuple[int, ...]
  # Rows of the result from `start` on that are sure: those of whole ties. Which
  # rows of a tie LIMIT and OFFSET keep is open.
  start: int
  rows: record.Rows


def find(sql: str) -> Clause | None:
  """Returns the ORDER BY of a query; None without one.

  Those of subqueries and windows do not count.
  """
  depth, before, clause, limit = 0, '', None, None
  end, offset, stop = 0, None, len(sql)
  for match in _TOKEN.finditer(sql):
    word = match[0].lower()
    if word.startswith(('--', '/*')):
      continue
    depth += (word == '(') - (word == ')')
    if depth == 0 and word == ';':
      stop = match.start()
      break
    if depth == 0 and word == 'by' and before == 'order':
      clause = Clause(len(sql))
    elif depth == 0 and clause and limit is None and word == 'limit':
      clause, limit = Clause(end), match.end()
    elif depth == 0 and limit is not None and word == ',':
      clause = dataclasses.replace(clause, offset=sql[limit : match.start()])
    elif depth == 0 and limit is not None and word == 'offset':
      offset = match.end()
    before, end = word, match.end()
  if clause and limit is None:
    clause = Clause(end)
  if clause and offset is not None:
    clause = dataclasses.replace(clause, offset=sql[offset:stop])
  return clause


def read(db: database.Database, sql: str, count: int) -> Order | None:
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
  clause = find(sql)
  if clause is None:
    return None
  width = len(_run(db, sql, count)[0])
  (((offset,),)) = _run(db, f'SELECT max(0, 0 + ({clause.offset}\n))', 1)
  limit = f'\nLIMIT {offset + count}'
  rising, falling = (
    _run(db, sql[: clause.end] + _keys(width, way) + limit, offset + count)
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


def groups(ranks: Sequence[int]) -> list[slice]:
  """Returns the slices of equal ranks, in order."""
  sizes = [len(list(group)) for _, group in itertools.groupby(ranks)]
  ends = list(itertools.accumulate(sizes))
  return [slice(end - n, end) for end, n in zip(ends, sizes, strict=True)]


def _keys(width: int, way: str) -> str:
  return ''.join(f', {i} COLLATE BINARY{way}' for i in range(1, width + 1))


def _run(db: database.Database, sql: str, count: int) -> record.Rows:
  """Returns the rows of a query; ValueError unless there are `count`."""
  result = db.query(sql, count)
  if result.error or result.more or len(result.rows) != count:
    more = ' or more' if result.more else ''
    raise ValueError(
      f'the query must have {count} rows: got '
      f'{result.error or f"{len(result.rows)}{more}"}'
    )
  return result.rows
