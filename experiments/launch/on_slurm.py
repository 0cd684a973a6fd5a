"""An sbatch script: one job per run, an array for a sweep.

srun starts a process on each node; posttrain.main reads its place from SLURM's
variables. SLURM sends SIGTERM to the processes two minutes before its time
limit, so that the run saves. (Not to the script, as B:TERM does: srun kills its
tasks when it gets that signal.) The script requeues itself after exit codes 75,
5 and 4, and where a process was killed; its log goes on in the same file. A
process that is still there five minutes after another has ended is killed.
"""

import os
import shlex
import signal
from collections.abc import Sequence

from experiments.launch import jobs as jobs_lib
from experiments.launch import options as options_lib
from experiments.launch import submission
from posttrain.util import errors

_SIGNAL_SECONDS = 120  # between the signal and SLURM's time limit
# What SLURM's time limit allows beyond --time_limit, which starts with Python.
_EXTRA_MINUTES = 5
# For the others, after the first process has ended; a stopped one never ends.
_WAIT_SECONDS = 300
_LAST = """
trap : TERM # SLURM may send it to the script as well, which has to go on
code=0
srun --kill-on-bad-exit=0 WAIT SRUN"${command[@]}" || code=$?

case $code in
RESTARTED)
  if ((${SLURM_RESTART_COUNT:-0} < LIMIT)); then
    echo "exit code $code, requeued"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  ;;
esac
exit "$code"
"""


def submit(
  jobs: Sequence[jobs_lib.Job], options: options_lib.Options, dry_run: bool
) -> int:
  """Submits the script, or prints it; returns the exit code.

  Raises:
    ValueError: sbatch is absent or refuses the script.
  """
  text = script(jobs, options)
  if dry_run:
    print(shlex.join(arguments(options)), "<< 'END'")
    print(f'{text}END')
    return errors.DONE
  os.makedirs(options.workdir, exist_ok=True)
  submission.run('slurm', arguments(options), text)
  return errors.DONE


def arguments(options: options_lib.Options) -> list[str]:
  """Returns the arguments of sbatch, which reads the script from stdin.

  All texts of the user are here: SLURM reads the script's #SBATCH lines by
  rules of its own, which have no quotes for them.
  """
  folder = os.path.abspath(options.workdir).replace('%', '%%')
  log = '%x-%A_%a.log' if options.sweep else '%x-%j.log'
  return [
    *('sbatch', f'--job-name={options.title}', f'--chdir={os.getcwd()}'),
    f'--output={os.path.join(folder, log)}',
    *([f'--partition={options.queue}'] if options.queue else []),
    *options.extra,
  ]


def script(jobs: Sequence[jobs_lib.Job], options: options_lib.Options) -> str:
  """Returns the sbatch script of jobs that have the same resources."""
  codes = [errors.PREEMPTED, errors.PEER_LOST, errors.STALLED, 128 + 15]
  if jobs[0].hosts > 1:
    # srun returns the highest exit code, which a killed process raises.
    codes += [128 + signal.SIGABRT, 128 + signal.SIGKILL, 128 + signal.SIGSEGV]
  resources = jobs[0].resources
  # Numbers and names of devices.
  directives = [
    *(f'--nodes={jobs[0].hosts}', '--ntasks-per-node=1'),
    *('--requeue', '--open-mode=append', f'--signal=TERM@{_SIGNAL_SECONDS}'),
  ]
  if options.sweep:
    directives.append(f'--array=0-{len(jobs) - 1}%{options.jobs}')
  if options.seconds is not None:
    minutes = -(-options.seconds // 60) + _EXTRA_MINUTES
    directives.append(f'--time={minutes}')
  if resources.gpus:
    kind = f'{resources.gpu_type}:' if resources.gpu_type else ''
    directives.append(f'--gpus-per-node={kind}{resources.gpus}')
  srun = ''
  if resources.cpus is not None:
    cpus = f'--cpus-per-task={resources.cpus}'
    directives.append(cpus)
    srun = f'{cpus} '  # which it does not take from the job
  if resources.memory is not None:
    directives.append(f'--mem={resources.memory}G')
  last = _LAST.replace('RESTARTED', ' | '.join(map(str, codes)))
  last = (
    last.replace('WAIT', f'--wait={_WAIT_SECONDS}')
    .replace('SRUN', srun)
    .replace('LIMIT', str(options.restarts))
  )
  lines = [
    '#!/bin/bash',
    *(f'#SBATCH {line}' for line in directives),
    'set -u',
    'export PYTHONUNBUFFERED=1',
    *options.setup,
    '',
    'case ${SLURM_ARRAY_TASK_ID:-0} in',
  ]
  for i, job in enumerate(jobs):
    words = jobs_lib.command(job, options.python or 'python3')
    lines += [f'{i}) # {job.name}', f'  command=({shlex.join(words)})', '  ;;']
  lines += [
    '*)',
    '  echo "no run has the number $SLURM_ARRAY_TASK_ID" >&2',
    f'  exit {errors.USAGE}',
    '  ;;',
    'esac',
  ]
  return '\n'.join(lines) + f'\n{last}'
