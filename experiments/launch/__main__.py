"""The launcher: starts one run, or a sweep of runs, here or on a cluster.

    python -m experiments.launch --on=local --config=configs/arithmetic.py \\
        --sweep=grpo.optim.lr=1e-4,3e-4 --jobs=2 --workdir=runs/lr
    python -m experiments.launch --on=slurm --config=configs/arithmetic.py \\
        --sweep=seed=0,1,2 --workdir=runs/seeds --hosts=2 --gpus=8 --dry_run

local and xmanager run on this machine, ray on its cluster, and all three wait
for the runs and print a table of their final evaluations; slurm, gke and
tpu_vm submit and return. Described in docs/launch.md.

Exit codes: 0 done or submitted, 1 a run or the submission failed, 2 the command
line or a config is wrong, 75 stopped by SIGTERM after the runs have saved, 130
interrupted; after the last two the same command continues.
"""

import importlib
import sys
from collections.abc import Sequence

from experiments.launch import options as options_lib
from posttrain.config import names
from posttrain.util import commands, imports

Flags = options_lib.Options
PARSER = commands.Parser(Flags, __doc__, names.flag)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code. `argv=None`: the process's."""
  imports.add_current_folder()  # XManager's command has its own instead
  return PARSER.run(_run, argv, 'experiments.')


def _run(options: options_lib.Options) -> int:
  jobs = options_lib.expand(options)
  place = importlib.import_module(f'experiments.launch.on_{options.on}')
  return place.submit(jobs, options, options.dry_run)


if __name__ == '__main__':
  sys.exit(main())
