"""A sandbox for SQLite queries written by a language model.

No query can hang, write, or read outside of its one database:

1. The connection is read-only. An authorizer permits only SELECTs over the
   tables that existed when it was opened, and `FUNCTIONS`.
2. A query has a budget of virtual machine instructions, so that it ends at the
   same point on any machine with the same SQLite. The time limit is a backstop
   for instructions that are slow, such as LIKE on long texts.
3. `Limits` and `HEAP` bound the size of a query and its result.
4. No result depends on the machine's clock or zone: dates are computed at a
   fixed time, in UTC.

Views can be read, but are not listed. Virtual tables cannot be read.
"""

import contextlib
import dataclasses
import functools
import pathlib
import re
import sqlite3
import time

from posttrain import schema

Cell = int | float | str | None
Rows = tuple[tuple[Cell, ...], ...]

NOW = schema.SqlFiles.now
# Date functions, and the keywords that read the clock as functions do.
_DATES = 'date time datetime julianday unixepoch strftime timediff'.split()
DATES = dict(zip(_DATES, _DATES, strict=True)) | {
  'current_date': 'date',
  'current_time': 'time',
  'current_timestamp': 'datetime',
}
# Cheap functions whose result depends on their arguments only, or on the
# database's `now`.
FUNCTIONS = frozenset(DATES).union(
  'abs avg coalesce count group_concat ifnull instr length like lower max '
  'min nullif round substr sum total trim upper'.split()
)
# Maximum bytes that SQLite holds, in the whole process. It also ends the
# compilation of queries whose parts are copied to each use of their names.
HEAP = 2**29
_TICK = 100  # instructions between two checks of the budget and the time
_QUERY = re.compile(  # possessive: comments match in one way only
  r'(?>\s|--[^\n]*|/\*.*?\*/)*+(?:select|with)\b', re.IGNORECASE | re.DOTALL
)
TOKEN = re.compile(  # a comment, a quoted text or name, a word, or a sign
  r"""--[^\n]*|/\*.*?(?:\*/|\Z)|"[^"]*"|'[^']*'|`[^`]*`|\[[^]]*]|"""
  r'[\w$\x80-\U0010ffff]+|\S',
  re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of a query; from `length` on with SQLite's names."""

  steps: int = 200_000  # instructions; 1_000_000 suits real databases
  seconds: float = 5.0  # processor time after which `Timeout` is raised
  result: int = 100_000  # UTF-8 bytes of a result; a number counts 1
  # Bytes of a string, blob or row, intermediate ones included: an instruction
  # may read or copy all of it.
  length: int = 2_000
  sql_length: int = 2_000  # UTF-8 bytes of the query
  like_pattern_length: int = 100  # bytes
  column: int = 64  # columns of a result
  expr_depth: int = 50
  compound_select: int = 8  # SELECTs joined by UNION, EXCEPT or INTERSECT
  vdbe_op: int = 25_000  # instructions of the compiled query
  function_arg: int = 8
  attached: int = 0
  variable_number: int = 0


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of a query: rows or an error."""

  rows: Rows = ()
  more: bool = False  # whether there were further rows
  error: str | None = None  # text for the policy; there are no rows then
  # Lower-case names of the tables that the query reads, also through views.
  tables: frozenset[str] = frozenset()


class Timeout(Exception):
  """A query ran out of time before it ran out of instructions.

  This depends on the machine, so it must not become a reward.
  """


class Database:
  """One database; several threads may use it, one at a time."""

  def __init__(
    self,
    source: bytes | pathlib.Path,
    limits: Limits = Limits(),
    now: str = NOW,
  ):
    """Opens a database.

    Args:
      source: the bytes of a database file, of which it opens a copy in memory;
        or a file, which must not change while it is open.
      limits: limits of each query.
      now: the time of `date('now')`, as 'YYYY-MM-DD HH:MM:SS', UTC.

    Raises:
      ValueError: the file is missing or no database with tables.
    """
    self._limits, self._now = limits, now
    self._refusal: str | None = None  # why SQLite was stopped
    self._read: set[str] = set()  # tables that the query reads
    self._spent, self._timed_out, self._start = 0, False, 0.0
    uri = ':memory:'
    if not isinstance(source, bytes):
      uri = f'{source.absolute().as_uri()}?mode=ro&immutable=1'
    try:
      self._connection = connection = sqlite3.connect(
        uri,
        uri=True,
        isolation_level=None,
        cached_statements=0,
        check_same_thread=False,
      )
      if isinstance(source, bytes):
        connection.deserialize(source)
      connection.text_factory = _decode
      # The authorizer checks the schema as it checks queries, so the schema may
      # be trusted. Otherwise views could not call the functions defined here.
      connection.executescript(
        'PRAGMA query_only = ON; PRAGMA trusted_schema = ON; '
        f'PRAGMA temp_store = MEMORY; PRAGMA hard_heap_limit = {HEAP}'
      )
      tables = connection.execute(
        "SELECT name, type = 'table' FROM sqlite_master WHERE "
        "type IN ('table', 'view') AND name NOT LIKE 'sqlite!_%' ESCAPE '!' "
        "AND sql NOT LIKE 'CREATE VIRTUAL%' ORDER BY rowid"
      ).fetchall()
      info = 'SELECT name, type FROM pragma_table_xinfo(?)'
      self._columns = {
        name: tuple(connection.execute(info, (name,)))
        for name, is_table in tables
        if is_table
      }
    except (sqlite3.Error, MemoryError) as error:
      raise ValueError(f'{source!s} must be a SQLite file: {error}') from error
    if not self._columns:
      raise ValueError(f'{source!s} must have tables: got none')
    self._names = {name.lower(): is_table for name, is_table in tables}
    # SQLite's own date functions, without a database.
    self._plain = sqlite3.connect(':memory:', check_same_thread=False)
    self._plain.text_factory = _decode
    for field in dataclasses.fields(limits)[3:]:
      number = getattr(sqlite3, f'SQLITE_LIMIT_{field.name.upper()}')
      connection.setlimit(number, getattr(limits, field.name))
    self._plain.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.length)
    for name, plain in DATES.items():
      connection.create_function(
        name,
        -1 if name == plain else 0,
        functools.partial(self._date, plain),
        deterministic=True,
      )
    connection.set_progress_handler(self._tick, _TICK)
    connection.set_authorizer(self._authorize)

  @property
  def tables(self) -> tuple[str, ...]:
    """The tables' names in their own case, in the order of creation."""
    return tuple(self._columns)

  def describe(self, table: str) -> tuple[tuple[str, str], ...]:
    """Returns the name and the declared type of each column of a table."""
    return self._columns[table]

  def count(self, table: str) -> int:
    """Returns the number of rows of a table."""
    return self.query(f'SELECT count(*) FROM {_quote(table)}', 1).rows[0][0]

  def find(self, name: str) -> str | None:
    """Returns the table with a name: in the same case, or else in any case."""
    if name in self._columns:
      return name
    return next((t for t in self.tables if t.lower() == name.lower()), None)

  def sample(self, table: str, rows: int) -> Result:
    """Returns the first rows of a table."""
    return self.query(f'SELECT * FROM {_quote(table)}', rows)

  def query(self, sql: str, rows: int) -> Result:
    """Runs a query; any text is safe.

    Args:
      sql: one SELECT, with optional comments and a final semicolon.
      rows: maximum number of rows in the result.

    Returns:
      The rows, blobs read as text, or the reason for none in `error`.

    Raises:
      Timeout: the time limit was reached before the instruction limit.
    """
    # Refusals before the query is compiled.
    limits, error = self._limits, None
    if len(sql.encode('utf-8', 'surrogatepass')) > limits.sql_length:
      error = f'the query is longer than {limits.sql_length} bytes'
    elif re.search('[\0\ud800-\udfff]', sql):
      error = 'the query is not valid text'
    elif not _QUERY.match(sql):
      error = 'only SELECT is allowed'
    if error:
      return Result(error=error)
    self._refusal, self._timed_out = None, False
    self._read.clear()
    self._start, self._spent = time.thread_time(), 0
    try:
      with contextlib.closing(self._connection.execute(sql)) as cursor:
        result, size = [], 0
        while len(result) < rows and (row := cursor.fetchone()):
          row = [_decode(x) if isinstance(x, bytes) else x for x in row]
          size += sum(len(x.encode()) if isinstance(x, str) else 1 for x in row)
          result.append(tuple(row))
          if size > limits.result:
            return Result(error='the result is too big; select less')
        more = cursor.fetchone() is not None
        return Result(tuple(result), more, tables=frozenset(self._read))
    except MemoryError:  # from `vdbe_op` or `HEAP`
      return Result(error='the query is too complex')
    except (sqlite3.Error, sqlite3.Warning) as error:
      if self._timed_out:
        raise Timeout(f'a query took over {limits.seconds} s') from error
      if 'one statement' in str(error):
        return Result(error='only one SELECT at a time is allowed')
      return Result(error=(self._refusal or str(error))[:200])

  def close(self) -> None:
    self._connection.close()
    self._plain.close()

  def _tick(self) -> bool:
    """Returns whether to stop; SQLite calls it every `_TICK` instructions."""
    self._spent += _TICK
    if self._spent >= self._limits.steps:
      self._refusal = 'the query took too long; ask for less'
      return True
    self._timed_out = time.thread_time() - self._start > self._limits.seconds
    return self._timed_out

  def _date(self, name: str, *values: Cell | bytes) -> Cell:
    """Calls one of SQLite's date functions at `now`, in UTC.

    `now` stands for the clock, and no change for 'localtime' and 'utc'.
    """
    first = int(name == 'strftime')  # index of the time
    last = first + (name == 'timediff')
    arguments: list[Cell] = []
    for i, value in enumerate(
      values if len(values) > first else (*values, 'now')
    ):
      if isinstance(value, bytes):
        value = _decode(value)
      if isinstance(value, str):
        value = value.partition('\0')[0]  # where SQLite's functions stop
      word = str(value).lower()
      if first <= i <= last and word in ('now', 'subsec', 'subsecond'):
        arguments += [self._now] if word == 'now' else [self._now, word]
      elif i > last and word in ('localtime', 'utc'):
        arguments.append('+0 days')  # the order of modifiers matters
      else:
        arguments.append(value)
    sql = f'SELECT {name}({", ".join("?" * len(arguments))})'
    try:
      return self._plain.execute(sql, arguments).fetchone()[0]
    except sqlite3.Error as error:  # SQLite drops the message
      self._refusal = str(error)
      raise

  def _authorize(self, action: int, first: str, second: str, *_) -> int:
    """Returns SQLite's code for whether a query may perform an action."""
    reason = None
    if action == sqlite3.SQLITE_READ:
      # Without a column, the name may also be defined by WITH.
      name = first.lower()
      is_table = second or name.startswith(('sqlite_', 'pragma_'))
      if is_table and name not in self._names:
        reason = f'no such table: {first}'
      elif self._names.get(name):
        self._read.add(name)
    elif action == sqlite3.SQLITE_FUNCTION:
      if second.lower() not in FUNCTIONS:
        reason = f'the function {second} is not allowed'
    elif action == sqlite3.SQLITE_RECURSIVE:
      reason = 'WITH RECURSIVE is not allowed'
    elif action != sqlite3.SQLITE_SELECT:
      reason = 'only SELECT is allowed'
    self._refusal = self._refusal or reason
    return sqlite3.SQLITE_DENY if reason else sqlite3.SQLITE_OK


def _decode(data: bytes) -> str:
  return data.decode('utf-8', 'replace')


def _quote(name: str) -> str:
  """Quotes a name for SQL."""
  return '"' + name.replace('"', '""') + '"'
