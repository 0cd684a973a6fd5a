"""Date functions: a fixed time, no zone, else SQLite's own results."""

import os
import sqlite3
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.envs.sql import database, dates
from tests.envs.sql import test_database

NOW = '2012-03-04 05:06:07'
DB = database.Database.from_bytes(test_database.DATA, now=NOW)


def value(expression):
  """Returns the value of an expression, or its error."""
  result = DB.query(f'SELECT {expression}', 1)
  return result.error or result.rows[0][0]


@pytest.mark.parametrize(
  ('expression', 'expected'),
  [
    ("date('now')", '2012-03-04'),
    ('date()', '2012-03-04'),
    ("DATE('NO' || 'w')", '2012-03-04'),
    ("date(x'6e6f77')", '2012-03-04'),
    ("date('now' || char(0))", 'the function char is not allowed'),
    ("date(CAST(x'6e6f770061' AS TEXT))", '2012-03-04'),
    ('date((SELECT "now"))', '2012-03-04'),
    ('time()', '05:06:07'),
    ("datetime('now', 'localtime')", NOW),
    ("datetime('now', 'utc')", NOW),
    ("datetime('now', 'LocalTime', '+1 day')", '2012-03-05 05:06:07'),
    ("datetime(0, 'unixepoch', 'localtime')", '1970-01-01 00:00:00'),
    # After another modifier, 'unixepoch' has no result.
    ("datetime(0, 'localtime', 'unixepoch')", None),
    ("strftime('%Y|%s')", '2012|1330837567'),
    ("strftime('now', 'now')", 'now'),  # a format
    ('strftime()', None),
    ('unixepoch()', 1330837567),
    ("julianday('now') - julianday('2012-03-03 05:06:07')", 1.0),
    ('CURRENT_TIMESTAMP', NOW),
    ('current_date', '2012-03-04'),
    ('CURRENT_TIME', '05:06:07'),
    ("date('now', '+999999999999 days')", None),
    ("date('now', '+1e300 years')", None),
    (f"date('now', '+{'9' * 1000} days')", None),
    ("date('9999-12-31', '+1 day')", None),
    ('date(9e999)', None),
    ("date('')", None),
    ('date(NULL)', None),
    (f"strftime('{'%J' * 900}', 'now')", 'string or blob too big'),
    ("strftime('%Q', 'now')", None),
    ("date('now', 1, 2, 3, 4, 5, 6, 7, 8)", 'too many arguments on function '),
    ("date(CAST(x'c3' AS TEXT))", 'only text in UTF-8 can be searched'),
  ],
)
def test_dates_at_a_fixed_time(expression, expected):
  got = value(expression)
  if isinstance(expected, str) and expected.endswith(' '):
    assert got.startswith(expected)
  elif isinstance(expected, float):
    assert got == pytest.approx(expected)
  else:
    assert got == expected


def test_timediff_is_there_where_sqlite_has_it():
  if sqlite3.sqlite_version_info < (3, 43):
    assert value("timediff('now', 'now')") == 'no such function: timediff'
  else:
    want = '+0001-00-00 00:00:00.000'
    assert value("timediff('now', '2011-03-04 05:06:07')") == want


TIMES = st.sampled_from(
  "'2024-02-29' '2024-02-30' '2024-01-01T10:11' '12:00' '23:59:59.999' 0 1.5 "
  "-1 2460000.5 1e9 1e12 '2024-01-01+02:00' '' 'x' NULL x'31' '-4713-11-24' "
  "'0000-01-01' '10000-01-01'".split()
)
MODIFIERS = st.sampled_from(
  [
    *(
      f"'{words}'"
      for words in (
        '+1 day,-13 months,+1.5 hours,start of month,start of year,weekday 0,'
        'unixepoch,julianday,auto,+1,x,+00:30,+999999999999 days,-1e9 years'
      ).split(',')
    ),
    'NULL',
    '5',
  ]
)
FORMATS = st.sampled_from(
  ['%Y-%m-%d %H:%M:%S', '%j %w %s %J %f', '%%', '%', '']
)


@given(
  st.sampled_from(sorted({*dates._FIRST} - {'timediff'})),
  FORMATS,
  TIMES,
  st.lists(MODIFIERS, max_size=3),
)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_other_arguments_have_the_results_of_sqlite(name, form, when, rest):
  first = [f"'{form}'"] if name == 'strftime' else []
  call = f'{name}({", ".join([*first, when, *rest])})'
  (expected,) = PLAIN.execute(f'SELECT {call}').fetchone()
  assert value(call) == expected


PLAIN = sqlite3.connect(':memory:')


def test_the_zone_of_the_machine_is_not_read(monkeypatch):
  calls = [
    "datetime('2024-07-01', 'localtime')",
    "datetime('2024-07-01', 'utc')",
    "strftime('%s', 'now', 'localtime')",
    "date(1.7e9, 'auto', 'localtime')",
  ]
  before = [value(call) for call in calls]
  monkeypatch.setenv('TZ', 'Pacific/Kiritimati')
  time.tzset()
  try:
    plain = PLAIN.execute(f'SELECT {calls[0]}').fetchone()[0]
    assert plain != before[0] or not os.path.exists('/usr/share/zoneinfo')
    assert [value(call) for call in calls] == before
  finally:
    monkeypatch.undo()
    time.tzset()
