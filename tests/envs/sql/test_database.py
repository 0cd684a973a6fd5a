"""The sandbox: refusals, limits, results, dates at a fixed time."""

import math
import random
import sqlite3
import time

import pytest

from posttrain.envs.sql import database


def _make() -> bytes:
  """Returns a database of 50 pets, with odd names and cells."""
  connection = sqlite3.connect(':memory:')
  connection.executescript("""
      CREATE TABLE pet (id INTEGER PRIMARY KEY AUTOINCREMENT, Name TEXT,
                        weight REAL);
      CREATE TABLE "odd ""name""; --" (a, "b c" VARCHAR(3), k AS (a || 'k'));
      CREATE TABLE Pet_Owner (x BLOB);
      CREATE VIEW heavy AS SELECT Name FROM pet WHERE weight > 48;
  """)
  connection.executemany(
    'INSERT INTO pet VALUES (?, ?, ?)',
    [(i, f'pet{i}', i / 2) for i in range(1, 51)],
  )
  connection.execute("""INSERT INTO "odd ""name""; --" VALUES (1, 'x')""")
  connection.execute(
    "INSERT INTO Pet_Owner VALUES (x'41ff'), (CAST(x'c328' AS TEXT))"
  )
  connection.commit()
  data = connection.serialize()
  connection.close()
  return data


DATA = _make()


@pytest.fixture
def db(tmp_path, monkeypatch):
  """Yields a database, in an empty folder that must stay empty."""
  monkeypatch.chdir(tmp_path)
  db = database.Database(DATA)
  yield db
  assert db._connection.serialize() == DATA
  assert not list(tmp_path.iterdir())
  db.close()


@pytest.mark.parametrize(
  ('sql', 'tables'),
  [
    ('SELECT COUNT(*) FROM PET_owner', 'pet_owner'),
    ('SELECT * FROM heavy', 'pet'),  # a view
    ('WITH pet AS (SELECT 1) SELECT * FROM pet', ''),
    ('WITH x AS (SELECT * FROM pet) SELECT 1 FROM x', 'pet'),
    ('SELECT (SELECT max(x) FROM Pet_Owner) FROM pet', 'pet pet_owner'),
    ('SELECT 1', ''),
  ],
)
def test_a_result_names_the_tables_that_were_read(db, sql, tables):
  db.query('SELECT a FROM "odd ""name""; --"', 1)
  assert db.query(sql, 1).tables == set(tables.split())


ONLY = 'only SELECT is allowed'
REFUSED = {
  # The first word.
  'DELETE FROM pet': ONLY,
  "ATTACH 'other.db' AS other": ONLY,
  'PRAGMA query_only = OFF': ONLY,
  "VACUUM INTO 'copy.db'": ONLY,
  '': ONLY,
  '/**/' * 499: ONLY,  # and at once
  # A first word that hides another.
  'WITH x AS (SELECT 1) DELETE FROM pet RETURNING *': ONLY,
  # Two statements.
  'SELECT 1; DROP TABLE pet': 'only one SELECT at a time is allowed',
  # What is none of the tables.
  'SELECT * FROM sqlite_master': 'no such table: sqlite_master',
  "SELECT * FROM pragma_table_info('pet')": ONLY,
  # What does not end.
  'WITH RECURSIVE x(a) AS (SELECT 1 UNION ALL SELECT a + 1 FROM x) '
  'SELECT * FROM x': 'WITH RECURSIVE is not allowed',
  'WITH x(a) AS (SELECT 1 UNION ALL SELECT a + 1 FROM x) '
  'SELECT * FROM x': 'WITH RECURSIVE is not allowed',
  # What is no text.
  "SELECT '\ud800'": 'the query is not valid text',
  # What is too much.
  'SELECT ' + 'é' * 997: 'the query is longer than 2000 bytes',
  'SELECT ' + '1, ' * 64 + '1': 'too many columns in result set',
  'SELECT 1' + ' UNION SELECT 1' * 8: 'too many terms in compound SELECT',
  'SELECT max(1, 2, 3, 4, 5, 6, 7, 8, 9)': 'too many arguments on function max',
  'SELECT 1' + '+1' * 50: 'Expression tree is too large (maximum depth 50)',
  "SELECT Name LIKE 'a' ESCAPE 'ab' "
  'FROM pet': 'ESCAPE expression must be a single character',
  f"SELECT 'a' LIKE '{'a' * 101}'": 'LIKE or GLOB pattern too complex',
  f"SELECT group_concat('{'a' * 500}') FROM pet": 'string or blob too big',
}
FUNCTIONS = (
  "load_extension('x')",
  'random()',
  "printf('%9999d', 1)",
  "'{}' -> 'a'",
  "'a' MATCH 'a'",
  'row_number() OVER ()',
)


@pytest.mark.parametrize('sql', REFUSED)
def test_refuses_what_is_not_allowed(db, sql):
  result = db.query(sql, 5)
  assert result == database.Result(error=REFUSED[sql])
  assert db.query('SELECT count(*) FROM pet', 1).rows == ((50,),)


@pytest.mark.parametrize('call', FUNCTIONS)
def test_refuses_all_other_functions(db, call):
  result = db.query(f'SELECT {call} FROM pet', 5)
  assert result.rows == ()
  assert 'function' in result.error or 'MATCH' in result.error
  assert len(result.error) <= 200


def test_cannot_write_even_without_the_authorizer(db):
  db._connection.set_authorizer(None)
  with pytest.raises(sqlite3.OperationalError, match='readonly'):
    db._connection.execute('DELETE FROM pet')


@pytest.mark.parametrize(
  'sql, rows',
  [
    ('  select max(id), min(weight) from PET;', ((50, 0.5),)),
    ('-- how many?\n/* of them */ SELECT count(*) FROM pet', ((50,),)),
    (
      "SELECT count(*) FROM pet WHERE Name NOT LIKE '%!_%' ESCAPE '!'",
      ((50,),),
    ),
    ('SELECT x FROM Pet_Owner', (('A\ufffd',), ('\ufffd(',))),
    ('SELECT 9e999, -9e999, 9e999 - 9e999', ((math.inf, -math.inf, None),)),
    (
      'SELECT abs(-1), avg(id), coalesce(NULL, 2), ifnull(NULL, 3), sum(id), '
      "total(id), length('abc'), lower('A'), upper('a'), substr('abc', 2, 1), "
      "nullif(1, 1), instr('abc', 'c'), trim(' a '), round(1.26, 1), "
      "group_concat('a') FROM pet WHERE id < 3",
      ((1, 1.5, 2, 3, 3, 3.0, 3, 'a', 'A', 'b', None, 3, 'a', 1.3, 'a,a'),),
    ),
  ],
)
def test_results_of_queries(db, sql, rows):
  result = db.query(sql, 5)
  assert (result.error, result.rows) == (None, rows)
  assert not result.more


def test_tables_columns_and_counts(db):
  odd = 'odd "name"; --'
  assert db.tables == ('pet', odd, 'Pet_Owner')
  assert db.describe('pet') == (
    ('id', 'INTEGER'),
    ('Name', 'TEXT'),
    ('weight', 'REAL'),
  )
  assert [name for name, _ in db.describe(odd)] == ['a', 'b c', 'k']
  assert [db.count(table) for table in db.tables] == [50, 1, 2]
  assert db.sample('pet', 2).rows == ((1, 'pet1', 0.5), (2, 'pet2', 1.0))
  found = {'pet_owner': 'Pet_Owner', 'heavy': None, 'sqlite_sequence': None}
  assert {name: db.find(name) for name in found} == found
  more = [db.query('SELECT id FROM pet', n).more for n in (49, 50)]
  assert more == [True, False]


LATE = 'the query took too long; ask for less'
DEEP = 'the query is too complex'
EIGHT = ', '.join(f'pet p{i}' for i in range(8))
CHAIN = ', '.join(
  f'c{i} AS (SELECT 1 FROM c{i - 1}, c{i - 1})' for i in range(1, 40)
)
WIDE = '(SELECT ' + '+'.join('a' * 40) + ' a FROM '


@pytest.mark.parametrize(
  'sql, error',
  [
    (f'SELECT 1 FROM {EIGHT} ORDER BY p0.id + p7.id', LATE),
    (f'SELECT 1 FROM {EIGHT} WHERE date(p0.id + p7.id) = 1', LATE),
    (f'WITH c0 AS (SELECT 1), {CHAIN} SELECT 1 FROM c39', DEEP),
    (f'SELECT a FROM {WIDE * 4}(SELECT id a FROM pet){")" * 4}', DEEP),
  ],
)
def test_an_expensive_query_ends_by_its_instruction_count(db, sql, error):
  assert db.query(sql, 20) == database.Result(error=error)


def test_a_query_over_the_time_limit_raises():
  sql = 'SELECT count(*) FROM pet, pet, pet, pet, pet, pet, pet, pet'
  limits = database.Limits(steps=10**12, seconds=0.05)
  db = database.Database(DATA, limits)
  with pytest.raises(database.Timeout, match=r'0\.05 s'):
    db.query(sql, 1)
  assert db.query('SELECT 1', 1).rows == ((1,),)
  db.close()


@pytest.mark.parametrize('data', [b'text', DATA[:1000]])
def test_files_without_a_database_are_refused(data, tmp_path):
  path = tmp_path / 'x.sqlite'
  path.write_bytes(data)
  for file in (path, tmp_path / 'none.sqlite'):
    with pytest.raises(ValueError, match=f'{file} must be a SQLite file'):
      database.Database(file)


def test_queries_leave_a_file_unchanged(tmp_path):
  path = tmp_path / 'a ?#%41 b.sqlite'  # nothing of it may count as a URI
  path.write_bytes(DATA)
  path.chmod(0o444)
  db = database.Database(path)
  assert db.query('DROP TABLE pet', 5).error == ONLY
  assert db.sample('pet', 1).rows == ((1, 'pet1', 0.5),)
  db.close()
  assert path.read_bytes() == DATA
  assert list(tmp_path.iterdir()) == [path]


NOW = '2012-03-04 05:06:07'
DATED = database.Database(DATA, now=NOW)


def value(expression):
  """Returns the value of an expression, or its error."""
  result = DATED.query(f'SELECT {expression}', 1)
  return result.error or result.rows[0][0]


@pytest.mark.parametrize(
  ('expression', 'expected'),
  [
    ("date('now')", '2012-03-04'),
    ("datetime('now', 'LocalTime', '+1 day')", '2012-03-05 05:06:07'),
    ("datetime(0, 'unixepoch', 'localtime')", '1970-01-01 00:00:00'),
    ("strftime('%Y|%s')", '2012|1330837567'),
    ('unixepoch()', 1330837567),
    ("julianday('now') - julianday('2012-03-03 05:06:07')", 1.0),
    ('CURRENT_TIMESTAMP', NOW),
    ("date('now', '+999999999999 days')", None),
    (f"strftime('{'%J' * 900}', 'now')", 'string or blob too big'),
  ],
)
def test_dates_at_a_fixed_time(expression, expected):
  assert value(expression) == (expected or pytest.approx(expected))


def test_other_arguments_have_the_results_of_sqlite():
  plain, rng = sqlite3.connect(':memory:'), random.Random(0)
  times = "'2024-02-29' '12:00' 0 -1 2460000.5 1e9 '' 'x' NULL x'31'".split()
  changes = '+1 day,-13 months,start of year,weekday 0,unixepoch,auto,x'
  for _ in range(300):
    name = rng.choice(sorted({*database.DATES.values()} - {'timediff'}))
    words = ["'%j %w %s %J'"] if name == 'strftime' else []
    words.append(rng.choice(times))
    words += [f"'{x}'" for x in rng.sample(changes.split(','), 2)]
    call = f'{name}({", ".join(words)})'
    (expected,) = plain.execute(f'SELECT {call}').fetchone()
    assert value(call) == expected, call


def test_the_zone_of_the_machine_is_not_read(monkeypatch):
  call = "datetime('2024-07-01', 'localtime')"
  before = value(call)
  monkeypatch.setenv('TZ', 'Pacific/Kiritimati')
  time.tzset()
  try:
    assert value(call) == before
  finally:
    monkeypatch.undo()
    time.tzset()
