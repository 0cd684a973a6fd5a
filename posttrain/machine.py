"""The devices, the host and the versions of a run, as texts to show."""

import importlib.metadata
import os
import platform

import jax

from posttrain import processes
from posttrain.util import release


def devices(
  kind: str | None = None, count: int | None = None, hosts: int | None = None
) -> str:
  """Returns number and kind of devices, as '16 x TPU v5 on 2 hosts'.

  Args:
    kind: their kind; None = that of the devices here.
    count: their number; None = all devices of the run.
    hosts: the number of their hosts; None = the processes of the run.
  """
  here = jax.devices()
  # Such as NVIDIA H100 80GB HBM3.
  kind = kind or ' and '.join(sorted({device.device_kind for device in here}))
  hosts = hosts or processes.count()
  text = f'{count or len(here)} x {kind}'
  return f'{text} on {hosts} hosts' if hosts > 1 else text


def host() -> str:
  """Returns cores and system of this host, without its name."""
  return f'{_cores()} CPU cores, {platform.system()} {platform.machine()}'


def versions(*names: str) -> dict[str, str]:
  """Returns {name: version} of packages, of 'posttrain' and of 'python'."""
  return {name: _version(name) for name in names}


def _version(name: str) -> str:
  if name == 'posttrain':  # may be on the path, and not installed
    return release.__version__
  if name == 'python':
    return platform.python_version()
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:  # on the path
    return 'unknown'


def _cores() -> int:
  """Returns the number of cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
