"""`WORKDIR/about.json`: hardware and versions of a run, for its report.

starts  a start of the run each: time, devices, host, versions
stages  number of parameters of each stage's model, and of trained ones
ended   when the last stage ended; null before
"""

import datetime
import json
import os
from collections.abc import Mapping
from typing import Any

from posttrain import machine
from posttrain.stage import components
from posttrain.util import files, json_files

NAME = 'about.json'
MAX_STARTS = 100
_VERSIONS = ('posttrain', 'python', 'jax', 'jaxlib', 'flax', 'optax', 'numpy')


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
  return {
    'time': _now(),
    'devices': machine.devices(),
    'host': machine.host(),
    'versions': machine.versions(*_VERSIONS),
  }


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
