"""Hostile queries of the SQL environment, on a database that is made here."""

import random
import resource
import sqlite3
import time
from collections import Counter

from experiments.trials import base
from posttrain.envs.sql import database

NOW = '2019-05-06 07:08:09'
_WIDE = '9' * 1500
_ESCAPES = (
  "load_extension('x')|readfile('/etc/passwd')|writefile('out','x')|"
  "edit('x','touch y')|fts3_tokenizer('simple',x'00')|zeroblob(999999999)|"
  "randomblob(999999999)|hex(zeroblob(999999))|printf('%999999999d',1)|"
  "format('%.*c',999999999,'x')|replace('a','a',zeroblob(99999))|"
  "quote(zeroblob(999999))|char(65,66)|json('[1]')|random()|sqlite_version()|"
  "date(readfile('/etc/passwd'))|date('now',load_extension('x'))|"
  "strftime(printf('%999999999d',1))|date(printf('%999999d',1))|"
  "date('now','+999999999999 days')|date('now','-999999999999 months')|"
  f"date('now','+{_WIDE} years')|date('{_WIDE}')|date({'9' * 300})|"
  "date(9e999,'+1 day')|julianday(-9e999)|time('now','+1e308 seconds')|"
  f"strftime('{'%J' * 900}','now')|strftime('{'%%' * 900}')|"
  f"strftime('{'%f' * 900}',0)|strftime(NULL,NULL)|strftime('%','now')|"
  f"date('now'{',' * 7}1)|date('now',{','.join('1' * 99)})|"
  "date(date(date(date('now','+1 day'),'+1 day'),'x'),'+1 day')|"
  "datetime('-4713-11-24 12:00:00','-1 second')|"
  "unixepoch('9999-12-31','+1 day')"
).split('|')
_QUERIES = (
  "ATTACH '{out}' AS x",
  "VACUUM INTO '{out}'",
  'PRAGMA query_only = OFF',
  "PRAGMA temp_store_directory = '{out}'",
  'SELECT * FROM pragma_database_list',
  'SELECT * FROM pragma_function_list',
  "SELECT * FROM json_each('[1,2]')",
  'SELECT date(name) FROM sqlite_master',
  'SELECT date(1); DROP TABLE pet',
  "SELECT date(1); ATTACH '{out}' AS x",
  'WITH x AS (SELECT date(1)) DELETE FROM pet RETURNING *',
  'WITH RECURSIVE x(a) AS (SELECT 1 UNION ALL SELECT a + 1 FROM x) '
  'SELECT max(date(a)) FROM x',
  'WITH x(a) AS (VALUES (1) UNION ALL SELECT date(a, 1) FROM x) '
  'SELECT * FROM x',
  "CREATE TABLE loot AS SELECT date('now')",
  "SELECT date('now') INTO loot",
  "SELECT group_concat('{long}') FROM pet, pet",
  "SELECT group_concat(strftime('{formats}', a.id)) FROM pet a, pet b",
)
_BOMBS = (
  "SELECT count(*) FROM {eight} WHERE date(p0.id + p7.id, '+1 day') = 1",
  "SELECT count(*) FROM {eight} WHERE strftime('{formats}', p0.id * p7.id) = 1",
  "SELECT max(strftime('{formats}', p0.id, '+1 month')) FROM {eight}",
  'SELECT 1 FROM {eight} ORDER BY julianday(p0.id) + julianday(p7.id)',
  'SELECT DISTINCT datetime(p0.id * p1.id * p2.id) FROM {eight}',
  "SELECT count(*) FROM {eight} GROUP BY strftime('%Y', p0.id + p1.id)",
  "SELECT count(*) FROM {eight} WHERE datetime('{long}', p0.id) > "
  "time('{long}', p1.id)",
)


# Random expressions are made of these.
_CALLS = (
  'date time datetime julianday unixepoch strftime abs upper length substr '
  'group_concat coalesce instr trim round max count like current_timestamp '
  'timediff load_extension printf zeroblob hex replace'
).split()
_VALUES = (
  "'now'~'localtime'~'utc'~'unixepoch'~'auto'~'subsec'~'+1 day'~'-1e99 years'~"
  "'+999999999999 days'~'weekday 9'~'start of month'~'%J%f%s'~'%'~''~NULL~id~"
  "name~9e999~-1~9223372036854775807~x'00ff'~x'6e6f77'~'2024-02-30'~"
  f"'{'%J' * 200}'~'{'9' * 300}'~CURRENT_DATE~*~(SELECT day FROM today)"
).split('~')


def _expression(rng: random.Random, depth: int) -> str:
  """Returns a random expression of date functions and hostile values."""
  if not depth or rng.random() < 0.2:
    return rng.choice(_VALUES)
  parts = [_expression(rng, depth - 1) for _ in range(rng.randrange(5))]
  if rng.random() < 0.15:
    return f'({" || ".join(parts) or "1"})'
  return f'{rng.choice(_CALLS)}({", ".join(parts)})'


def pets() -> bytes:
  """Returns a database with the table `pet` and the view `today`."""
  connection = sqlite3.connect(':memory:')
  connection.execute('CREATE TABLE pet (id INTEGER, name TEXT, age INTEGER)')
  connection.executemany(
    'INSERT INTO pet VALUES (?, ?, ?)',
    [(i, f'pet{i % 17}', i % 5) for i in range(50)],
  )
  connection.execute(
    "CREATE VIEW today AS SELECT date('now', 'localtime') day, "
    'CURRENT_TIMESTAMP stamp'
  )
  connection.commit()
  return connection.serialize()


def _hostile_queries(out: str) -> list[str]:
  """Returns queries that must get an error or rows; some write to `out`."""
  words = {
    '{out}': out,
    '{long}': 'x' * 1500,
    '{formats}': '%J%f' * 300,
    '{eight}': ', '.join(f'pet p{i}' for i in range(8)),
  }
  queries = [f'SELECT {call} FROM pet' for call in _ESCAPES]
  queries += [f"SELECT * FROM pet WHERE {call} > ''" for call in _ESCAPES]
  for query in (*_QUERIES, *_BOMBS):
    for word, text in words.items():
      query = query.replace(word, text)
    queries.append(query)
  rng = random.Random(7)
  pattern = 'SELECT {} FROM pet p, pet WHERE {} ORDER BY {} LIMIT 9'
  for _ in range(1000):
    parts = [_expression(rng, 3).replace('id', 'pet.id') for _ in range(3)]
    queries.append(pattern.format(*parts))
    queries.append(f'SELECT {parts[0]}, max({parts[1]}) FROM pet')
    queries.append(f'SELECT {parts[2]}')
  return queries


@base.trial('envs', 'hostile SQL gets an error or rows; nothing escapes')
def sql_escapes(scratch: base.Scratch) -> str:
  data, queries = pets(), _hostile_queries(str(scratch.folder / 'out'))
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  kinds, slowest = Counter(), 0.0
  for length, steps in ((2_000, 200_000), (10_000, 1_000_000)):
    limits = database.Limits(steps=steps, length=length)
    db = database.Database.from_bytes(data, limits, NOW)
    for query in queries:
      begin = time.process_time()
      result = db.query(query, 20)
      slowest = max(slowest, time.process_time() - begin)
      kinds['refused' if result.error else 'answered'] += 1
      assert len(result.error or '') <= 200, query
      assert len(str(result.rows)) < 300_000, query
    assert db.query('SELECT count(*) FROM pet', 1).rows == ((50,),)
    assert db._connection.serialize() == data, 'the database has changed'
    db.close()
  grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  assert not list(scratch.folder.iterdir()), 'a file was written'
  assert slowest < 3, f'a query took {slowest:.1f} s of processor time'
  assert grown < 300_000, f'{grown} KB more memory'
  return (
    f'{sum(kinds.values())} queries, {kinds["refused"]} refused; slowest '
    f'{slowest:.2f} s, {grown / 1024:.0f} MB more; no file, no change'
  )
