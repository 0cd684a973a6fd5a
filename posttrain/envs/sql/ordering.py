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

from posttrain.envs.sql import cells, database


@dataclasses.dataclass(frozen=True)
class Order:
  """The order of a query's rows."""

  # i[rows], the position of each row's key, ascending; ties have one.
  ranks: tuple[int, ...]
  # Rows of the result from `start` on that are sure: those of whole ties. Which
  # rows of a tie LIMIT and OFFSET keep is open.
  start: int
  rows: cells.Rows


def find(sql: str) -> tuple[int, str] | None:
  """Finds the ORDER BY of a query; not those of subqueries and windows.

  Returns:
    (where further keys can be inserted, the expression of what LIMIT skips);
    None without ORDER BY.
  """
  depth, before, end, stop, ordered = 0, '', 0, len(sql), False
  keys_end = limit = after_offset = None
  offset = '0'
  for match in database.TOKEN.finditer(sql):
    word = match[0].lower()
    if word.startswith(('--', '/*')):
      continue
    depth += (word == '(') - (word == ')')
    if depth == 0:
      if word == ';':
        stop = match.start()
        break
      if word == 'by' and before == 'order':
        ordered = True
      elif word == 'limit' and ordered and limit is None:
        keys_end, limit = end, match.end()
      elif word == ',' and limit is not None:
        offset = sql[limit : match.start()]
      elif word == 'offset' and limit is not None:
        after_offset = match.end()
    before, end = word, match.end()
  if not ordered:
    return None
  if after_offset is not None:
    offset = sql[after_offset:stop]
  return end if keys_end is None else keys_end, offset


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
  found = find(sql)
  if found is None:
    return None
  keys_end, skipped = found
  width = len(_run(db, sql, count)[0])
  (((offset,),)) = _run(db, f'SELECT max(0, 0 + ({skipped}\n))', 1)
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


def _run(db: database.Database, sql: str, count: int) -> cells.Rows:
  """Returns the rows of a query; ValueError unless there are `count`."""
  result = db.query(sql, count)
  if result.error or result.more or len(result.rows) != count:
    more = ' or more' if result.more else ''
    raise ValueError(
      f'the query must have {count} rows: got '
      f'{result.error or f"{len(result.rows)}{more}"}'
    )
  return result.rows
