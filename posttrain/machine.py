"""The devices, the host and the versions of a run, as texts to show.

`begin` and `end` write them to `WORKDIR/about.json`, for the report:

starts  a start of the run each: time, devices, host, versions
stages  number of parameters of each stage's model, and of trained ones
ended   when the last stage ended; null before
"""

import datetime
import importlib.metadata
import json
import os
import platform
from typing import Any

import jax

import posttrain
from posttrain import processes
from posttrain.util import disk

NAME = 'about.json'
MAX_STARTS = 100
VERSIONS = 'posttrain python jax jaxlib flax optax numpy'.split()


def begin(workdir: str, sizes: dict[str, dict[str, int]]) -> None:
  """Writes a start of the run; those before it stay.

  Args:
    workdir: the run's folder, claimed.
    sizes: stage -> its numbers of `parameters` and of `trained` ones.
  """
  if hasattr(os, 'sched_getaffinity'):  # the cores that it may use
    cores = len(os.sched_getaffinity(0))
  else:
    cores = os.cpu_count() or 1
  start = {
    'time': _now(),
    'devices': devices(),
    'host': f'{cores} CPU cores, {platform.system()} {platform.machine()}',
    'versions': versions(*VERSIONS),
  }
  starts = [*_about(workdir).get('starts', []), start][-MAX_STARTS:]
  _write(workdir, {'starts': starts, 'stages': sizes, 'ended': None})


def end(workdir: str) -> None:
  """Notes that the last stage has ended."""
  _write(workdir, {**_about(workdir), 'ended': _now()})


def _now() -> str:
  return f'{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC'


def _about(workdir: str) -> dict[str, Any]:
  try:
    return disk.read_json_object(os.path.join(workdir, NAME))
  except (OSError, ValueError):  # missing or damaged; the run does not need it
    return {}


def _write(workdir: str, values: dict[str, Any]) -> None:
  with disk.replacing(os.path.join(workdir, NAME)) as f:
    f.write(json.dumps(values, indent=2) + '\n')


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


def versions(*names: str) -> dict[str, str]:
  """Returns {name: version} of packages, of 'posttrain' and of 'python'."""
  # posttrain may be on the path, and not installed.
  versions = {
    'posttrain': posttrain.__version__,
    'python': platform.python_version(),
  }
  for name in names:
    if name not in versions:
      try:
        versions[name] = importlib.metadata.version(name)
      except importlib.metadata.PackageNotFoundError:  # on the path
        versions[name] = 'unknown'
  return {name: versions[name] for name in names}
