"""Heartbeats of the processes of a run, over sockets to process 0.

1. Every process sends process 0 a heartbeat. The answer comes a second later,
   so that all wait for one at any time and see at once if process 0 is gone.
2. A process is lost if its connection closes before it has said how it ends,
   or is silent for `LOST_SECONDS`. The others end with `errors.PEER_LOST`.
3. One that fails says so. The others end after a grace with its code, unless
   they fail in the same way before.

Process 0 decides, and its answers tell the others. Processes end from their
heartbeat threads: main threads may wait for ever for the lost one.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from posttrain import processes
from posttrain.util import errors, preemption, watchdog

LOST_SECONDS = 25.0  # without a heartbeat
BEAT_SECONDS = 1.0
GRACE_SECONDS = 10.0  # for the others to end, after one has failed
SAVED_SECONDS = 60.0  # the same, after one has saved and stopped


class Heartbeat(threading.Thread):
  """Sends heartbeats, and ends this process when another one is lost."""

  def __init__(self, host: str | None = None):
    """Connects to process 0; all processes call it together.

    Args:
      host: where the others reach process 0; None = by its name.
    """
    super().__init__(name='heartbeat', daemon=True)
    self._index = processes.index()
    # The processes that exchange heartbeats with this one and have not ended.
    self._others = {0} if self._index else set(range(1, processes.count()))
    self._beats: dict[int, dict[str, Any]] = {}  # their latest
    # Reason and exit code of this process (and the grace of the others), of
    # the first that has failed or is lost, and the same after the grace.
    self._end = self._cause = self._verdict = None
    self._progress, self._waits, port = 0, False, 0
    if not self._index:
      is_dual = socket.has_dualstack_ipv6()
      family = socket.AF_INET6 if is_dual else socket.AF_INET
      self._connection = socket.create_server(
        ('', 0), family=family, dualstack_ipv6=is_dual
      )
      port = self._connection.getsockname()[1]
    own = (host or socket.gethostname(), port), self._beat()
    address, self._first = processes.gather(own)[0]
    if self._index:
      self._connection = socket.create_connection(address, LOST_SECONDS)

  def run(self) -> None:
    if self._index:
      return self._talk(self._connection)
    with contextlib.suppress(OSError), self._connection:  # until it is shut
      while True:
        args = self._connection.accept()[:1]
        threading.Thread(target=self._talk, args=args, daemon=True).start()

  def _talk(self, connection: socket.socket) -> None:
    """Exchanges heartbeats with another process until one of both ends."""
    beat = json.loads(self._first)
    closed = contextlib.suppress(OSError, ValueError)
    with closed, connection, connection.makefile() as lines:
      connection.settimeout(LOST_SECONDS)
      if self._index:
        connection.sendall(self._beat())
      while not beat['end']:
        beat = json.loads(lines.readline())
        self._beats[beat['index']] = beat
        beats = list(self._beats.values())
        progress = watchdog.count() + sum(x['progress'] for x in beats)
        if self._waits and progress != self._progress:
          watchdog.others_progress()
        self._progress = progress
        time.sleep(0.0 if self._index else BEAT_SECONDS)
        connection.sendall(self._beat())
    self._others.discard(beat['index'])
    lost = (
      f'{beat["process"]} is lost, last in phase {beat["phase"]}: it has '
      f'ended, or has sent no heartbeat for {LOST_SECONDS:.0f} s'
    )
    end: list[Any] = beat['end'] or [lost, errors.PEER_LOST]
    if beat['index'] != self._index:  # else nothing has come
      self._decide(*end)

  def _beat(self) -> bytes:
    host, pid = socket.gethostname(), os.getpid()
    beat = {
      'index': self._index,
      'process': f'process {self._index} on {host} (pid {pid})',
      'phase': watchdog.current(),
      'progress': watchdog.count() if self._index else self._progress,
      'end': self._end if self._index else self._verdict,
    }
    return f'{json.dumps(beat)}\n'.encode()

  def _decide(self, reason: str, code: int, grace: float = 0.0) -> None:
    """Ends this process, and in process 0 all, after the end of another."""
    if code == errors.DONE or self._verdict:
      return
    self._cause = self._cause or (reason, code)
    time.sleep(grace)
    self._verdict = reason, code = self._cause
    if not self._index:
      time.sleep(2 * BEAT_SECONDS)  # until all others have read it
    where = f'process {self._index} ends in phase {watchdog.current()}'
    if not self._end:  # else it ends by itself
      watchdog.end(f'{reason}; {where}', code=code)

  @contextlib.contextmanager
  def waiting(self) -> Iterator[None]:
    """Has the progress of other processes count while the block waits."""
    self._waits = True
    try:
      with watchdog.waiting(lambda: 'the other processes of the run'):
        yield
    finally:
      self._waits = False

  def finish(self, error: BaseException | None = None) -> None:
    """Tells the others how this process ends; process 0 waits for them."""
    saved = {
      preemption.Preempted: errors.PREEMPTED,
      KeyboardInterrupt: errors.INTERRUPTED,
    }
    code = saved.get(type(error), errors.FAILED if error else errors.DONE)
    grace = SAVED_SECONDS if code in saved.values() else GRACE_SECONDS
    if code == errors.FAILED:  # a collective, because another one is lost:
      time.sleep(4 * BEAT_SECONDS)  # then the thread soon ends this process
    reason = errors.describe(error) if error else ''
    self._end = f'process {self._index} has ended: {reason}', code, grace
    with contextlib.suppress(OSError):  # of a connection that has closed
      if self._index:
        self._connection.sendall(self._beat())
      threading.Thread(target=self._decide, args=self._end, daemon=True).start()
      limit = time.monotonic() + grace + GRACE_SECONDS
      while self._others and time.monotonic() < limit:
        time.sleep(0.05)
      self._connection.shutdown(socket.SHUT_RDWR)
