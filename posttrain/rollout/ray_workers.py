"""Worker processes as Ray actors: the only module that imports Ray.

Without RAY_ADDRESS in the environment, Ray starts on this machine with the
first worker, and ends with this process. With it, the workers are spread over
the nodes of that cluster, each of which must have this code, and the modules
that import paths name, installed or on its PYTHONPATH.

Workers reserve no CPUs. jax is kept off accelerators in them.
"""

import contextlib
import functools
import importlib.util
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from posttrain.rollout import remote
from posttrain.util import errors

START_SECONDS = 300.0  # the longest start of a worker, imports included
OBJECT_STORE = 200 * 2**20  # bytes, of Ray on this machine
_VARIABLES = {'JAX_PLATFORMS': 'cpu'}
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def is_installed() -> bool:
  """Returns whether Ray is installed; does not import it."""
  return importlib.util.find_spec('ray') is not None


def check(key: str) -> None:
  """Checks that Ray is installed; does not import it.

  Args:
    key: dotted config key of the option that needs it.

  Raises:
    ValueError: it is not.
  """
  if not is_installed():
    raise ValueError(
      f"{key} must be 'threads' in an installation without Ray: got 'ray'; "
      "run pip install 'posttrain[cluster]', or leave it out"
    )


def start(make: Callable[[], Any], concurrency: int) -> remote.Handle:
  """Begins to start an actor with a host.

  Args:
    make: builds the host, in the actor; pickled.
    concurrency: the number of calls that the host serves at a time.
  """
  return _Handle(_actor_class(), make, concurrency)


class _Actor:
  """A host in its process."""

  def __init__(self, make: Callable[[], Any]):
    self._host = make()

  def start(self) -> None:
    self._host.start()

  def call(self, method: str, args: tuple[Any, ...]) -> Any:
    return getattr(self._host, method)(*args)


class _Handle:
  """See `remote.Handle`."""

  def __init__(self, actor_class: Any, make: Callable, concurrency: int):
    options = actor_class.options(max_concurrency=concurrency)
    self._actor = options.remote(make)
    self._started = self._actor.start.remote()

  def has_started(self) -> bool:
    """Returns whether `start` would return, or raise, at once."""
    import ray

    return bool(ray.wait([self._started], timeout=0)[0])

  def start(self) -> None:
    """Waits until the host has started."""
    try:
      _get(self._started, START_SECONDS)
    except remote.TimedOut:
      raise remote.Lost(
        f'it did not start within {START_SECONDS:g} s'
      ) from None
    except Exception as error:  # of the host
      if isinstance(error, remote.Lost):
        raise
      raise remote.Lost(errors.describe(error)) from error

  def call(self, seconds: float, method: str, *args: Any) -> Any:
    """Returns the result of a method of the host."""
    return _get(self._actor.call.remote(method, args), seconds)

  def kill(self) -> None:
    """Ends the process at once."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError):
      ray.kill(self._actor)


def _get(reference: Any, seconds: float) -> Any:
  """Returns a result; raises what the actor raised, and `Lost` for its end."""
  import ray

  try:
    return ray.get(reference, timeout=seconds)
  except ray.exceptions.GetTimeoutError:
    raise remote.TimedOut from None
  except ray.exceptions.RayTaskError as error:
    raise error.cause from None
  except ray.exceptions.RayError as error:
    (line, *_) = f'{error}'.strip().splitlines() or ['']
    raise remote.Lost(f'{type(error).__name__}: {line}') from None


def connect(address: str | None = None, cpus: int | None = None) -> None:
  """Connects this process to Ray, unless it is connected.

  Args:
    address: the cluster's; None = that of RAY_ADDRESS, or else a new one on
      this machine, which ends with this process.
    cpus: the number that a new one has to share out; None = the machine's.

  Raises:
    ConnectionError: no cluster answers at the address.
  """
  import ray

  if ray.is_initialized():
    return
  os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
  options: dict[str, Any] = {'address': address}
  if not (address or os.environ.get('RAY_ADDRESS')):
    options = {
      'address': 'local',
      'num_cpus': cpus,
      'include_dashboard': False,
      'object_store_memory': OBJECT_STORE,
      '_node_ip_address': '127.0.0.1',
    }
  with _handlers_kept():
    ray.init(logging_level=logging.WARNING, **options)


@functools.cache
def _actor_class() -> Any:
  """Connects to Ray; returns the class of actors."""
  import ray

  connect()
  return ray.remote(
    num_cpus=0,
    scheduling_strategy='SPREAD',
    runtime_env={'env_vars': _VARIABLES},
  )(_Actor)


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
  """Restores the handlers of signals: Ray's own would end a run unsaved."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  handlers = [(number, signal.getsignal(number)) for number in _SIGNALS]
  try:
    yield
  finally:
    for number, handler in handlers:
      signal.signal(number, handler)
