"""The command line of a launch, and the jobs that it names."""

import dataclasses
import math
import os
from typing import Any

from experiments.launch import jobs as jobs_lib
from experiments.launch import tpus
from posttrain import config, main
from posttrain.util import commands, preemption

PLACES = ('local', 'ray', 'xmanager', 'slurm', 'gke', 'tpu_vm')


@dataclasses.dataclass
class Options:
  """The command line."""

  on: str = commands.required('', 'Where the runs start.', choices=PLACES)

  config: str = commands.required(
    'FILE',
    'The recipe, as posttrain.main takes it. The file must be here, where the '
    'config is checked, and at the same relative path on the hosts.',
  )

  workdir: str = commands.required(
    'DIR',
    'The folder of the run; with --sweep each run has a folder in it, named '
    'after its values. All hosts of a run must see it.',
  )

  overrides: list[tuple[str, str]] = commands.overrides()

  sweep: list[str] = commands.several(
    'KEY=VALUE,VALUE',
    'Runs each of these values of a key of the config; with several --sweep '
    'all combinations. Commas within brackets or quotes belong to a value.',
  )

  dry_run: bool = commands.flag(
    False, 'Prints what would be submitted; submits and writes nothing.'
  )

  hosts: int | None = commands.flag(
    None,
    'The number of hosts of each run, with one process on each; local starts '
    'all processes on this machine.',
    value='N',
    if_absent='those of --tpu; else 1',
    least=1,
  )

  gpus: int = commands.flag(0, 'GPUs of each host.', least=0)
  gpu_type: str = commands.flag(
    '', "The cluster's name of the GPUs, as nvidia-h100-80gb.", if_absent='any'
  )
  tpu: str = commands.flag(
    '', 'The TPU slice of each run, as v5litepod-16.', if_absent='none'
  )
  cpus: int | None = commands.flag(
    None,
    'Processor cores of each host.',
    value='N',
    if_absent="the cluster's default",
    least=1,
  )
  memory: int | None = commands.flag(
    None,
    'GiB of memory of each host.',
    value='N',
    if_absent="the cluster's default",
    least=1,
  )

  time_limit: str | None = commands.flag(
    None,
    'A run saves and stops before it has run for so long, as in 3h50m, and is '
    'started again; slurm asks for a little more time than that.',
    value='DURATION',
    if_absent='none',
  )

  restarts: int = commands.flag(
    20,
    'How often a run is started again after it has saved and stopped (exit '
    'code 75), has lost a process (5) or has made no progress (4).',
    least=0,
  )

  jobs: int = commands.flag(
    1, 'Runs at a time: local, xmanager, ray, and slurm.', least=1
  )

  name: str = commands.flag(
    '', 'The name of the launch.', if_absent="the workdir's last part"
  )

  trust_config: bool = commands.flag(False, commands.TRUST_CONFIG)

  python: str = commands.flag(
    '',
    'The interpreter on the hosts.',
    value='PATH',
    if_absent='python3; local, xmanager, ray: the one that runs this command',
  )

  setup: list[str] = commands.several(
    'TEXT',
    'A line of shell before the run, as in --setup="module load cuda": slurm '
    'runs it on the first host, whose variables all get, tpu_vm on each.',
  )

  image: str = commands.flag(
    '',
    'The container image with the code (gke; tpu_vm may have one).',
    if_absent='none',
  )
  claim: str = commands.flag(
    '',
    'gke: the PersistentVolumeClaim of the file system with the workdir.',
    if_absent='none',
  )
  mount: str = commands.flag(
    '/data', 'gke and tpu_vm with --image: the folder of that file system.'
  )
  queue: str = commands.flag(
    '', "gke: Kueue's queue; slurm: the partition.", if_absent='none'
  )
  address: str | None = commands.flag(
    None,
    "ray: the cluster's address.",
    value='HOST:PORT',
    if_absent='RAY_ADDRESS; else a cluster on this machine',
  )

  extra: list[str] = commands.several(
    'ARGUMENT',
    'A further argument of sbatch, kubectl or gcloud, as --extra=--account=me.',
  )

  def __post_init__(self):
    if self.tpu and self.gpus:
      raise ValueError(
        f'--tpu must be given without --gpus: got --gpus={self.gpus}'
      )
    if self.gpu_type and not self.gpus:
      raise ValueError('--gpu_type must be given with --gpus=N')
    if self.tpu and self.hosts not in (None, tpus.find(self.tpu).hosts):
      raise ValueError(
        f'--hosts must be the number of hosts of {self.tpu}: got {self.hosts}, '
        f'expected {tpus.find(self.tpu).hosts}'
      )

  @property
  def seconds(self) -> int | None:
    """Returns the seconds of `time_limit`."""
    if self.time_limit is None:
      return None
    return math.ceil(preemption.seconds(self.time_limit, '--time_limit'))

  @property
  def title(self) -> str:
    """Returns the name of the launch."""
    return self.name or os.path.basename(os.path.normpath(self.workdir))


def expand(options: Options) -> list[jobs_lib.Job]:
  """Returns the jobs of a launch, with configs that a run accepts.

  Raises:
    ValueError: a sweep or a config is wrong; names the flag or the key.
  """
  hosts = options.hosts or (tpus.find(options.tpu).hosts if options.tpu else 1)
  words = []
  if options.seconds is not None:
    words.append(f'--time_limit={options.time_limit}')
  if options.trust_config:
    words.append('--trust_config')
  jobs = jobs_lib.expand(
    options.config,
    options.overrides,
    options.sweep,
    options.workdir,
    options.title,
    hosts=hosts,
    resources=jobs_lib.Resources(
      options.gpus, options.gpu_type, options.tpu, options.cpus, options.memory
    ),
    flags=tuple(words),
  )
  for job in jobs:
    try:
      resolved(job)
    except ValueError as error:
      if not job.swept:
        raise
      raise ValueError(f'{error} (in the run {job.name})') from error
  return jobs


def resolved(job: jobs_lib.Job) -> dict[str, Any]:
  """Returns all options of a job, as its workdir's config.json holds them."""
  trust_config = '--trust_config' in job.flags
  run = main.load(job.config, job.overrides, trust_config)
  return config.to_dict(run)
