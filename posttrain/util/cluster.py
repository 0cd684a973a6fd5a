"""The place of this process in a run of several, from flags or variables.

Flags win. Without them the variables of these launchers are read:

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID
                            as the flags; JAX_PROCESS_ID may be absent in a
                            Kubernetes Indexed Job (JOB_COMPLETION_INDEX)
    SLURM, Open MPI, TPU    several tasks or workers; jax finds the address

A run of one process has no place.
"""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from posttrain.util import errors, flags

_FLAGS = '--coordinator=HOST:PORT --num_processes=N --process_id=I'
_VARIABLES = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')


def coordinator() -> str | None:
  """Returns the flag of that name, for the flags of a command."""
  return flags.flag(
    None,
    'The address of process 0, in a run of several processes, one per host; '
    "with --num_processes and --process_id. 'auto' = as jax finds all three.",
    value='HOST:PORT',
    if_absent='the variables of SLURM, Open MPI, Kubernetes or TPU, if any',
  )


def num_processes(text: str = 'The number of processes.') -> int | None:
  """Returns the flag of that name; `text` is its help."""
  return flags.flag(None, text, value='N', if_absent='1', least=1)


def process_id() -> int | None:
  """Returns the flag of that name."""
  return flags.flag(
    None,
    'The number of this process, from 0.',
    value='I',
    if_absent='0',
    least=0,
  )


class Place(NamedTuple):
  """The place of a process; None = jax asks the launcher."""

  coordinator: str | None = None  # HOST:PORT of process 0
  count: int | None = None
  index: int | None = None


def find(
  coordinator: str | None,
  num_processes: int | None,
  process_id: int | None,
  environ: Mapping[str, str] = os.environ,
) -> Place | None:
  """Returns the place of this process; None if it is the only one.

  Args:
    coordinator: the flag; 'auto' = as jax finds it.
    num_processes: the flag.
    process_id: the flag.
    environ: the variables of the process.

  Raises:
    ValueError: some of the flags or variables are missing, or wrong.
  """
  given = coordinator, num_processes, process_id
  if coordinator == 'auto' and (num_processes, process_id) == (None, None):
    return Place()
  if any(x is not None for x in given):
    return _explicit(given, _FLAGS)
  if 'JAX_COORDINATOR_ADDRESS' in environ:
    index = environ.get('JAX_PROCESS_ID', environ.get('JOB_COMPLETION_INDEX'))
    return _explicit(
      (
        environ['JAX_COORDINATOR_ADDRESS'],
        _number('JAX_NUM_PROCESSES', environ.get('JAX_NUM_PROCESSES')),
        _number('JAX_PROCESS_ID', index),
      ),
      ', '.join(_VARIABLES),
    )
  return Place() if _has_peers(environ) else None


def _explicit(given: tuple, names: str) -> Place | None:
  coordinator, count, index = given
  if coordinator is None or count is None or index is None:
    raise ValueError(f'{names} must be given together: got {given}')
  if not re.fullmatch(r'[^\s:]+:\d{1,5}|\[[^\s\]]+\]:\d{1,5}', coordinator):
    raise ValueError(
      'the coordinator must be HOST:PORT of process 0: got '
      f'{errors.quote(coordinator)}'
    )
  if count < 1 or not 0 <= index < count:
    raise ValueError(
      'the process id must be from 0 to the number of processes - 1: got '
      f'process {index} of {count}'
    )
  return Place(coordinator, count, index) if count > 1 else None


def _number(name: str, text: str | None) -> int | None:
  if text is None or text.isdecimal():
    return None if text is None else int(text)
  raise ValueError(f'{name} must be a number: got {errors.quote(text)}')


def _has_peers(environ: Mapping[str, str]) -> bool:
  """Returns whether a launcher that jax knows has started several processes."""
  slurm = ('SLURM_JOB_ID', 'SLURM_STEP_NODELIST', 'SLURM_PROCID')
  if all(name in environ for name in slurm):
    return environ.get('SLURM_NTASKS', '1') != '1'
  if 'OMPI_COMM_WORLD_SIZE' in environ:
    return environ['OMPI_COMM_WORLD_SIZE'] != '1'
  slices = environ.get('MEGASCALE_NUM_SLICES', '1') != '1'
  return slices or ',' in environ.get('TPU_WORKER_HOSTNAMES', '')
