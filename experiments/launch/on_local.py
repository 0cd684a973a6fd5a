"""Runs on this machine, see `experiments.launch.sweep`."""

import shlex
import sys
from collections.abc import Sequence

from experiments.launch import jobs as jobs_lib
from experiments.launch import options as options_lib
from experiments.launch import sweep


def submit(
  jobs: Sequence[jobs_lib.Job], options: options_lib.Options, dry_run: bool
) -> int:
  """Runs the jobs and prints their table; returns the exit code."""
  python = options.python or sys.executable
  if dry_run:
    print(f'# {options.jobs} at a time')
    for job in jobs:
      for place in sweep.places(job, 'PORT'):
        print(shlex.join(jobs_lib.command(job, python, place)))
    return 0
  return sweep.run(
    jobs, options.workdir, options.jobs, options.restarts, sweep.local(python)
  )
