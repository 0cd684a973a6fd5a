"""Heartbeats of the processes of a run, over sockets to process 0.

1. Every process sends a line a second to process 0: its host, phase and
   progress, and at its end how it ended. The answer is what process 0 knows.
2. A process is lost if its connection closes before it has said that it ends,
   or if nothing has come through it for `LOST_SECONDS`: it has ended, or is
   stopped, or its host is gone. All others then end with `errors.PEER_LOST`.
3. One that fails says so. The others end after `GRACE_SECONDS` with its code,
   unless they fail in the same way before.

A process ends from its heartbeat thread: its main thread may wait for ever for
the lost one, in a collective.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

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
    self._index, self._count = processes.index(), processes.count()
    self._done = self._waits = False
    self._beats: dict[int, dict[str, Any]] = {}  # the latest of each process
    self._idle = [0.0] * self._count  # seconds since then
    self._ends: dict[int, list[Any]] = {}  # process -> [how, exit code]
    self._failed = 0.0  # seconds since one of them failed
    self._lost: str | None = None
    self._others = 0  # progress of all others
    port = 0
    if not self._index:
      is_dual = socket.has_dualstack_ipv6()
      family = socket.AF_INET6 if is_dual else socket.AF_INET
      self._connection = socket.create_server(
        ('', 0), family=family, dualstack_ipv6=is_dual
      )
      port = self._connection.getsockname()[1]
      threading.Thread(target=self._accept, daemon=True).start()
    own = host or socket.gethostname(), port
    host, port = processes.gather(own)[0]
    if self._index:
      self._connection = socket.create_connection((host, port), LOST_SECONDS)
      threading.Thread(target=self._read, daemon=True).start()

  def _accept(self) -> None:
    with contextlib.suppress(OSError), self._connection:  # until it is shut
      while True:
        args = self._connection.accept()[:1]
        threading.Thread(target=self._answer, args=args, daemon=True).start()

  def _answer(self, connection: socket.socket) -> None:
    """Answers the heartbeats of one process, in process 0."""
    index = None
    with (
      contextlib.suppress(OSError, ValueError),
      connection,
      connection.makefile('rw') as file,
    ):
      for line in file:
        beat = json.loads(line)
        index = beat['index']
        self._beats[index], self._idle[index] = beat, 0.0
        if beat['end'] is not None:
          self._ends[index] = beat['end']
        known = {
          'lost': self._lost,
          'ends': self._ends,
          'progress': self._progress(index) + watchdog.count(),
          'first': self._own(),
        }
        print(json.dumps(known), file=file, flush=True)
    if index is not None and index not in self._ends:
      self._idle[index] = LOST_SECONDS

  def _read(self) -> None:
    """Reads the answers of process 0, in another one.

    When it is gone this process ends at once, before jax aborts it.
    """
    with (
      contextlib.suppress(OSError, ValueError),
      self._connection,
      self._connection.makefile('r') as file,
    ):
      for line in file:
        known = json.loads(line)
        self._beats[0], self._idle[0] = known['first'], 0.0
        self._ends |= {int(i): x for i, x in known['ends'].items()}
        self._lost, self._others = known['lost'], known['progress']
    self._idle[0] = LOST_SECONDS
    self._judge()

  def _progress(self, index: int) -> int:
    """Returns the progress of all processes but 0 and one other."""
    beats = list(self._beats.items())
    return sum(beat['progress'] for i, beat in beats if i not in (0, index))

  def _own(self, end: list[Any] | None = None) -> dict[str, Any]:
    return {
      'index': self._index,
      'host': socket.gethostname(),
      'pid': os.getpid(),
      'phase': watchdog.current(),
      'progress': watchdog.count(),
      'end': end,
    }

  def run(self) -> None:
    before = 0
    while not self._done:
      self._beat()
      if self._waits and self._others != before:
        watchdog.others_progress()
      before = self._others
      self._judge()
      time.sleep(BEAT_SECONDS)

  def _beat(self, end: list[Any] | None = None) -> None:
    """Sends a heartbeat to process 0."""
    for index in (0,) if self._index else range(1, self._count):
      self._idle[index] += BEAT_SECONDS
    if self._index:
      with contextlib.suppress(OSError):  # `_read` sees it
        self._connection.sendall(f'{json.dumps(self._own(end))}\n'.encode())
    else:
      self._ends |= {0: end} if end else {}
      self._others = self._progress(0)

  def _judge(self) -> None:
    """Ends this process if another one is lost or has failed."""
    for index, idle in enumerate(self._idle):
      if idle >= LOST_SECONDS and index not in self._ends and not self._lost:
        self._lost = f'process {index} is lost'
        if beat := self._beats.get(index):
          self._lost = (
            f'process {index} on {beat["host"]} (pid {beat["pid"]}) is lost, '
            f'last in phase {beat["phase"]}'
          )
        self._lost += (
          f': it has ended, or has sent no heartbeat for {LOST_SECONDS:.0f} s'
        )
        if not self._index:
          time.sleep(2 * BEAT_SECONDS)  # until all others have read it
    if self._done:
      return
    for index, (reason, code) in list(self._ends.items()):
      if index != self._index and code != errors.DONE:
        self._failed += BEAT_SECONDS
        seconds = GRACE_SECONDS if code == errors.FAILED else SAVED_SECONDS
        # When process 0 is gone, jax aborts all others.
        seconds += 3 * BEAT_SECONDS if not self._index else 0.0
        if self._lost or self._failed > seconds:
          self._end(f'process {index} has ended: {reason}', code)
        return
    if self._lost:
      self._end(self._lost, errors.PEER_LOST)

  def _end(self, reason: str, code: int) -> NoReturn:
    watchdog.end(
      f'{reason}; process {self._index} ends in phase {watchdog.current()}',
      code=code,
    )

  @contextlib.contextmanager
  def waiting(self) -> Iterator[None]:
    """Has the progress of other processes count while the block waits."""
    self._waits = True
    try:
      with watchdog.waiting(lambda: 'the other processes of the run'):
        yield
    finally:
      self._waits = False

  def fail(self, error: BaseException) -> None:
    """Tells the others that this process ends with an error.

    It may have failed because another one is lost, as a collective does: the
    thread then knows it within a few heartbeats, and ends this process.
    """
    codes = {
      preemption.Preempted: errors.PREEMPTED,
      KeyboardInterrupt: errors.INTERRUPTED,
    }
    code = codes.get(type(error), errors.FAILED)
    if code == errors.FAILED:
      time.sleep(4 * BEAT_SECONDS)
    self.finish(errors.describe(error), code)

  def finish(self, reason: str = '', code: int = errors.DONE) -> None:
    """Tells the others how this process ends; process 0 waits for them."""
    self._done = True
    self._beat([reason, code])
    saved = code in (errors.PREEMPTED, errors.INTERRUPTED)
    end = time.monotonic() + (SAVED_SECONDS if saved else 2 * GRACE_SECONDS)
    others = range(1, 1 if self._index else self._count)
    while time.monotonic() < end and any(
      i not in self._ends and self._idle[i] < LOST_SECONDS for i in others
    ):
      time.sleep(0.1)
    if not self._index and code != errors.DONE:
      time.sleep(2 * BEAT_SECONDS)  # until all others have read it
    how = socket.SHUT_WR if self._index else socket.SHUT_RDWR
    with contextlib.suppress(OSError):
      self._connection.shutdown(how)
