"""Runs on a Ray cluster: one `experiments.launch.cluster` per run, N at a time.

Each of them places the trainers of its run on the nodes, waits for them, and
starts them again after a failure; see there. Here a run is started again that
has saved and stopped (exit code 75), as --time_limit makes it.
"""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

from experiments.launch import jobs as jobs_lib
from experiments.launch import options as options_lib
from experiments.launch import results, sweep, tpus
from posttrain.rollout import ray_workers
from posttrain.util import exits

_POLL_SECONDS = 0.1


def submit(
  jobs: Sequence[jobs_lib.Job], options: options_lib.Options, dry_run: bool
) -> int:
  """Runs the jobs and prints their table; returns the exit code.

  Raises:
    ValueError: Ray is not installed.
  """
  commands = {job.name: command(job, options) for job in jobs}
  if dry_run:
    print(f'# {options.jobs} at a time')
    for words in commands.values():
      print(shlex.join(words))
    return exits.DONE
  if not ray_workers.is_installed():
    raise ValueError(
      '--on=ray must have the package ray: got an installation without it; '
      "run pip install 'posttrain[cluster]', or use --on=local"
    )
  waiting = [job for job in jobs if not sweep.is_finished(job)]
  runs = Runs(waiting, commands, options.jobs, options.restarts)
  with sweep.handled(runs.stop):
    runs.run()
  print('\n'.join(results.write(jobs, options.workdir)), flush=True)
  for name, code in runs.failures.items():
    _say(f'error: {name} must end with exit code 0: got {code}')
  if runs.signals:
    _say('stopped; the same command continues the runs')
    is_interrupt = exits.INTERRUPTED in runs.failures.values()
    return exits.INTERRUPTED if is_interrupt else exits.PREEMPTED
  return exits.FAILED if runs.failures else exits.DONE


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
  resources = _resources(job.resources)
  if resources:
    words.append(f'--resources={json.dumps(resources)}')
  return words


def _resources(needed: jobs_lib.Resources) -> dict[str, float]:
  """Returns what a host must have beside cores and GPUs, as Ray names it."""
  resources: dict[str, float] = {}
  if needed.tpu:
    resources['TPU'] = tpus.find(needed.tpu).chips_per_host
  if needed.gpu_type:
    resources[f'accelerator_type:{needed.gpu_type}'] = 0.001
  if needed.memory is not None:
    resources['memory'] = needed.memory * 2**30
  return resources


@dataclasses.dataclass
class _Run:
  """A job and its driver."""

  job: jobs_lib.Job
  process: subprocess.Popen
  restarts: int = 0


class Runs:
  """The drivers of jobs, some at a time."""

  def __init__(
    self,
    jobs: Sequence[jobs_lib.Job],
    commands: dict[str, list[str]],
    at_a_time: int,
    restarts: int,
  ):
    """Starts nothing yet.

    Args:
      jobs: the jobs, in order.
      commands: the arguments of each job's driver, by name.
      at_a_time: the number of drivers at a time.
      restarts: how often a driver is started again after exit code 75.
    """
    self._waiting, self._running = list(jobs), []
    self._commands, self._at_a_time = commands, at_a_time
    self._restarts = restarts
    self.signals: list[int] = []
    self.failures: dict[str, int] = {}  # exit codes but 0, by name

  def stop(self, number: int, *_: object) -> None:
    """Passes a signal on, and starts no more; a handler."""
    self.signals.append(number)
    for run in self._running:
      if run.process.poll() is None:
        run.process.send_signal(number)

  def run(self) -> None:
    """Runs all jobs; returns when none is left, or after a signal."""
    while self._running or (self._waiting and not self.signals):
      free = self._at_a_time - len(self._running)
      while self._waiting and free and not self.signals:
        job = self._waiting.pop(0)
        self._running.append(_Run(job, self._start(job)))
        free -= 1
      for run in list(self._running):
        code = run.process.poll()
        if code is not None and not self._starts_again(run, code):
          self._end(run, code)
      time.sleep(_POLL_SECONDS)

  def _start(self, job: jobs_lib.Job) -> subprocess.Popen:
    os.makedirs(job.workdir, exist_ok=True)
    path = os.path.join(job.workdir, sweep.LOG)
    with open(path, 'ab') as log:
      # In a group of its own: signals reach it from this process alone.
      process = subprocess.Popen(
        self._commands[job.name],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        process_group=0,
      )
    _say(f'{job.name}: started, see {path}')
    return process

  def _starts_again(self, run: _Run, code: int) -> bool:
    again = jobs_lib.starts_again([code]) and not self.signals
    if again and run.restarts < self._restarts:
      run.restarts += 1
      run.process = self._start(run.job)
      return True
    return False

  def _end(self, run: _Run, code: int) -> None:
    self._running.remove(run)
    if code:
      self.failures[run.job.name] = code
    else:
      sweep.mark_finished(run.job)
    _say(f'{run.job.name}: exit code {code}')


def _say(line: str) -> None:
  print(line, file=sys.stderr, flush=True)
