"""A queued resource of Cloud TPU per run, with a startup script on each host.

The script runs at each boot of each host of the slice. It calls posttrain.main,
and again unless the run is done or has failed by itself (exit codes 0 to 3, and
130): after 75, 5 and 4, and where a signal has killed it. It does so `restarts`
times at most; starts that end with 5 within two minutes do not count, as they
may while another host is away. Where the slice has several hosts, jax finds
them in the metadata (--coordinator=auto).
"""

import os
import shlex
import tempfile
from collections.abc import Sequence

from experiments.launch import jobs as jobs_lib
from experiments.launch import options as options_lib
from experiments.launch import submission, tpus
from posttrain.util import errors

LOG = '/var/log/posttrain.log'
_LONGEST_NAME = 60
_SHORT_SECONDS = 120  # of a start that does not count
_PAUSE_SECONDS = 15  # after such a start
_LOOP = """
code=0
start=0
while ((start <= LIMIT)); do
  code=0 began=$SECONDS
  "${command[@]}" || code=$?
  case $code in
  FINAL) break ;;
  *) echo "exit code $code" ;;
  esac
  if ((code == LOST && SECONDS - began < SHORT)); then
    sleep PAUSE # another host is not up again yet
  else
    start=$((start + 1))
  fi
done
exit "$code"
"""


def submit(
  jobs: Sequence[jobs_lib.Job], options: options_lib.Options, dry_run: bool
) -> int:
  """Creates the queued resources, or prints how; returns the exit code.

  Raises:
    ValueError: --tpu or gcloud is missing.
    RuntimeError: gcloud has failed.
  """
  if not options.tpu:
    raise ValueError('--tpu=TYPE must be given with --on=tpu_vm')
  for job in jobs:
    text = script(job, options)
    name = job_name(job, options)
    if dry_run:
      print(f"cat > {name}.sh << 'END'\n{text}END")
      print(shlex.join(arguments(job, options, f'{name}.sh')))
      continue
    with tempfile.TemporaryDirectory() as folder:
      path = os.path.join(folder, 'startup.sh')
      with open(path, 'w') as file:
        file.write(text)
      submission.run('tpu_vm', arguments(job, options, path))
  return errors.DONE


def job_name(job: jobs_lib.Job, options: options_lib.Options) -> str:
  """Returns the name of a run's queued resource and of its slice."""
  return submission.run_name(job, options.title, _LONGEST_NAME)


def arguments(
  job: jobs_lib.Job, options: options_lib.Options, path: str
) -> list[str]:
  """Returns the arguments of gcloud.

  Args:
    job: the job.
    options: the options.
    path: the file of the startup script.
  """
  name = job_name(job, options)
  return [
    *('gcloud', 'compute', 'tpus', 'queued-resources', 'create', name),
    f'--node-id={name}',
    f'--accelerator-type={options.tpu}',
    f'--runtime-version={tpus.find(options.tpu).runtime}',
    f'--metadata-from-file=startup-script={path}',
    *options.extra,
  ]


def script(job: jobs_lib.Job, options: options_lib.Options) -> str:
  """Returns the startup script of each host."""
  place = jobs_lib.Place('auto') if job.hosts > 1 else None
  words = jobs_lib.command(job, options.python or 'python3', place)
  if options.image:
    volume = f'--volume={options.mount}:{options.mount}'
    docker = ('docker', 'run', '--rm', '--privileged', '--user=0')
    words = [*docker, '--network=host', volume, options.image, *words]
  final = (
    *(errors.DONE, errors.FAILED, errors.USAGE, errors.NO_REWARD),
    errors.INTERRUPTED,
  )
  loop = _LOOP.replace('FINAL', ' | '.join(map(str, final)))
  values = {
    'LOST': errors.PEER_LOST,
    'SHORT': _SHORT_SECONDS,
    'PAUSE': _PAUSE_SECONDS,
  }
  for word, value in values.items():
    loop = loop.replace(word, str(value))
  lines = [
    '#!/bin/bash',
    'set -u',
    f'exec >> {LOG} 2>&1',
    'export HOME="${HOME:-/root}" PYTHONUNBUFFERED=1',
    *options.setup,
    f'command=({shlex.join(words)})',
  ]
  return '\n'.join(lines) + loop.replace('LIMIT', str(options.restarts))
