"""The journal of a training service: accepted requests and their results.

An SQLite file, in which every write is on the disk when the method returns.
A request is a row, by its id, so that it is accepted once. After the process
was killed, the requests that follow a model's last save are carried out again.
A result that was stored before is not replaced.
"""

import logging
import sqlite3
import threading
import time
from typing import NamedTuple

RETRY = 10.0  # seconds until a result that could not be stored is tried again


class Row(NamedTuple):
  """An accepted request."""

  id: str
  owner: str  # the model or sampling session
  number: int  # its place there
  verb: str
  body: bytes
  kind: str | None = None  # the content type of the result; None = not finished
  point: bool = False  # whether it is a save that its model can go on from


class Journal:
  """The rows of one file."""

  def __init__(self, path: str):
    """Opens the file, or creates it."""
    # Threads share it: SQLite has locks of its own, but the count of changed
    # rows is that of the last change by any thread.
    self._lock = threading.Lock()
    self._db = sqlite3.connect(
      path, check_same_thread=False, isolation_level=None
    )
    for line in (
      'pragma journal_mode = wal',
      'pragma synchronous = full',
      'create table if not exists rows (id text primary key, owner text, '
      'number int, verb text, body blob, kind text, result blob, '
      'point int)',
    ):
      self._db.execute(line)

  def accept(self, row: Row) -> bool:
    """Stores a request; returns whether it is new."""
    sql = 'insert or ignore into rows values (?, ?, ?, ?, ?, null, null, 0)'
    with self._lock:
      return self._db.execute(sql, row[:5]).rowcount > 0

  def finish(
    self,
    id: str,
    kind: str,
    result: bytes,
    *,
    point: bool = False,
    again: bool = True,
  ) -> None:
    """Stores a result, if there is none; waits for space on a full disk.

    Args:
      id: of the request.
      kind: the content type.
      result: the body.
      point: whether it is a save from which all later requests of its model
        can be carried out again.
      again: whether it may be carried out again; if not, its body goes.
    """
    sql = (
      'update rows set kind = ?, result = ?, point = ?, '
      "body = case when ? then body else x'' end where id = ? and kind is null"
    )
    while True:
      try:
        with self._lock:
          self._db.execute(sql, (kind, result, point, again, id))
        return
      except sqlite3.OperationalError as error:
        logging.getLogger('absl').error(
          'a result waits to be stored: %s', error
        )
        time.sleep(RETRY)

  def result(self, id: str) -> tuple[str | None, bytes | None] | None:
    """Returns (kind, body), None each if not finished; None = no request."""
    sql = 'select kind, result from rows where id = ?'
    return self._db.execute(sql, (id,)).fetchone()

  def rows(self) -> list[Row]:
    """Returns all requests, in the order in which they were accepted."""
    sql = 'select id, owner, number, verb, body, kind, point from rows'
    return [Row(*row) for row in self._db.execute(f'{sql} order by rowid')]
