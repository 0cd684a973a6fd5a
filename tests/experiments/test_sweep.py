"""Sweeps on this machine, mostly of runs that only pretend to train."""

import signal
import subprocess
import sys
import time

import pytest

from experiments.launch import jobs, results, sweep
from posttrain.metrics import writers
from posttrain.util import exits
from tests.experiments.launch import fake_runs

CONFIG = 'configs/arithmetic.py:tiny'


def starts(job):
  return fake_runs.read(job.workdir)


def seeds(folder, values='1,2,3', overrides=(), **fields):
  texts = [f'seed={values}']
  return jobs.expand(CONFIG, overrides, texts, str(folder), **fields)


def test_all_runs_finish_and_end_with_one_table(fake, tmp_path, capsys):
  python = fake({'1': [0], '2': [0], '3': [0]})
  found = seeds(tmp_path / 'w')
  assert sweep.run(found, str(tmp_path / 'w'), 2, python=python) == 0
  table = (
    '| seed | stage | step | pass_rate/sums |\n|---|---|---|---|\n'
    '| 1 | grpo | 3 | 0.1 |\n| 2 | grpo | 3 | 0.2 |\n| 3 | grpo | 3 | 0.3 |\n'
  )
  assert capsys.readouterr().out == table
  assert (tmp_path / 'w' / 'results.md').read_text() == table
  rows = writers.read(str(tmp_path / 'w' / 'results.jsonl'))
  assert rows[1] == {
    **{'name': 'seed=2', 'sweep': {'seed': '2'}, 'stage': 'grpo', 'step': 3},
    'eval/pass_rate/sums': 0.2,
  }
  (start,) = starts(found[0])
  assert start['config'] == CONFIG and start['config.seed'] == '1'
  log = (tmp_path / 'w' / 'seed=1' / 'log.txt').read_text()
  assert log == 'the last line of 1\n'


@pytest.mark.parametrize('number', [1, 2, 9])
def test_so_many_run_at_a_time(number, fake, tmp_path, capsys):
  python = fake(dict.fromkeys('12345', [0]))
  found = seeds(tmp_path / 'w', '1,2,3,4,5')
  sweep.run(found, str(tmp_path / 'w'), number, python=python)
  running, most = 0, 0
  for line in capsys.readouterr().err.splitlines():
    running += {'started,': 1, 'done': -1}[line.split()[1]]
    most = max(most, running)
  assert (running, most) == (0, min(number, 5))


def test_a_finished_run_is_not_run_again(fake, tmp_path, capsys):
  python = fake({'1': [0], '2': [0], '3': [1, 0]})
  folder = str(tmp_path / 'w')
  found = seeds(folder)
  assert sweep.run(found, folder, 3, python=python) == exits.FAILED
  capsys.readouterr()
  assert sweep.run(found, folder, 3, python=python) == exits.DONE
  assert [len(starts(job)) for job in found] == [1, 1, 2]
  text = capsys.readouterr()
  assert text.out.count('| grpo |') == 3
  assert text.err.count('finished before') == 2


def test_a_run_of_another_config_is_run_again(fake, tmp_path):
  python = fake({'1': [0]})
  folder = str(tmp_path / 'w')
  for steps in ('20', '20', '30'):
    (job,) = seeds(folder, '1', [('sft.steps', steps)])
    sweep.run([job], folder, python=python)
  assert [start['config.sft.steps'] for start in starts(job)] == ['20', '30']


def test_a_run_starts_again_after_some_exit_codes(fake, tmp_path):
  python = fake({'1': [75, 5, 0], '2': [75], '3': [0]})
  folder = str(tmp_path / 'w')
  found = seeds(folder)
  code = sweep.run(found, folder, 3, restarts=3, python=python)
  assert code == exits.FAILED  # seed 2 never finishes
  assert [len(starts(job)) for job in found] == [3, 4, 1]


def test_failures_are_named_with_the_last_line_of_their_log(
  fake, tmp_path, capsys
):
  python = fake({'1': [1], '2': [0], '3': [-9]})
  folder = str(tmp_path / 'w')
  assert sweep.run(seeds(folder), folder, python=python) == exits.FAILED
  text = capsys.readouterr()
  assert text.err.splitlines()[-2:] == [
    'error: seed=1 must end with exit code 0: got exit code 1: the last line '
    'of 1',
    'error: seed=3 must end with exit code 0: got killed by signal 9: the last '
    'line of 3',
  ]
  assert '| 2 | grpo |' in text.out and '| 1 |' not in text.out


def test_processes_of_a_run_have_one_coordinator(fake, tmp_path):
  python = fake({'1': [[5, -9], 0]})
  folder = str(tmp_path / 'w')
  (job,) = seeds(folder, '1', hosts=2)
  assert sweep.run([job], folder, python=python) == exits.DONE
  found = starts(job)
  assert sorted(start['process_id'] for start in found) == ['0', '0', '1', '1']
  assert {start['num_processes'] for start in found} == {'2'}
  addresses = {start['coordinator'] for start in found}
  assert all(address.startswith('127.0.0.1:') for address in addresses)
  assert len(addresses) <= 2  # one per start


def test_a_process_that_outlives_a_failure_is_ended(
  fake, tmp_path, monkeypatch
):
  monkeypatch.setattr(sweep, '_OTHERS_SECONDS', 0.3)
  python = fake({'1': [[1, 'wait']]})
  folder = str(tmp_path / 'w')
  (job,) = seeds(folder, '1', hosts=2)
  assert sweep.run([job], folder, python=python) == exits.FAILED


def test_each_process_has_gpus_of_its_own(fake, tmp_path):
  python = fake(dict.fromkeys('12', [0]))
  folder = str(tmp_path / 'w')
  resources = jobs.Resources(gpus=2)
  found = seeds(folder, '1,2', hosts=2, resources=resources)
  sweep.run(found, folder, 2, python=python)
  gpus = [start['gpus'] for job in found for start in starts(job)]
  assert sorted(gpus) == ['0,1', '2,3', '4,5', '6,7']


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
  ready, end = tmp_path / 'w' / 'seed=1' / 'ready', time.monotonic() + 60
  while not ready.exists() and time.monotonic() < end:
    time.sleep(0.05)
  process.send_signal(number)
  _, errors = process.communicate(timeout=60)
  assert process.returncode == code, errors
  assert 'the same command continues 2 of 2 runs' in errors
  first, second = seeds(tmp_path / 'w', '1,2')
  assert [start['code'] for start in starts(first)] == [code]
  assert not starts(second)
  assert subprocess.run(command, capture_output=True).returncode == 0
  assert len(starts(first)) == 2 and len(starts(second)) == 1


def test_the_table_has_every_column_that_a_run_has():
  rows = [
    {
      **{'name': 'a', 'sweep': {'x': 'p|q'}, 'stage': 's', 'step': 1},
      **{'eval/entropy/e': 0.123456, 'eval/pass_rate_low/e': 0.1},
    },
    {
      **{'name': 'b', 'sweep': {'x': '2'}, 'stage': 't', 'step': 2},
      **{'eval/pass_rate/e': 1.0, 'eval/pairs/rewards/accuracies': None},
      **{'eval/nll/e': 2.5, 'eval/token_accuracy/e': 0.5},
      **{'start/eval/nll/e': 7.38211},
      **{'eval/sampled_reward/f/e': 0.25, 'eval/length/e': 9.0},
    },
  ]
  assert results.table(rows) == [
    '| x | stage | step | pass_rate/e | sampled_reward/f/e | nll/e | '
    'token_accuracy/e | pairs/rewards/accuracies | entropy/e |',
    '|---|---|---|---|---|---|---|---|---|',
    '| p\\|q | s | 1 |  |  |  |  |  | 0.1235 |',
    '| 2 | t | 2 | 1 | 0.25 | 7.382 -> 2.5 | 0.5 |  |  |',
  ]
  assert results.table([{**rows[0], 'sweep': {}}])[0].startswith(
    '| run | stage'
  )


@pytest.mark.slow
def test_a_run_of_two_processes_trains_as_one_does(tmp_path):
  tables = []
  for hosts in (1, 2):
    folder = str(tmp_path / str(hosts))
    found = seeds(folder, '1', [('sft.steps', '12')], hosts=hosts)
    assert sweep.run(found, folder) == exits.DONE
    (row,) = results.collect(found)
    tables.append({k: v for k, v in row.items() if k != 'name'})
  assert tables[0].keys() == tables[1].keys()
  entropy = [table['eval/entropy/arithmetic'] for table in tables]
  assert entropy[0] == pytest.approx(entropy[1], rel=0.05)
