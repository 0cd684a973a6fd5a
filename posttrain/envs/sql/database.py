"""SQLite databases that a language model may ask anything of.

Nothing it writes can hang, write, or read outside of the one database:

1. The connection is read-only, and an authorizer lets through nothing but
   SELECTs over the tables that were there when it was opened, and `FUNCTIONS`.
2. A query has a budget of virtual machine instructions, out of which functions
   that may take long are paid too (`like`), and so ends alike on any machine
   with the same SQLite. Time is but a backstop to slow ones.
3. `Limits` and `HEAP` bound what a query and its result may weigh.

Views can be read, but are not listed. Virtual tables cannot be read.
"""

import dataclasses
import pathlib
import sqlite3
import time
from collections.abc import Callable

from posttrain.envs.sql import checks, like, record

# Cheap, and their result depends on nothing but their arguments. The functions
# of dates are missing: any argument may come to mean 'now'.
FUNCTIONS = frozenset(
  'abs avg coalesce count group_concat ifnull instr length like lower max '
  'min nullif round substr sum total trim upper'.split()
)
HEAP = 2**30  # bytes that SQLite may hold, in the whole process
_TICK = 1000  # instructions between two looks at the budget
_LONG = 'the query took too long; ask for less'


@dataclasses.dataclass(frozen=True)
class Limits:
  """What a query may cost; from `length` on by the names SQLite has."""

  steps: int = 200_000  # instructions; 1_000_000 suits files from elsewhere
  # Of processor time, after which `Timeout` is raised. No query known comes
  # near: 200_000 steps took at most 0.3 s, and 1_000_000 took 1.3 s.
  seconds: float = 5.0
  growth: int = 10_000  # see `checks.growth`
  result: int = 100_000  # UTF-8 bytes of a result; a number weighs 1
  # Bytes of a string, blob or row, also in between: an instruction may read or
  # copy all of it. With 10_000, 1_000_000 steps of `upper` took 3 s.
  length: int = 2_000
  sql_length: int = 2_000  # UTF-8 bytes of the query
  column: int = 64  # columns of a result
  expr_depth: int = 50
  compound_select: int = 8  # SELECTs joined by UNION and the like
  vdbe_op: int = 25_000  # instructions that the query compiles to
  function_arg: int = 8
  attached: int = 0
  variable_number: int = 0


@dataclasses.dataclass(frozen=True)
class Result:
  """What came of a query."""

  rows: record.Rows = ()  # at most as many as were asked for
  columns: tuple[str, ...] = ()
  more: bool = False  # there were more rows than asked for
  error: str | None = None  # words for the agent; there is nothing else then


class Timeout(Exception):
  """A query ran out of time before it ran out of instructions.

  Whether it does depends on the machine: nothing may be learnt from it.
  """


class Database:
  """One database; threads may take turns with it."""

  def __init__(self, connection: sqlite3.Connection, limits: Limits):
    """Takes a connection over; `from_bytes` and `from_file` make one."""
    self._connection, self._limits = connection, limits
    self._refusal: str | None = None  # why SQLite was told to stop
    self._spent, self._late, self._start = 0, False, 0.0
    connection.text_factory = _decode
    # A schema may be trusted, as a query: the authorizer sees to both. If not,
    # views could not call the functions that are made here.
    connection.executescript(
      'PRAGMA query_only = ON; PRAGMA trusted_schema = ON; '
      f'PRAGMA temp_store = MEMORY; PRAGMA hard_heap_limit = {HEAP}'
    )
    self._columns = _read_schema(connection)
    if not self._columns:
      raise ValueError('there is no table')
    views = "SELECT name FROM sqlite_master WHERE type = 'view'"
    self._known = {table.lower() for table in self._columns} | {
      view.lower() for (view,) in connection.execute(views)
    }
    for name, bound in list(dataclasses.asdict(limits).items())[4:]:
      number = getattr(sqlite3, f'SQLITE_LIMIT_{name.upper()}')
      connection.setlimit(number, bound)
    for name, count, function in like.FUNCTIONS:
      connection.create_function(
        name, count, self._priced(function), deterministic=True
      )
    connection.set_progress_handler(self._tick, _TICK)
    connection.set_authorizer(self._authorize)

  @classmethod
  def from_bytes(cls, data: bytes, limits: Limits = Limits()) -> 'Database':
    """Opens a copy, in memory, of the bytes of a database file.

    Raises:
      ValueError: they are no database with tables.
    """
    return cls._open(':memory:', 'the bytes', limits, data)

  @classmethod
  def from_file(
    cls, path: str | pathlib.Path, limits: Limits = Limits()
  ) -> 'Database':
    """Opens a database file, which must not change from now on.

    Raises:
      ValueError: there is none, or it is no database with tables.
    """
    if not pathlib.Path(path).is_file():
      raise ValueError(f'{path} must be a SQLite file: there is none')
    uri = pathlib.Path(path).absolute().as_uri()
    return cls._open(f'{uri}?mode=ro&immutable=1', path, limits)

  @classmethod
  def _open(cls, uri, source, limits, data=None) -> 'Database':
    """Connects, and names the source in what goes wrong."""
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
      return cls(connection, limits)
    except (sqlite3.Error, ValueError, MemoryError) as error:
      if connection:
        connection.close()
      raise ValueError(f'{source} must be a SQLite file: {error}') from error

  @property
  def tables(self) -> tuple[str, ...]:
    """The tables' names as written, in the order they were made."""
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
      raise ValueError(f'table {table!r}: {result.error}')
    return result.rows[0][0]

  def find(self, name: str) -> str | None:
    """Returns the table a name means, if any: in its case, or else in any."""
    if name in self._columns:
      return name
    return next((t for t in self.tables if t.lower() == name.lower()), None)

  def sample(self, table: str, rows: int) -> Result:
    """Returns the first rows of a table."""
    return self.query(f'SELECT * FROM {_quote(table)}', rows)

  def query(self, sql: str, rows: int) -> Result:
    """Runs a query, whatever it says.

    Args:
      sql: one SELECT; comments and a last semicolon do no harm.
      rows: how many rows the result has at most.

    Returns:
      the rows, blobs read as text; or in `error` why there are none.

    Raises:
      Timeout: its time ran out before its instructions.
    """
    self._refusal, self._spent, self._late = None, 0, False
    self._start = time.thread_time()
    try:
      limits = self._limits
      refusal = checks.refusal(sql, limits.sql_length, limits.growth)
      if 'collate' in sql.lower():
        # One instruction sorts all rows then, in which comparing is slow.
        self._spent = limits.steps * 4 // 5
      return Result(error=refusal) if refusal else self._run(sql, rows)
    except MemoryError:  # of `vdbe_op` or `HEAP`
      return Result(error='the query is too complex')
    except (sqlite3.Error, sqlite3.Warning) as error:
      if self._late:
        raise Timeout(f'a query took over {self._limits.seconds} s') from error
      if 'one statement' in str(error):
        return Result(error='only one SELECT at a time is allowed')
      if 'user-defined' in str(error) and not self._refusal:
        # Python could not even read the arguments of `like.FUNCTIONS`.
        return Result(error='only text in UTF-8 can be searched')
      return Result(error=(self._refusal or str(error))[:200])
    except (ValueError, OverflowError):  # of words that Python cannot take
      return Result(error='the query is not valid SQL')

  def close(self) -> None:
    self._connection.close()

  def _run(self, sql: str, rows: int) -> Result:
    cursor = self._connection.execute(sql)
    try:
      columns = tuple(column for column, *_ in cursor.description)
      found, size = [], 0
      while len(found) < rows and (row := cursor.fetchone()):
        cells = [_decode(c) if isinstance(c, bytes) else c for c in row]
        size += sum(len(c.encode()) if isinstance(c, str) else 1 for c in cells)
        found.append(tuple(cells))
        if size > self._limits.result:
          return Result(error='the result is too big; select less')
      return Result(tuple(found), columns, cursor.fetchone() is not None)
    finally:
      cursor.close()  # or the query would stay open

  def _tick(self) -> bool:
    """Says whether to stop, every `_TICK` instructions."""
    self._spent += _TICK
    if self._spent >= self._limits.steps:
      self._refusal = _LONG
      return True
    self._late = time.thread_time() - self._start > self._limits.seconds
    return self._late

  def _priced(self, function: Callable) -> Callable:
    """Lets a call of one of `like.FUNCTIONS` cost instructions."""

    def spend(instructions):
      self._spent += instructions
      if self._spent >= self._limits.steps:
        raise ValueError(_LONG)

    def call(*values):
      try:
        return function(spend, *values)
      except ValueError as error:  # of which SQLite does not say the words
        self._refusal = str(error)
        raise

    return call

  def _authorize(self, action: int, first: str, second: str, *_) -> int:
    """Says whether a query, as it is compiled, may do something."""
    words = None
    if action == sqlite3.SQLITE_READ:
      # Without a column, the name may also be one that WITH gave.
      name = first.lower()
      secret = second or name.startswith(('sqlite_', 'pragma_'))
      if secret and name not in self._known:
        words = f'no such table: {first}'
    elif action == sqlite3.SQLITE_FUNCTION:
      if second.lower() not in FUNCTIONS:
        words = f'the function {second} is not allowed'
    elif action == sqlite3.SQLITE_RECURSIVE:
      words = 'WITH RECURSIVE is not allowed'
    elif action != sqlite3.SQLITE_SELECT:
      words = 'only SELECT is allowed'
    self._refusal = self._refusal or words
    return sqlite3.SQLITE_DENY if words else sqlite3.SQLITE_OK


def _read_schema(connection: sqlite3.Connection) -> dict[str, tuple]:
  """Returns, by table, the name and the declared type of each column."""
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
  """Writes a name so that SQL takes it as one."""
  return '"' + name.replace('"', '""') + '"'
