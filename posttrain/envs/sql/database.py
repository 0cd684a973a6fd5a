"""A sandbox for SQLite queries written by a language model.

No query can hang, write, or read outside of its one database:

1. The connection is read-only. An authorizer permits only SELECTs over the
   tables that existed when it was opened, and `FUNCTIONS`.
2. A query has a budget of virtual machine instructions, which slow functions
   also pay from (`like`), so that it ends at the same point on any machine with
   the same SQLite. The time limit is only a backstop.
3. `Limits` and `HEAP` bound the size of a query and its result.
4. No result depends on the machine's clock or zone (`dates`).

Views can be read, but are not listed. Virtual tables cannot be read.
"""

import dataclasses
import functools
import pathlib
import sqlite3
import time
from collections.abc import Callable

from posttrain.envs.sql import checks, dates, like, record
from posttrain.util import foreign

# Cheap functions whose result depends on their arguments only, or on the
# database's `now`.
FUNCTIONS = dates.NAMES.union(
  'abs avg coalesce count group_concat ifnull instr length like lower max '
  'min nullif round substr sum total trim upper'.split()
)
HEAP = 2**30  # maximum bytes that SQLite holds, in the whole process
_TICK = 1000  # instructions between two checks of the budget
_TOO_LONG = 'the query took too long; ask for less'


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of a query; from `length` on with SQLite's names."""

  steps: int = 200_000  # instructions; 1_000_000 suits real databases
  # Processor time after which `Timeout` is raised. No known query comes close:
  # 200_000 steps took at most 0.3 s, and 1_000_000 took 1.3 s.
  seconds: float = 5.0
  growth: int = 10_000  # see `checks.growth`
  result: int = 100_000  # UTF-8 bytes of a result; a number counts 1
  # Bytes of a string, blob or row, intermediate ones included: an instruction
  # may read or copy all of it. 1_000_000 steps of `upper` on 10_000 took 3 s.
  length: int = 2_000
  sql_length: int = 2_000  # UTF-8 bytes of the query
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

  rows: record.Rows = ()
  columns: tuple[str, ...] = ()
  more: bool = False  # whether there were further rows
  error: str | None = None  # text for the policy; there are no rows then


class Timeout(Exception):
  """A query ran out of time before it ran out of instructions.

  This depends on the machine, so it must not become a reward.
  """


class Database:
  """One database; several threads may use it, one at a time."""

  def __init__(
    self, connection: sqlite3.Connection, limits: Limits, now: str = dates.NOW
  ):
    """Sets up a connection; call `from_bytes` or `from_file` instead.

    Args:
      connection: an open connection; the database closes it.
      limits: limits of each query.
      now: the time of `date('now')`, as 'YYYY-MM-DD HH:MM:SS', UTC.

    Raises:
      ValueError: there is no table.
    """
    self._connection, self._limits = connection, limits
    self._refusal: str | None = None  # why SQLite was stopped
    self._spent, self._timed_out, self._start = 0, False, 0.0
    connection.text_factory = _decode
    # The authorizer checks the schema as it checks queries, so the schema may
    # be trusted. Otherwise views could not call the functions defined here.
    connection.executescript(
      'PRAGMA query_only = ON; PRAGMA trusted_schema = ON; '
      f'PRAGMA temp_store = MEMORY; PRAGMA hard_heap_limit = {HEAP}'
    )
    self._columns = _read_schema(connection)
    if not self._columns:
      raise ValueError('there is no table')
    views = "SELECT name FROM sqlite_master WHERE type = 'view'"
    self._names = {table.lower() for table in self._columns} | {
      view.lower() for (view,) in connection.execute(views)
    }
    for number, bound in _sqlite_limits(limits):
      connection.setlimit(number, bound)
    self._dates = dates.Dates(now, limits.length)
    for name, count, function in (*like.FUNCTIONS, *self._dates.functions()):
      connection.create_function(
        name, count, self._priced(function), deterministic=True
      )
    connection.set_progress_handler(self._tick, _TICK)
    connection.set_authorizer(self._authorize)

  @classmethod
  def from_bytes(
    cls, data: bytes, limits: Limits = Limits(), now: str = dates.NOW
  ) -> 'Database':
    """Opens a copy, in memory, of the bytes of a database file.

    Raises:
      ValueError: the bytes are no database with tables.
    """
    return cls._open(':memory:', 'the bytes', limits, now, data)

  @classmethod
  def from_file(
    cls,
    path: str | pathlib.Path,
    limits: Limits = Limits(),
    now: str = dates.NOW,
  ) -> 'Database':
    """Opens a database file, which must not change while it is open.

    Raises:
      ValueError: the file is missing or no database with tables.
    """
    if not pathlib.Path(path).is_file():
      raise ValueError(f'{path} must be a SQLite file: there is none')
    uri = pathlib.Path(path).absolute().as_uri()
    return cls._open(f'{uri}?mode=ro&immutable=1', path, limits, now)

  @classmethod
  def _open(
    cls,
    uri: str,
    source: str | pathlib.Path,
    limits: Limits,
    now: str,
    data: bytes | None = None,
  ) -> 'Database':
    """Opens a connection; errors name the source."""
    connection = None
    try:
      connection = sqlite3.connect(
        uri,
        uri=True,
        isolation_level=None,
        cached_statements=0,
        check_same_thread=False,
      )
      if data is not None:
        connection.deserialize(data)
      return cls(connection, limits, now)
    except (sqlite3.Error, ValueError, MemoryError) as error:
      if connection:
        connection.close()
      raise ValueError(
        f'{source} must be a SQLite file: {foreign.text(error)}'
      ) from error

  @property
  def tables(self) -> tuple[str, ...]:
    """The tables' names in their own case, in the order of creation."""
    return tuple(self._columns)

  def describe(self, table: str) -> tuple[tuple[str, str], ...]:
    """Returns the name and the declared type of each column of a table."""
    return self._columns[table]

  def count(self, table: str) -> int:
    """Returns the number of rows of a table.

    Raises:
      ValueError: the database is damaged.
    """
    result = self.query(f'SELECT count(*) FROM {_quote(table)}', 1)
    if result.error:
      raise ValueError(f'table {foreign.quote(table)}: {result.error}')
    return result.rows[0][0]

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
    self._refusal, self._spent, self._timed_out = None, 0, False
    self._start = time.thread_time()
    try:
      limits = self._limits
      refusal = checks.refusal(sql, limits.sql_length, limits.growth)
      if 'collate' in sql.lower():
        # One instruction then sorts all rows, with slow comparisons.
        self._spent = limits.steps * 4 // 5
      return Result(error=refusal) if refusal else self._run(sql, rows)
    except MemoryError:  # from `vdbe_op` or `HEAP`
      return Result(error='the query is too complex')
    except (sqlite3.Error, sqlite3.Warning) as error:
      if self._timed_out:
        raise Timeout(f'a query took over {self._limits.seconds} s') from error
      if 'one statement' in str(error):
        return Result(error='only one SELECT at a time is allowed')
      if 'user-defined' in str(error) and not self._refusal:
        # Python could not decode the arguments of `like` or `dates`.
        return Result(error='only text in UTF-8 can be searched')
      return Result(error=(self._refusal or str(error))[:200])
    except (ValueError, OverflowError):  # a text that Python cannot pass
      return Result(error='the query is not valid SQL')

  def close(self) -> None:
    self._connection.close()
    self._dates.close()

  def _run(self, sql: str, rows: int) -> Result:
    cursor = self._connection.execute(sql)
    try:
      columns = tuple(column for column, *_ in cursor.description)
      result, size = [], 0
      while len(result) < rows and (row := cursor.fetchone()):
        cells = [_decode(c) if isinstance(c, bytes) else c for c in row]
        size += sum(len(c.encode()) if isinstance(c, str) else 1 for c in cells)
        result.append(tuple(cells))
        if size > self._limits.result:
          return Result(error='the result is too big; select less')
      return Result(tuple(result), columns, cursor.fetchone() is not None)
    finally:
      cursor.close()  # otherwise the query stays open

  def _tick(self) -> bool:
    """Returns whether to stop; SQLite calls it every `_TICK` instructions."""
    self._spent += _TICK
    if self._spent >= self._limits.steps:
      self._refusal = _TOO_LONG
      return True
    self._timed_out = time.thread_time() - self._start > self._limits.seconds
    return self._timed_out

  def _priced(self, function: Callable) -> Callable:
    """Returns a function of `like` or `dates` that pays for its calls."""

    def spend(instructions):
      self._spent += instructions
      if self._spent >= self._limits.steps:
        raise ValueError(_TOO_LONG)

    def call(*values):
      try:
        return function(spend, *values)
      except ValueError as error:  # SQLite drops the message
        self._refusal = str(error)
        raise

    return call

  def _authorize(self, action: int, first: str, second: str, *_) -> int:
    """Returns SQLite's code for whether a query may perform an action."""
    reason = None
    if action == sqlite3.SQLITE_READ:
      # Without a column, the name may also be defined by WITH.
      name = first.lower()
      is_table = second or name.startswith(('sqlite_', 'pragma_'))
      if is_table and name not in self._names:
        reason = f'no such table: {first}'
    elif action == sqlite3.SQLITE_FUNCTION:
      if second.lower() not in FUNCTIONS:
        reason = f'the function {second} is not allowed'
    elif action == sqlite3.SQLITE_RECURSIVE:
      reason = 'WITH RECURSIVE is not allowed'
    elif action != sqlite3.SQLITE_SELECT:
      reason = 'only SELECT is allowed'
    self._refusal = self._refusal or reason
    return sqlite3.SQLITE_DENY if reason else sqlite3.SQLITE_OK


@functools.cache
def _sqlite_limits(limits: Limits) -> tuple[tuple[int, int], ...]:
  """Returns (number, bound) of the limits that SQLite keeps."""
  bounds = list(dataclasses.asdict(limits).items())[4:]
  return tuple(
    (getattr(sqlite3, f'SQLITE_LIMIT_{name.upper()}'), bound)
    for name, bound in bounds
  )


def _read_schema(connection: sqlite3.Connection) -> dict[str, tuple]:
  """Returns {table: (name, declared type) of each column}."""
  tables = connection.execute(
    "SELECT name FROM sqlite_master WHERE type = 'table' AND "
    "name NOT LIKE 'sqlite!_%' ESCAPE '!' AND "
    "sql NOT LIKE 'CREATE VIRTUAL%' ORDER BY rowid"
  ).fetchall()
  info = 'SELECT name, type FROM pragma_table_xinfo(?)'
  return {name: tuple(connection.execute(info, (name,))) for (name,) in tables}


def _decode(data: bytes) -> str:
  return data.decode('utf-8', 'replace')


def _quote(name: str) -> str:
  """Quotes a name for SQL."""
  return '"' + name.replace('"', '""') + '"'
