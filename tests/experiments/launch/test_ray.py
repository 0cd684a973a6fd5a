"""Launches on Ray: the commands of their drivers, and their ends."""

import shlex
import sys

from experiments.launch import __main__ as launch

BASE = ['--on=ray', '--config=configs/arithmetic.py:tiny']


def test_a_dry_run_prints_the_driver_of_every_run(capsys):
  words = (
    *(
      '--workdir=runs/x',
      '--dry_run',
      '--hosts=2',
      '--gpus=8',
      '--cpus=16',
      '--sweep=seed=0,1',
    ),
    *('--address=10.0.0.1:6379', '--time_limit=1h', '--restarts=5'),
  )
  assert launch.main([*BASE, *words]) == 0
  lines = capsys.readouterr().out.splitlines()
  first, second = (shlex.split(x) for x in lines if not x.startswith('#'))
  assert first[:3] == [sys.executable, '-m', 'experiments.launch.cluster']
  for word in (
    *('--config=configs/arithmetic.py:tiny', '--config.seed=0', '--hosts=2'),
    *('--workdir=runs/x/seed=0', '--gpus=8', '--cpus=16', '--restarts=5'),
    *('--address=10.0.0.1:6379', '--time_limit=1h'),
  ):
    assert word in first
  assert '--config.seed=1' in second
