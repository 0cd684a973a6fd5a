"""Dates in the SQL environment: clocks, time zones, and SQLite's results."""

import contextlib
import os
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator

from experiments.trials import base
from experiments.trials import sql as queries
from posttrain.envs.sql import database, dates

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


@base.trial('envs', 'dates in SQL read neither the clock nor the zone')
def sql_clock(scratch: base.Scratch) -> str:
  del scratch
  data, seen = queries.pets(), Counter()
  calls = (*_CLOCKS, '(SELECT day FROM today)', '(SELECT stamp FROM today)')
  for zone in ('UTC', 'Asia/Tokyo', 'America/St_Johns', 'Pacific/Kiritimati'):
    with _zone(zone):
      db = database.Database.from_bytes(data, now=queries.NOW)
      for call in calls:
        result = db.query(f'SELECT {call}', 1)
        assert result.error is None, (call, result.error)
        seen[call, result.rows[0][0]] += 1
      db.close()
  values = {call: {v for c, v in seen if c == call} for call in calls}
  moved = {call: v for call, v in values.items() if len(v) != 1}
  assert not moved, f'not the same in every zone: {moved}'
  plain = sqlite3.connect(':memory:')
  (stamp,) = plain.execute(f"SELECT unixepoch('{queries.NOW}')").fetchone()
  for call, want in {
    'unixepoch()': stamp,
    'CURRENT_TIMESTAMP': queries.NOW,
    "datetime('now','localtime')": queries.NOW,
    "date(x'6e6f77')": queries.NOW[:10],
    '(SELECT day FROM today)': queries.NOW[:10],
  }.items():
    assert values[call] == {want}, (call, values[call])
  return f'{len(calls)} expressions x 4 zones: one value each, that of `now`'


@base.trial('envs', 'other dates in SQL have the results of SQLite')
def sql_dates_equal(scratch: base.Scratch) -> str:
  del scratch
  rng, same = random.Random(0), 0
  db = database.Database.from_bytes(queries.pets(), now=queries.NOW)
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
