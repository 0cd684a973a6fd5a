"""The order of gold rows: where it is, and its ties."""

import itertools
import random
import sqlite3

import pytest

from posttrain.envs.sql import database, ordering, verifier


@pytest.mark.parametrize(
  ('sql', 'before'),
  [
    ('SELECT a FROM t ORDER BY b', 'SELECT a FROM t ORDER BY b'),
    ('SELECT a FROM t ORDER BY b LIMIT 3', 'SELECT a FROM t ORDER BY b'),
    ('SELECT 1 ORDER BY b /* x */ LIMIT 3 -- y', 'SELECT 1 ORDER BY b'),
    ("SELECT 1 ORDER BY 'limit'", "SELECT 1 ORDER BY 'limit'"),
    ('SELECT 1 ORDER BY (SELECT 1 LIMIT 1)', None),
    ('SELECT a FROM t', ''),
    ('SELECT a FROM (SELECT 1 ORDER BY 1 LIMIT 2)', ''),
    ('SELECT "ORDER BY" FROM t', ''),
    ("SELECT 'ORDER BY x' -- ORDER BY y", ''),
  ],
)
def test_where_keys_can_be_inserted(sql, before):
  found = ordering.find(sql)
  expected = sql if before is None else before
  assert (sql[: found[0]] if found else '') == expected


def make(rows):
  connection = sqlite3.connect(':memory:')
  connection.execute('CREATE TABLE t (a TEXT COLLATE NOCASE, b, c)')
  connection.executemany('INSERT INTO t VALUES (?, ?, ?)', rows)
  connection.commit()
  limits = database.Limits(steps=10_000_000, sql_length=9000, column=128)
  return database.Database.from_bytes(connection.serialize(), limits)


ROWS = [('x', 3, 1), ('y', 1, 2), ('X', 1, 1), ('z', 2, 2), ('y', 1, 3)]


@pytest.mark.parametrize(
  ('sql', 'expected'),
  [
    ('SELECT a FROM t ORDER BY b', (0, 0, 0, 1, 2)),
    ('SELECT a, c FROM t ORDER BY c DESC', (0, 1, 1, 2, 2)),
    # x and X are one key of this column, and are not equal.
    ("SELECT a FROM t WHERE a = 'x' ORDER BY a", (0, 0)),
    ('SELECT a FROM t ORDER BY b LIMIT 2', (0, 0)),
    ('SELECT a FROM t ORDER BY b LIMIT 3 OFFSET 1', (0, 0, 1)),
    ('SELECT a, b FROM t UNION SELECT 7, 8 ORDER BY 2', (0, 0, 1, 2, 3)),
    ('SELECT b, count(*) FROM t GROUP BY b ORDER BY count(*)', (0, 0, 1)),
    ('SELECT DISTINCT b FROM t ORDER BY b % 2', (0, 1, 1)),
  ],
)
def test_ranks(sql, expected):
  db = make(ROWS)
  gold = db.query(sql, 99).rows
  order = ordering.read(db, sql, len(gold))
  assert (order.ranks if order else ()) == expected


@pytest.mark.parametrize(
  ('tail', 'start', 'rows'),
  [
    ('', 0, 'X y y z x'),
    ('LIMIT 2', 0, ''),  # which two of three is open
    ('LIMIT 3 OFFSET 1', 2, 'z'),
    ('LIMIT 1 OFFSET 1', 1, ''),
    ('LIMIT 1, 9', 2, 'z x'),
  ],
)
def test_rows_of_whole_ties(tail, start, rows):
  db, sql = make(ROWS), f'SELECT a FROM t ORDER BY b {tail}'
  order = ordering.read(db, sql, len(db.query(sql, 99).rows))
  assert (order.start, [a for (a,) in order.rows]) == (start, rows.split())


def test_every_valid_order_is_right_and_no_other():
  rng = random.Random(0)
  for _ in range(20):
    rows = [(rng.choice('xyz'), rng.randrange(3), i) for i in range(5)]
    db = make(rows)
    gold = db.query('SELECT a FROM t ORDER BY b', 9).rows
    ranks = ordering.read(db, 'SELECT a FROM t ORDER BY b', 5).ranks
    valid = {
      tuple(rows[i][0] for i in order)
      for order in itertools.permutations(range(5))
      if [rows[i][1] for i in order] == sorted(row[1] for row in rows)
    }
    for said in set(itertools.permutations(row[0] for row in rows)):
      right = verifier.correct('; '.join(said), gold, 'list', ranks)
      assert right == (said in valid)
