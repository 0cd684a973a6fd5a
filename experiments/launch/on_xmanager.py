"""Work units of an XManager experiment, with its local executor.

Each work unit is one run: an `xm.Binary`, so that nothing needs a container. It
is this machine's interpreter, which calls `experiments.launch.sweep` for the
run alone: that starts it again after exit codes 75, 5 and 4, and skips it if it
has finished. XManager names the experiment, keeps it in its database
(~/.xmanager) and shows the output. Its local executor ignores resources.
"""

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence

from experiments.launch import jobs as jobs_lib
from experiments.launch import options as options_lib
from experiments.launch import results, sweep
from posttrain.util import errors


class _Failed(Exception):
  """Ends the experiment early."""


def submit(
  jobs: Sequence[jobs_lib.Job], options: options_lib.Options, dry_run: bool
) -> int:
  """Runs the jobs as work units and prints their table; returns the exit code.

  Raises:
    ValueError: XManager is not installed.
  """
  if dry_run:
    print(
      f'# experiment {options.title!r}, {options.jobs} work units at a time'
    )
    for job in jobs:
      print(shlex.join([sys.executable, *arguments(job, options)]))
    return errors.DONE
  with sweep.handled(_stop):
    failures = asyncio.run(_run(jobs, options))
  print('\n'.join(results.write(jobs, options.workdir)), flush=True)
  for name, failure in failures.items():
    line = f'error: {name} must end with exit code 0: got {failure}'
    print(line, file=sys.stderr)
  return errors.FAILED if failures else errors.DONE


def _stop(number: int, _: object) -> None:
  """Ends the runs, which save, and this process; a handler of signals.

  XManager would end the shells that it starts the runs with, but not the runs.
  """
  import psutil  # XManager needs it
  from absl import logging

  logging.set_verbosity(logging.FATAL)  # XManager logs every cancelled task
  processes = psutil.Process().children(recursive=True)
  for process in processes:
    with contextlib.suppress(psutil.NoSuchProcess):
      process.terminate()
  psutil.wait_procs(processes)
  print('stopped; the same command continues the runs', file=sys.stderr)
  is_interrupt = number == signal.SIGINT
  sys.exit(errors.INTERRUPTED if is_interrupt else errors.PREEMPTED)


def arguments(job: jobs_lib.Job, options: options_lib.Options) -> list[str]:
  """Returns the arguments of the interpreter for the work unit of a job."""
  words = jobs_lib.command(job)[3:]
  words += [f'--restarts={options.restarts}', f'--hosts={job.hosts}']
  if options.python:
    words.append(f'--python={options.python}')
  return ['-m', 'experiments.launch.sweep', *words]


async def _run(
  jobs: Sequence[jobs_lib.Job], options: options_lib.Options
) -> dict[str, str]:
  """Runs the experiment; returns the failures, by the name of the run.

  Raises:
    ValueError: XManager is not installed.
  """
  try:
    from absl import flags
    from xmanager import xm, xm_local
  except ImportError as error:
    raise ValueError(
      '--on=xmanager must have the package xmanager: got an installation '
      "without it; run pip install 'posttrain[launch]', or use --on=local"
    ) from error
  if not flags.FLAGS.is_parsed():
    flags.FLAGS([sys.argv[0]])
  failures: dict[str, str] = {}
  limit = asyncio.Semaphore(options.jobs)
  executor = xm_local.Local()

  async def work_unit(experiment, binary, job: jobs_lib.Job) -> None:
    args = xm.merge_args(arguments(job, options))
    async with limit:
      unit = await experiment.add(
        xm.Job(binary, executor, name=job.name, args=args)
      )
      try:
        await unit.wait_until_complete()
      except xm.ExperimentUnitError as error:
        log = os.path.join(job.workdir, sweep.LOG)
        failures[job.name] = f'{error}; see {log}'

  with contextlib.suppress(_Failed):
    async with xm_local.create_experiment(options.title) as experiment:
      (binary,) = experiment.package(
        [xm.binary(executor_spec=executor.Spec(), path=sys.executable)]
      )
      units = (work_unit(experiment, binary, job) for job in jobs)
      await asyncio.gather(*units)
      if failures:  # else the block would end with the first one's traceback
        raise _Failed
  return failures
