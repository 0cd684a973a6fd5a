"""Joining the other processes of a run, and leaving them.

`jax.distributed` connects the processes. The values of `processes` travel
through the devices, as those of all programs do. `heartbeat` ends this process
when another one is lost; jax's own time limit would do so later.
"""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from posttrain import processes
from posttrain.hosts import heartbeat
from posttrain.util import commands, errors, watchdog

START_SECONDS = 45  # for all processes to join
JAX_SECONDS = 120  # without a heartbeat of jax, after which it ends all


class _Peers:
  """The devices' connection between the processes."""

  def __init__(self):
    self.count, self.index = jax.process_count(), jax.process_index()
    devices = {x.process_index: x for x in reversed(jax.devices())}
    self._own = devices[self.index]
    first = [devices[i] for i in range(self.count)]
    mesh = Mesh(np.array(first), ('processes',))
    self._split = NamedSharding(mesh, PartitionSpec('processes'))
    whole = NamedSharding(mesh, PartitionSpec())
    self._gather = jax.jit(lambda x: x, out_shardings=whole)
    self.waiting: Callable[[], Any] = contextlib.nullcontext

  def exchange(self, row: np.ndarray) -> np.ndarray:
    with self.waiting():
      rows = jax.make_array_from_single_device_arrays(
        (self.count, *row.shape),
        self._split,
        [jax.device_put(row[None], self._own)],
      )
      return np.asarray(self._gather(rows).addressable_data(0))


@contextlib.contextmanager
def join(place: commands.Place | None, folder: str | None) -> Iterator[None]:
  """Joins the other processes of a run; must come before jax uses a device.

  Process 0 keeps stderr; the others write it to `folder`/<index>.log, if there
  is a folder. A process that others do not join in time ends with
  `errors.PEER_LOST`.

  Args:
    place: the place of this process; None = there are no others.
    folder: the folder of the logs; None = all processes keep stderr.
  """
  if place is None:
    yield
    return
  # 1. jax connects the processes. Its own handler of SIGTERM would replace the
  # train loop's, and it would abort the process at its own limit, which comes
  # after ours.
  jax.config.update('jax_enable_preemption_service', False)
  limit = threading.Timer(
    START_SECONDS,
    watchdog.end,
    [
      f'all processes must join at {place.coordinator or "their coordinator"} '
      f'within {START_SECONDS} s: process {place.index} on '
      f'{socket.gethostname()} ends before its first phase; start all of them '
      'again, at the same time'
    ],
    {'code': errors.PEER_LOST},
  )
  limit.daemon = True
  limit.start()
  # The ids that jax's own variable names, else all devices of the host. With
  # None, jax takes one device per process under SLURM and Open MPI.
  names = os.environ.get('JAX_LOCAL_DEVICE_IDS', '')
  jax.distributed.initialize(
    place.coordinator,
    place.count,
    place.index,
    local_device_ids=[int(name) for name in names.split(',') if name],
    initialization_timeout=4 * START_SECONDS,
    heartbeat_timeout_seconds=JAX_SECONDS,
    shutdown_timeout_seconds=int(heartbeat.GRACE_SECONDS),
  )
  limit.cancel()
  # 2. Gloo writes to stdout; all processes but the first write to a file.
  sys.stdout.flush()
  sys.stdout = os.fdopen(os.dup(1), 'w', buffering=1)
  os.dup2(2, 1)
  peers = _Peers()
  if peers.index and folder is not None:
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f'{peers.index}.log'), 'ab') as log:
      for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
  # 3. Heartbeats while the run goes on.
  host = (place.coordinator or '').rpartition(':')[0].strip('[]')
  with processes.use(peers):
    beats = heartbeat.Heartbeat(host or None)
    beats.start()
    peers.waiting = beats.waiting
    try:
      yield
    except BaseException as error:
      beats.finish(error)
      raise
    beats.finish()
  jax.distributed.shutdown()
