"""Joining the other processes of a run, and ending with them.

`jax.distributed` connects the processes: process 0 has the coordinator, through
which all of them send heartbeats. The values of `processes` travel through the
devices, as those of all programs do.

1. `join` waits until all processes have joined.
2. A thread of each, the monitor, sends heartbeats and reads those of all.
3. When another process is lost or fails, the monitor ends this one: its main
   thread may wait in a collective for ever.
"""

import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax._src import distributed  # the client of the coordination service
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from posttrain import processes
from posttrain.util import cluster, exits, foreign, preemption, watchdog

START_SECONDS = 45  # for all processes to join
LOST_SECONDS = 25.0  # without a heartbeat, after which a process is lost
_BEAT_SECONDS = 2.0
_GRACE_SECONDS = 10.0  # for the others to end, after one has failed
_SAVED_SECONDS = 60.0  # the same, after one has saved and stopped
# jax ends a process of its own accord then; the monitor comes first.
_JAX_SECONDS = 50


class _Beat(NamedTuple):
  """A heartbeat."""

  number: int
  host: str
  pid: int
  phase: str
  progress: int  # `watchdog.count`


class _Peers:
  """The devices' connection between the processes."""

  def __init__(self, monitor: '_Monitor'):
    self._monitor = monitor
    self.count, self.index = jax.process_count(), jax.process_index()
    devices = {x.process_index: x for x in reversed(jax.devices())}
    self._own = devices[self.index]
    first = [devices[i] for i in range(self.count)]
    mesh = Mesh(np.array(first), ('processes',))
    self._split = NamedSharding(mesh, PartitionSpec('processes'))
    whole = NamedSharding(mesh, PartitionSpec())
    self._gather = jax.jit(lambda x: x, out_shardings=whole)

  def exchange(self, row: np.ndarray) -> np.ndarray:
    with self._monitor.waiting():
      rows = jax.make_array_from_single_device_arrays(
        (self.count, *row.shape),
        self._split,
        [jax.device_put(row[None], self._own)],
      )
      return np.asarray(self._gather(rows).addressable_data(0))


@contextlib.contextmanager
def join(place: cluster.Place | None, folder: str | None) -> Iterator[None]:
  """Joins the other processes of a run; must come before jax uses a device.

  Process 0 keeps stderr; the others write it to `folder`/<index>.log, if there
  is a folder.

  Args:
    place: the place of this process; None = there are no others.
    folder: the folder of the logs; None = all processes keep stderr.

  A process that others do not join in time ends with `exits.PEER_LOST`.
  """
  if place is None:
    yield
    return
  _initialize(place)
  # Gloo writes to stdout.
  sys.stdout.flush()
  sys.stdout = os.fdopen(os.dup(1), 'w', buffering=1)
  os.dup2(2, 1)
  state = distributed.global_state
  if state.process_id and folder is not None:
    _log_to(folder, f'{state.process_id}.log')
  monitor = _Monitor(state.num_processes, state.process_id)
  monitor.start()
  try:
    with processes.use(_Peers(monitor)):
      yield
  except BaseException as error:
    monitor.fail(error)
    raise
  monitor.leave()


def _log_to(folder: str, name: str) -> None:
  """Sends stderr to the end of a file."""
  os.makedirs(folder, exist_ok=True)
  flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
  log = os.open(os.path.join(folder, name), flags, 0o644)
  for descriptor in (1, 2):
    os.dup2(log, descriptor)
  os.close(log)


def _initialize(place: cluster.Place) -> None:
  # jax's own handler of SIGTERM would replace the train loop's.
  jax.config.update('jax_enable_preemption_service', False)
  # jax would abort the process at its own limit, which comes later.
  limit = threading.Timer(START_SECONDS, _end_alone)
  limit.daemon = True
  limit.start()
  jax.distributed.initialize(
    place.coordinator,
    place.count,
    place.index,
    # All devices of the host. None would be one of them under SLURM and Open
    # MPI, where jax expects a process per device.
    local_device_ids=_visible_devices(),
    initialization_timeout=4 * START_SECONDS,
    heartbeat_timeout_seconds=_JAX_SECONDS,
    shutdown_timeout_seconds=int(_GRACE_SECONDS),
  )
  limit.cancel()


def _visible_devices() -> list[int]:
  """Returns the devices that jax's own variable names; [] = all."""
  names = os.environ.get('JAX_LOCAL_DEVICE_IDS', '')
  return [int(name) for name in names.split(',') if name]


def _end_alone() -> NoReturn:
  """Ends this process, because others have not joined."""
  state = distributed.global_state
  absent = 'another process has not'
  if state.process_id and not _coordinator_answers():
    absent = 'process 0 does not answer there'
  watchdog.end(
    f'all processes must join at {state.coordinator_address} within '
    f'{START_SECONDS} s: {absent}; process {state.process_id} on '
    f'{socket.gethostname()} ends before its first phase; start all of them '
    'again, at the same time',
    code=exits.PEER_LOST,
  )


def _coordinator_answers() -> bool:
  address = distributed.global_state.coordinator_address or ''
  host, _, port = address.rpartition(':')
  try:
    socket.create_connection((host.strip('[]'), int(port)), 2.0).close()
  except OSError:
    return False
  return True


class _Monitor(threading.Thread):
  """Sends heartbeats, and ends this process when another one is lost.

  A process is lost if its heartbeats stop for `LOST_SECONDS`: it has ended, or
  is stopped, or its host is gone. One that fails says so, and the others end
  after `_GRACE_SECONDS` unless they fail in the same way before. One that beats
  without progress is its watchdog's affair: while this process waits for the
  others, their progress counts as its own, so that it does not end before them.
  """

  def __init__(self, count: int, index: int):
    super().__init__(name='processes', daemon=True)
    self._count, self._index = count, index
    self._client = distributed.global_state.client
    self._done = self._aborts = False
    self._beats: dict[int, _Beat] = {}  # process -> its latest
    # Seconds since the latest.
    self._idle = dict.fromkeys(range(count), 0.0)
    self._number = 0
    # What was read last: process -> its heartbeat, and -> how it has ended.
    self._heard: tuple[dict[int, _Beat], dict[int, Any]] = {}, {}
    self._waits = False  # for the other processes
    _on_abort(self._aborted)

  def run(self) -> None:
    threading.Thread(target=self._talk, name='heartbeats', daemon=True).start()
    before = time.monotonic()
    while not self._done:
      now = time.monotonic()
      # This process may have been stopped: a long pause counts as a short one.
      self._update(*self._heard, min(now - before, 2 * _BEAT_SECONDS))
      before = now
      time.sleep(_BEAT_SECONDS)

  def _talk(self) -> None:
    """Sends and reads heartbeats.

    Not in the thread that judges them: a call to a coordinator that is stopped
    does not return.
    """
    while not self._done:
      with contextlib.suppress(Exception):  # the coordinator does not answer
        self._beat()
        beats = {i: _Beat(*x) for i, x in self._read('beats/').items()}
        self._heard = beats, self._read('ended/')
      time.sleep(_BEAT_SECONDS)

  def _beat(self) -> None:
    if self._aborts:
      return
    self._number += 1
    me = socket.gethostname(), os.getpid()
    phase, progress = watchdog.current(), watchdog.count()
    self._set('beats', _Beat(self._number, *me, phase, progress))

  @contextlib.contextmanager
  def waiting(self) -> Iterator[None]:
    """Has the progress of other processes count while the block waits."""
    self._waits = True
    try:
      with watchdog.waiting(lambda: 'the other processes of the run'):
        yield
    finally:
      self._waits = False

  def _set(self, folder: str, value: Any) -> None:
    self._client.key_value_set(
      f'{folder}/{self._index}', json.dumps(value), allow_overwrite=True
    )

  def _read(self, folder: str) -> dict[int, Any]:
    entries = self._client.key_value_dir_get(folder)
    return {int(k.rpartition('/')[2]): json.loads(v) for k, v in entries}

  def _update(self, beats, ended, seconds: float) -> None:
    for process in range(self._count):
      if process == self._index:
        continue
      self._idle[process] += seconds
      beat = beats.get(process)
      if beat is not None and beat != (before := self._beats.get(process)):
        if self._waits and before and beat.progress != before.progress:
          watchdog.others_progress()
        self._beats[process], self._idle[process] = beat, 0.0
      if process in ended:
        self._end_with(process, *ended[process])
      elif self._idle[process] > LOST_SECONDS:
        # Without the coordinator no heartbeat arrives.
        gone = self._index and self._idle[0] > LOST_SECONDS / 2
        self._end(self._lost(0 if gone else process))

  def _end_with(self, process: int, reason: str, code: int) -> None:
    """Ends this process some time after another, unless it does so itself."""
    if code == exits.DONE:
      self._idle[process] = 0.0
      return
    # This one may fail in the same way; or it has saved as well, and is slower.
    seconds = _GRACE_SECONDS if code == exits.FAILED else _SAVED_SECONDS
    if self._idle[process] > seconds and not self._done:
      self._end(f'{self._describe(process)} has ended: {reason}', code)

  def _lost(self, process: int) -> str:
    beat = self._beats.get(process)
    phase = f', last in phase {beat.phase}' if beat else ''
    return (
      f'{self._describe(process)} is lost{phase}: it has ended, or has sent no '
      f'heartbeat for {LOST_SECONDS:.0f} s'
    )

  def _describe(self, process: int) -> str:
    beat = self._beats.get(process)
    where = f' on {beat.host} (pid {beat.pid})' if beat else ''
    return f'process {process}{where}'

  def _end(self, reason: str, code: int = exits.PEER_LOST) -> NoReturn:
    """Ends this process at once: its threads may wait for what is lost."""
    text = f'{reason}; process {self._index} ends in phase {watchdog.current()}'
    if code in (exits.PEER_LOST, exits.PREEMPTED):
      text += '; start all of them again'
    watchdog.end(text, code=code)

  def _aborted(self) -> None:
    """Waits until it is known why C++ code aborts this process.

    It does so when process 0 is gone, and may do so in a collective when
    another one is. If it is neither, this process ends as C++ code wants, and
    is lost for the others, to which it sends no more heartbeats.
    """
    self._aborts = True
    if self._index and not _coordinator_answers():
      self._end(self._lost(0))
    time.sleep(LOST_SECONDS + 3 * _BEAT_SECONDS)

  def fail(self, error: BaseException) -> None:
    """Tells the others that this process ends with an error.

    If it may be a failure of communication, another process is probably lost:
    this one then waits until the monitor knows which.
    """
    if _may_be_lost(error):
      time.sleep(LOST_SECONDS + 3 * _BEAT_SECONDS)
    code = exits.FAILED
    if isinstance(error, preemption.Preempted):
      code = exits.PREEMPTED
    elif isinstance(error, KeyboardInterrupt):
      code = exits.INTERRUPTED
    self._finish(foreign.error(error), code)

  def leave(self) -> None:
    """Tells the others that this process is done."""
    self._finish('', exits.DONE)

  def _finish(self, reason: str, code: int) -> None:
    with contextlib.suppress(Exception):
      self._set('ended', [reason, code])
    self._done = True
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    with contextlib.suppress(Exception):
      # Process 0 must answer until the others have read it.
      saved = code in (exits.PREEMPTED, exits.INTERRUPTED)
      wait = _SAVED_SECONDS if saved else 2 * _GRACE_SECONDS
      end = time.monotonic() + wait
      while not self._index and time.monotonic() < end:
        if len(self._read('ended/')) == self._count:
          break
        time.sleep(0.1)
    if not self._index and code != exits.DONE:
      time.sleep(_BEAT_SECONDS)  # for the others to end before its service
    if code == exits.DONE:
      with contextlib.suppress(Exception):  # this process is done all the same
        jax.distributed.shutdown()
    else:
      # At exit jax would wait for processes that hang, and C++ code abort when
      # the service is deleted before the client.
      state = distributed.global_state
      for x in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
      state.client = state.service = None


def _may_be_lost(error: BaseException) -> bool:
  """Returns whether an error may come from a lost connection.

  It is one of jax's, or has the text of an `absl::Status`, as in 'UNKNOWN: Gloo
  AllGather failed', which jax raises as ValueError too.
  """
  ours = type(error).__module__.startswith('jax')
  return ours or re.match(r'[A-Z_]{5,}: ', str(error)) is not None


_handlers: list[Any] = []  # of signals, which C code calls


def _on_abort(fn: Callable[[], None]) -> None:
  """Calls `fn` when C++ code aborts; Python's handlers would come too late."""

  def handle(_):
    try:
      fn()
    except Exception:
      logging.getLogger('absl').exception('in the handler of SIGABRT')

  _handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(handle))
  ctypes.CDLL(None).signal(int(signal.SIGABRT), _handlers[-1])
