"""`WORKDIR/about.json`: hardware and versions of a run, for its report.

starts  a start of the run each: time, devices, host, versions
stages  parameters of each stage's model, and those that train
ended   when the last stage ended; null before
"""

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from typing import Any

import jax

import posttrain
from posttrain import processes
from posttrain.stage import components
from posttrain.util import files, json_files

NAME = 'about.json'
MAX_STARTS = 100
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy')


def begin(workdir: str, stages: Mapping[str, components.Components]) -> None:
  """Writes a start of the run; those before it stay.

  Args:
    workdir: the run's folder, claimed.
    stages: name -> components of all stages.
  """
  before = _read(workdir).get('starts')
  starts = before if isinstance(before, list) else []
  sizes = {
    name: {'parameters': x.plan.parameters, 'trained': x.plan.trained}
    for name, x in stages.items()
  }
  starts = [*starts, start()][-MAX_STARTS:]
  _write(workdir, {'starts': starts, 'stages': sizes, 'ended': None})


def end(workdir: str) -> None:
  """Notes that the last stage has ended."""
  _write(workdir, {**_read(workdir), 'ended': _now()})


def start() -> dict[str, Any]:
  """Returns time, devices, host and versions of this process."""
  devices = jax.devices()
  kinds = {device.device_kind for device in devices}
  text = f'{len(devices)} x {" and ".join(sorted(kinds))}'
  if processes.count() > 1:
    text += f' on {processes.count()} hosts'
  return {
    'time': _now(),
    'devices': text,
    'host': f'{_cores()} CPU cores, {platform.system()} {platform.machine()}',
    'versions': {
      'posttrain': posttrain.__version__,
      'python': platform.python_version(),
      **{name: _version(name) for name in _PACKAGES},
    },
  }


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:  # on the path, not installed
    return 'unknown'


def _cores() -> int:
  """Returns the cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _now() -> str:
  return f'{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC'


def _read(workdir: str) -> dict[str, Any]:
  path = os.path.join(workdir, NAME)
  try:
    return json_files.read_object(path) if os.path.exists(path) else {}
  except ValueError:  # damaged; the run does not need it
    return {}


def _write(workdir: str, values: dict[str, Any]) -> None:
  with files.replacing(os.path.join(workdir, NAME)) as f:
    f.write(json.dumps(values, indent=2) + '\n')
