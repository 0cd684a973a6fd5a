"""Launches on Ray: the commands of their drivers, and their ends."""

import json
import shlex
import sys

import pytest

from posttrain.rollout import ray_workers
from posttrain.util import exits

pytest.importorskip('experiments.launch.jobs')  # of the launcher

from experiments.launch import __main__ as launch
from experiments.launch import jobs as jobs_lib
from experiments.launch import on_ray

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


def test_tpus_memory_and_kinds_of_gpus_are_resources(capsys):
  ((*_, word),) = commands(capsys, '--tpu=v5litepod-16', '--memory=2')
  assert json.loads(word.removeprefix('--resources=')) == {
    'TPU': 4,
    'memory': 2**31,
  }
  ((*_, word),) = commands(capsys, '--gpus=1', '--gpu_type=A100')
  assert json.loads(word.removeprefix('--resources=')) == {
    'accelerator_type:A100': 0.001
  }


def test_the_driver_takes_these_arguments(capsys):
  from experiments.launch.cluster import __main__ as cluster

  (words,) = commands(capsys, '--hosts=2', '--tpu=', '--trust_config')
  flags = cluster.PARSER.parse(words[3:])
  assert flags.hosts == 2 and flags.trust_config


def test_an_installation_without_ray_is_one_line(capsys, monkeypatch, tmp_path):
  monkeypatch.setattr(ray_workers, 'is_installed', lambda: False)
  assert launch.main([*BASE, f'--workdir={tmp_path}']) == exits.USAGE
  error = capsys.readouterr().err
  assert error.startswith('error: --on=ray must have the package ray')
  assert error.count('\n') == 1


def runs(tmp_path, *programs, restarts=2):
  """Runs jobs with these programs; returns their failures."""
  jobs = [
    jobs_lib.Job(
      f'j{i}', 'configs/arithmetic.py:tiny', (), (), f'{tmp_path}/{i}'
    )
    for i in range(len(programs))
  ]
  words = {
    job.name: [sys.executable, '-c', text]
    for job, text in zip(jobs, programs, strict=True)
  }
  all_runs = on_ray.Runs(jobs, words, 2, restarts)
  all_runs.run()
  return all_runs.failures


def test_runs_that_saved_and_stopped_start_again(tmp_path, capfd):
  again = (
    'import os, sys; p = sys.argv[0]; n = len(open("{0}").read()) if '
    'os.path.exists("{0}") else 0; open("{0}", "a").write("x"); '
    'sys.exit(75 if n < {1} else 0)'
  )
  programs = [again.format(tmp_path / f'n{i}', i) for i in (0, 1, 2, 3)]
  assert runs(tmp_path, *programs, 'raise SystemExit(1)') == {'j3': 75, 'j4': 1}
  assert [len((tmp_path / f'n{i}').read_text()) for i in range(4)] == [
    *(1, 2, 3, 3)
  ]
