"""Launches on Ray: the commands of their drivers, and their ends."""

import shlex
import sys

import pytest

pytest.importorskip('experiments.launch.jobs')  # of the launcher

from experiments.launch import __main__ as launch

BASE = ['--on=ray', '--config=configs/arithmetic.py:tiny']


def commands(capsys, *words):
  """Returns the words of the commands of a dry run."""
  assert launch.main([*BASE, '--workdir=runs/x', '--dry_run', *words]) == 0
  lines = capsys.readouterr().out.splitlines()
  return [shlex.split(line) for line in lines if not line.startswith('#')]


def test_a_dry_run_prints_the_driver_of_every_run(capsys):
  first, second = commands(
    capsys,
    *('--hosts=2', '--gpus=8', '--cpus=16', '--sweep=seed=0,1'),
    *('--address=10.0.0.1:6379', '--time_limit=1h', '--restarts=5'),
  )
  assert first[:3] == [sys.executable, '-m', 'experiments.launch.cluster']
  for word in (
    *('--config=configs/arithmetic.py:tiny', '--config.seed=0', '--hosts=2'),
    *('--workdir=runs/x/seed=0', '--gpus=8', '--cpus=16', '--restarts=5'),
    *('--address=10.0.0.1:6379', '--time_limit=1h'),
  ):
    assert word in first
  assert '--config.seed=1' in second
