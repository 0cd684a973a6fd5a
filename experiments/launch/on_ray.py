"""Runs on a Ray cluster: one `experiments.launch.cluster` per run, N at a time.

Each of them places the trainers of its run on the nodes, waits for them, and
starts them again after a failure; see there. Here a run is started again that
has saved and stopped (exit code 75), as --time_limit makes it.
"""

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence

from experiments.launch import jobs as jobs_lib
from experiments.launch import options as options_lib
from experiments.launch import sweep, tpus
from posttrain.rollout import remote
from posttrain.util import errors


def submit(
  jobs: Sequence[jobs_lib.Job], options: options_lib.Options, dry_run: bool
) -> int:
  """Runs the jobs and prints their table; returns the exit code.

  Raises:
    ValueError: Ray is not installed.
  """
  if dry_run:
    print(f'# {options.jobs} at a time')
    for job in jobs:
      print(shlex.join(command(job, options)))
    return errors.DONE
  if not remote.is_installed():
    raise ValueError(
      '--on=ray must have the package ray: got an installation without it; '
      "run pip install 'posttrain[cluster]', or use --on=local"
    )
  drivers = {job.name: command(job, options) for job in jobs}
  bare = [  # Ray places the devices
    dataclasses.replace(job, resources=jobs_lib.Resources()) for job in jobs
  ]
  return sweep.run(
    bare,
    options.workdir,
    options.jobs,
    options.restarts,
    lambda job: [drivers[job.name]],
  )


def command(job: jobs_lib.Job, options: options_lib.Options) -> list[str]:
  """Returns the arguments that start the driver of a job."""
  words = jobs_lib.command(job, options.python or sys.executable)
  words[2] = 'experiments.launch.cluster'
  words += [f'--hosts={job.hosts}', f'--restarts={options.restarts}']
  if options.address is not None:
    words.append(f'--address={options.address}')
  if job.resources.cpus is not None:
    words.append(f'--cpus={job.resources.cpus}')
  if job.resources.gpus:
    words.append(f'--gpus={job.resources.gpus}')
  # What a host must have beside cores and GPUs, as Ray names it.
  resources, needed = {}, job.resources
  if needed.tpu:
    resources['TPU'] = tpus.find(needed.tpu).chips_per_host
  if needed.gpu_type:
    resources[f'accelerator_type:{needed.gpu_type}'] = 0.001
  if needed.memory is not None:
    resources['memory'] = needed.memory * 2**30
  if resources:
    words.append(f'--resources={json.dumps(resources)}')
  return words
