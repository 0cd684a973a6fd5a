"""SQLite's date functions at a fixed time, in UTC.

    date('now')    the date of `now`, as CURRENT_DATE is; so is date()
    'localtime'    no change, and so is 'utc': the zone is UTC

So results depend neither on the clock nor on the zone of the machine. SQLite's
own functions compute them, on a connection without a database, after arguments
that would read either are replaced. Blobs are read as text, up to a NUL, as
SQLite does.
"""

import functools
import sqlite3
from collections.abc import Callable, Iterator

from posttrain import schema

Value = str | bytes | int | float | None
Spend = Callable[[int], None]

NOW = schema.SqlFiles.now
# Function -> index of its first time argument.
_FIRST = {
  'date': 0,
  'time': 0,
  'datetime': 0,
  'julianday': 0,
  'unixepoch': 0,
  'strftime': 1,
  'timediff': 0,
}
_CURRENT = {
  'current_date': 'date',
  'current_time': 'time',
  'current_timestamp': 'datetime',
}
NAMES = frozenset((*_FIRST, *_CURRENT))
_CLOCK = ('now', 'subsec', 'subsecond')  # times that read the clock
_ZONES = ('localtime', 'utc')  # modifiers that read the zone
_NO_CHANGE = '+0 days'  # instead of them: the order of modifiers matters


class Dates:
  """The date functions of one connection."""

  def __init__(self, now: str, length: int):
    """Sets the time; connects on the first call.

    Args:
      now: UTC, as 'YYYY-MM-DD HH:MM:SS'.
      length: maximum bytes of a result.
    """
    self._now, self._length = now, length
    self._connection: sqlite3.Connection | None = None

  def functions(self) -> Iterator[tuple[str, int, Callable]]:
    """Yields (name, arguments, function) of what this SQLite has.

    Each function takes `spend` first, as those of `like`; -1 arguments means
    any number.
    """
    for name, first in _FIRST.items():
      if name in _known():
        count = 2 if name == 'timediff' else -1
        yield name, count, functools.partial(self._call, name, first)
    for name, plain in _CURRENT.items():
      yield name, 0, functools.partial(self._call, plain, 0)

  def close(self) -> None:
    if self._connection is not None:
      self._connection.close()

  def _call(self, name: str, first: int, spend: Spend, *values: Value) -> Value:
    """Calls SQLite's function with arguments that read no clock and no zone.

    Raises:
      ValueError: the result is too long, or `spend` raised it.
    """
    arguments = [*map(_text, values)]
    # A format may take a few hundred nanoseconds per letter.
    spend(20 + sum(len(x) for x in arguments if isinstance(x, str)) // 2)
    if len(arguments) == first:
      arguments.append('now')
    times = len(arguments) if name == 'timediff' else first + 1
    for i in range(first, len(arguments)):
      word = arguments[i].lower() if isinstance(arguments[i], str) else ''
      if i < times and word in _CLOCK:
        arguments[i] = self._now
        if word != 'now':
          arguments.insert(i + 1, word)
      elif i >= times and word in _ZONES:
        arguments[i] = _NO_CHANGE
    return self._run(name, arguments)

  def _run(self, name: str, arguments: list[Value]) -> Value:
    if self._connection is None:
      self._connection = sqlite3.connect(':memory:', check_same_thread=False)
      self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, self._length)
      self._connection.text_factory = lambda data: data.decode(errors='replace')
    sql = f'SELECT {name}({", ".join("?" * len(arguments))})'
    try:
      return self._connection.execute(sql, arguments).fetchone()[0]
    except sqlite3.Error as error:
      raise ValueError(str(error)) from error


@functools.cache
def _known() -> frozenset[str]:
  """Returns the names of the functions of this version of SQLite."""
  connection = sqlite3.connect(':memory:')
  try:
    names = connection.execute('SELECT name FROM pragma_function_list')
    return frozenset(name for (name,) in names)
  finally:
    connection.close()


def _text(value: Value) -> Value:
  """Returns texts and blobs as the text that SQLite's functions read."""
  if isinstance(value, bytes):
    value = value.decode('utf-8', 'replace')
  return value.partition('\0')[0] if isinstance(value, str) else value
