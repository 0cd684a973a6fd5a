"""Faults of the SQL environment: hostile queries, clocks, data sets.

All in this process, on data that the trials make.
"""

import contextlib
import itertools
import json
import logging
import os
import random
import resource
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator

from experiments.trials import base
from experiments.trials import envs as foreign_envs
from posttrain import envs, schema
from posttrain.envs.sql import database, dates, ordering, verifier

NOW = '2019-05-06 07:08:09'
_CLOCKS = (
  "date('now')~time('now')~datetime('now')~julianday('now')~unixepoch('now')~"
  "strftime('%s %f','now')~date()~time()~datetime()~julianday()~unixepoch()~"
  "strftime('%s')~CURRENT_TIMESTAMP~CURRENT_DATE~CURRENT_TIME~date('NOW')~"
  "date('n'||'ow')~date(x'6e6f77')~date(lower('NOW'))~datetime('subsec')~"
  "datetime('subsecond')~datetime('now','localtime')~datetime('now','utc')~"
  "datetime('now','localtime','utc')~datetime(0,'unixepoch','localtime')~"
  "datetime('2024-07-01','localtime')~datetime('2024-07-01','LOCALTIME')~"
  "datetime('2024-07-01',x'6c6f63616c74696d65')~datetime(1.7e9,'auto','utc')~"
  "datetime(coalesce(NULL,'now'),substr('xlocaltime',2))~"
  "strftime('%Y-%m-%d %H:%M','now','start of month','localtime')"
).split('~')
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


def _pets() -> bytes:
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


@contextlib.contextmanager
def _zone(name: str) -> Iterator[None]:
  """Sets the time zone of this process for a while."""
  before = os.environ.get('TZ')
  try:
    os.environ['TZ'] = name
    time.tzset()
    yield
  finally:
    os.environ.pop('TZ')
    if before is not None:
      os.environ['TZ'] = before
    time.tzset()


@contextlib.contextmanager
def _log() -> Iterator[list[str]]:
  """Yields the messages that are logged meanwhile."""
  messages, logger = [], logging.getLogger('absl')
  handler = logging.Handler()
  handler.emit = lambda record: messages.append(record.getMessage())
  logger.addHandler(handler)
  try:
    yield messages
  finally:
    logger.removeHandler(handler)


@base.trial('envs', 'dates in SQL read neither the clock nor the zone')
def sql_clock(scratch: base.Scratch) -> str:
  del scratch
  data, seen = _pets(), Counter()
  calls = (*_CLOCKS, '(SELECT day FROM today)', '(SELECT stamp FROM today)')
  for zone in ('UTC', 'Asia/Tokyo', 'America/St_Johns', 'Pacific/Kiritimati'):
    with _zone(zone):
      db = database.Database.from_bytes(data, now=NOW)
      for call in calls:
        result = db.query(f'SELECT {call}', 1)
        assert result.error is None, (call, result.error)
        seen[call, result.rows[0][0]] += 1
      db.close()
  values = {call: {v for c, v in seen if c == call} for call in calls}
  moved = {call: v for call, v in values.items() if len(v) != 1}
  assert not moved, f'not the same in every zone: {moved}'
  plain = sqlite3.connect(':memory:')
  (stamp,) = plain.execute(f"SELECT unixepoch('{NOW}')").fetchone()
  for call, want in {
    'unixepoch()': stamp,
    'CURRENT_TIMESTAMP': NOW,
    "datetime('now','localtime')": NOW,
    "date(x'6e6f77')": NOW[:10],
    '(SELECT day FROM today)': NOW[:10],
  }.items():
    assert values[call] == {want}, (call, values[call])
  return f'{len(calls)} expressions x 4 zones: one value each, that of `now`'


@base.trial('envs', 'other dates in SQL have the results of SQLite')
def sql_dates_equal(scratch: base.Scratch) -> str:
  del scratch
  rng, same = random.Random(0), 0
  db = database.Database.from_bytes(_pets(), now=NOW)
  plain = sqlite3.connect(':memory:')
  times = "'2024-02-29' '12:30' 2460000.5 -1 0 1e9 '' 'x' NULL x'31'".split()
  times += ["'2024-02-29 23:59:59.999'", "'2024-01-01T10:11+02:00'"]
  changes = '+1 day|-13 months|+1.5 hours|start of year|weekday 3|unixepoch|'
  changes += 'auto|julianday|+00:30|x|-9999 years|+999999999999 days'
  for _ in range(4000):
    name = rng.choice(sorted(dates.NAMES - {'timediff'}))
    if name.startswith('current'):
      continue
    words = [rng.choice(times)]
    words += [
      f"'{x}'" for x in rng.sample(changes.split('|'), rng.randrange(4))
    ]
    if name == 'strftime':
      words.insert(0, rng.choice(["'%Y-%j %f %s'", "'%w%%%J'", "'%H'", 'NULL']))
    sql = f'SELECT {name}({", ".join(words)})'
    want = plain.execute(sql).fetchone()
    got = db.query(sql, 1)
    assert got.rows == (want,), f'{sql}: {got}, not {want}'
    same += 1
  return f'{same} calls without now and zones: all equal'


@base.trial('envs', 'hostile SQL gets an error or rows; nothing escapes')
def sql_escapes(scratch: base.Scratch) -> str:
  data, out = _pets(), scratch.folder / 'out'
  words = {
    '{out}': str(out),
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


class _Data:
  """Questions about pets, as files."""

  def __init__(self, scratch: base.Scratch, rows: list[dict], name: str):
    self._folder = scratch.folder / name
    pets = self._folder / 'database' / 'pets'
    pets.mkdir(parents=True)
    (pets / 'pets.sqlite').write_bytes(_pets())
    (self._folder / 'questions.json').write_text(json.dumps(rows))

  def make(self, **options):
    """Returns the environment."""
    data = schema.SqlFiles(
      questions=f'{self._folder}/questions.json',
      databases=f'{self._folder}/database',
      **{'eval_share': 0.0, **options},
    )
    return envs.make('sql', schema.Sql(data=data))


def _question(index: int, sql: str, gold, kind: str = 'list', **fields) -> dict:
  return {
    'id': index,
    'question': 'Which?',
    'db_id': 'pets',
    'tables': ['pet'],
    'gold_sql': sql,
    'gold_answer': gold,
    'answer_type': kind,
    **fields,
  }


def _grade(env, index: int, answer: str) -> bool:
  tasks = env.source('train', 0).take(99)
  episode = env.make(next(t for t in tasks if t.id == str(index)))
  with contextlib.closing(episode):
    episode.step(f'ANSWER: {answer}', False)
    return bool(episode.grade().correct)


@base.trial('envs', 'refused questions are told at once, or left out')
def sql_refusals(scratch: base.Scratch) -> str:
  dated = [
    "strftime('%Y', '2020-02-03')",
    "julianday('2020-02-03') - julianday('2020-02-01')",
    "date('now') > '2000-01-01'",
    "CAST(strftime('%J', 'now') AS INTEGER) > 0",
    "datetime('now', '-1 year', 'start of year') IS NOT NULL",
    'unixepoch(CURRENT_TIMESTAMP) > 0',
    "time('12:00', '+90 minutes') = '13:30:00'",
    "strftime('%m', name) IS NULL FROM pet LIMIT 1",
    "count(*) / 50 FROM pet WHERE date('now', id || ' days') >= CURRENT_DATE",
    "datetime(1092941466, 'unixepoch', 'localtime') > '2004'",
  ]
  bad = [
    "SELECT replace('a', 'a', 'b')",
    'SELECT absent FROM pet',
    'DELETE FROM pet',
    'SELECT count(*) FROM ' + ', '.join(f'pet p{i}' for i in range(9)),
  ]
  rows = [_question(i, f'SELECT {x}', [1]) for i, x in enumerate(dated)]
  rows += [_question(10 + i, sql, [1]) for i, sql in enumerate(bad)]
  rows += [
    _question(20, 'SELECT 1', [1], 'number'),
    _question(21, 'SELECT 1', [[None]]),
    _question(22, 'SELECT 1', [1], db_id='gone'),
    _question(0, 'SELECT 1', [1]),
    7,
  ]
  data = _Data(scratch, rows, 'many')
  with _log() as messages:
    line = foreign_envs.refused(
      data.make, f'got 9 refusals for {len(rows)} questions'
    )
  assert len(messages) == 9, messages
  assert all(x.removeprefix('refused: ')[:60] in line for x in messages[:3])
  with _log() as messages:
    env = data.make(skip_refused=True)
  kept = len(env.source('train', 0))
  assert kept == len(dated) and len(messages) == 10, (kept, messages)
  assert f'9 of {len(rows)} questions are left out' in messages[-1]
  with _log() as messages:
    assert not len(
      data.make(skip_refused=True, eval_share=0.3).source('eval', 0)
    )
  assert 'env.data.eval_share should hold out' in messages[-1], messages
  return (
    f'{len(dated)} golds with dates run; 9 refusals in one line of '
    f'{len(line)} characters and 9 lines of log; left out and counted'
  )


@base.trial('envs', 'any of several golds is right; an asked order counts')
def sql_golds(scratch: base.Scratch) -> str:
  youngest = 'SELECT name FROM pet WHERE id < 8 ORDER BY age'
  gold = ['pet0', 'pet5', 'pet1', 'pet6', 'pet2', 'pet7', 'pet3', 'pet4']
  several = _question(1, 'SELECT 1', None, 'list')
  del several['gold_answer']
  several['gold_answers'] = [[1], [[1], [2]], ['one']]
  rows = [
    several,
    _question(2, youngest, gold),
    _question(3, f'{youngest} LIMIT 3 OFFSET 1', ['pet5', 'pet1', 'pet6']),
    _question(4, youngest, gold, ordered=False),
  ]
  env = _Data(scratch, rows, 'golds').make(ordered=True)
  loose = _Data(scratch, rows, 'loose').make()
  tied = [gold[i ^ 1] if i < 6 else gold[i] for i in range(8)]
  cases = 0
  for index, answer, want, any_order in (
    (1, '1', True, True),
    (1, '2; 1', True, True),
    (1, 'One', True, True),
    (1, '2', False, False),
    (2, '; '.join(gold), True, True),
    (2, ', '.join(tied), True, True),
    (2, '; '.join(gold[::-1]), False, True),
    (2, '; '.join([*gold[1:3], gold[0], *gold[3:]]), False, True),
    (3, 'pet5; pet6; pet1', True, True),
    (3, 'pet1; pet5; pet6', False, True),
    (4, '; '.join(gold[::-1]), True, True),
    (2, '', False, False),
  ):
    assert _grade(env, index, answer) is want, (index, answer)
    assert _grade(loose, index, answer) is any_order, (index, answer)
    cases += 1
  for sql, words in (
    ('SELECT name FROM pet LIMIT 2', 'has no ORDER BY'),
    (f'{youngest} DESC LIMIT 2', 'in the order of its gold_sql'),
  ):
    row = _question(1, sql, ['pet0', 'pet5'], ordered=True)
    name = f'refused{cases}'
    foreign_envs.refused(_Data(scratch, [row], name).make, words)
    cases += 1
  assert not verifier.correct('";"; ";"', ((';',),), 'list')
  return f'{cases} cases as they must be, ties and cut ties included'


@base.trial('envs', 'a tie may come in any order, and nothing else may')
def sql_ties(scratch: base.Scratch) -> str:
  del scratch
  rng, seen = random.Random(1), Counter()
  limits = database.Limits(steps=10_000_000, sql_length=9_000, column=128)
  for _ in range(60):
    connection = sqlite3.connect(':memory:')
    connection.execute('CREATE TABLE t (a, b)')
    rows = [(rng.choice('uvwxyz'), rng.randrange(3)) for _ in range(6)]
    connection.executemany('INSERT INTO t VALUES (?, ?)', rows)
    connection.commit()
    db = database.Database.from_bytes(connection.serialize(), limits)
    sql = f'SELECT a FROM t ORDER BY b{rng.choice(["", " DESC"])}'
    gold = db.query(sql, 9).rows
    order = ordering.read(db, sql, len(rows))
    db.close()
    keys = sorted((b for _, b in rows), reverse='DESC' in sql)
    orders = list(itertools.permutations(rows))
    valid = {
      tuple(a for a, _ in each)
      for each in orders
      if [b for _, b in each] == keys
    }
    for each in (*rng.sample(orders, 40), *map(_with_key, valid)):
      names = tuple(a for a, _ in each)
      right = verifier.correct('; '.join(names), gold, 'list', order.ranks)
      assert right == (names in valid), (sql, rows, names)
      seen[right] += 1
  return f'{seen.total()} orders: {seen[True]} right, {seen[False]} wrong'


def _with_key(names):
  return [(name, None) for name in names]
