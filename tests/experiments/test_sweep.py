"""Sweeps on this machine, mostly of runs that only pretend to train."""

import signal
import subprocess
import sys

import pytest

from experiments.launch import jobs, sweep
from experiments.trials import base
from posttrain.metrics import writers
from posttrain.util import errors
from tests.experiments.launch import fake_runs

CONFIG = 'configs/arithmetic.py:tiny'


def starts(job):
  return fake_runs.read(job.workdir)


def seeds(folder, values='1,2,3', overrides=(), **fields):
  texts = [f'seed={values}']
  return jobs.expand(CONFIG, overrides, texts, str(folder), **fields)


@pytest.fixture
def play(fake, tmp_path):
  """Returns a function that runs jobs with codes by seed, in a folder."""

  def run(found, codes, *args, **options):
    commands = sweep.local(fake(codes))
    folder = str(tmp_path / 'w')
    return sweep.run(found, folder, *args, commands=commands, **options)

  return run


def test_all_runs_finish_and_end_with_one_table(play, tmp_path, capsys):
  found = seeds(tmp_path / 'w')
  assert play(found, dict.fromkeys('123', [0]), 2) == errors.DONE
  table = (
    '| seed | stage | step | pass_rate/sums |\n|---|---|---|---|\n'
    '| 1 | grpo | 3 | 0.1 |\n| 2 | grpo | 3 | 0.2 |\n| 3 | grpo | 3 | 0.3 |\n'
  )
  text = capsys.readouterr()
  assert text.out == table == (tmp_path / 'w' / 'results.md').read_text()
  rows = writers.read(str(tmp_path / 'w' / 'results.jsonl'))
  assert rows[1]['sweep'] == {'seed': '2'}
  words = [line.split()[1] for line in text.err.splitlines()]
  assert words[:3] == ['started,', 'started,', 'done']  # two at a time
  (start,) = starts(found[0])
  assert start['config'] == CONFIG and start['config.seed'] == '1'


def test_only_unfinished_runs_and_other_configs_run_again(play, tmp_path):
  found = seeds(tmp_path / 'w')
  codes = {'1': [0, 0], '2': [0], '3': [1, 0]}
  assert play(found, codes, 3) == errors.FAILED
  assert play(found, codes, 3) == errors.DONE
  assert [len(starts(job)) for job in found] == [1, 1, 2]
  (other,) = seeds(tmp_path / 'w', '1', [('sft.steps', '30')])
  play([other], codes)
  assert [x.get('config.sft.steps') for x in starts(other)] == [None, '30']


def test_runs_start_again_after_some_codes_and_failures_are_named(
  play, tmp_path, capsys
):
  found = seeds(tmp_path / 'w', '1,2,3,4')
  codes = {'1': [75, 5, 0], '2': [75], '3': [1], '4': [-9]}
  assert play(found, codes, 4, restarts=3) == errors.FAILED
  assert [len(starts(job)) for job in found] == [3, 4, 1, 1]
  shown = capsys.readouterr().err
  assert 'got exit code 1' in shown and 'got killed by signal 9' in shown


def test_processes_of_a_run_have_one_coordinator_and_own_gpus(play, tmp_path):
  resources = jobs.Resources(gpus=2)
  found = seeds(tmp_path / 'w', '1,2', hosts=2, resources=resources)
  assert play(found, {'1': [[5, -9], 0], '2': [0]}, 2) == errors.DONE
  first = starts(found[0])
  assert sorted(start['process_id'] for start in first) == ['0', '0', '1', '1']
  assert {start['num_processes'] for start in first} == {'2'}
  assert all(x['coordinator'].startswith('127.0.0.1:') for x in first)
  gpus = {start['gpus'] for job in found for start in starts(job)}
  assert gpus == {'0,1', '2,3', '4,5', '6,7'}


@pytest.mark.parametrize(
  ('number', 'code'), [(signal.SIGTERM, 75), (signal.SIGINT, 130)]
)
def test_a_signal_reaches_the_runs_and_the_same_command_continues(
  fake, tmp_path, number, code
):
  python = fake({'1': ['wait', 0], '2': [0]})
  command = [
    *(sys.executable, '-m', 'experiments.launch.sweep', f'--config={CONFIG}'),
    *('--sweep=seed=1,2', f'--workdir={tmp_path / "w"}', f'--python={python}'),
  ]
  process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
  base.wait_for((tmp_path / 'w' / 'seed=1' / 'ready').exists)
  process.send_signal(number)
  _, shown = process.communicate(timeout=60)
  assert process.returncode == code, shown
  assert 'the same command continues 2 of 2 runs' in shown
  first, second = seeds(tmp_path / 'w', '1,2')
  assert [start['code'] for start in starts(first)] == [code]
  assert not starts(second)
  assert subprocess.run(command, capture_output=True).returncode == 0
  assert len(starts(first)) == 2 and len(starts(second)) == 1
