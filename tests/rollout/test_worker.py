"""Reward functions in processes: equal rewards; hangs, crashes and leaks."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from posttrain import schema
from posttrain.rollout import calls, grading
from tests.algorithms import two_turns
from tests.rollout import fakes

PATH = 'tests.rollout.hostile'


@pytest.fixture(autouse=True)
def new_processes():
  """Forgets the processes of other tests."""
  calls.process.cache_clear()


def total(name, **options):
  options = {'timeout': 30.0, **options}
  return grading.Rewards(
    'e', {'x': schema.RewardFn(fn=f'{PATH}:{name}', **options)}
  )


def score(rewards):
  scored, metrics, errors = rewards(two_turns.group(1.0, 0.0))
  metrics.pop('rewards/x/seconds')
  return [r.score.reward for r in scored], metrics, errors


def popen_of(rewards):
  return rewards.functions['x'].score.popen


def alive(pid):
  """Whether a process runs (and is no zombie)."""
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return False
  return stat.rpartition(')')[2].split()[0] != 'Z'


@pytest.mark.parametrize('name', ['length', 'later'])
def test_rewards_are_those_of_a_thread_to_the_bit(name):
  thread, process = (score(total(name, isolate=x)) for x in (False, True))
  assert thread == process and process[2] == ()


def test_process_is_reused_by_all_and_has_no_jax():
  first, again = total('process'), total('process')
  pid, jax = score(first)[0]
  assert score(first)[0] == score(again)[0] == [pid, jax] == [pid, 0.0]
  assert popen_of(first).pid == pid != os.getpid()


def test_posttrains_functions_and_those_with_a_judge_run_in_threads():
  cfg = {
    'own': schema.RewardFn(fn='posttrain.rewards.texts:grade'),
    'judged': schema.RewardFn(fn=f'{PATH}:length', judge='init'),
    'thread': schema.RewardFn(fn=f'{PATH}:length', isolate=False),
  }
  rewards = grading.Rewards('e', cfg, judge=lambda _: None)
  for function in rewards.functions.values():
    assert not isinstance(function.score, calls.Process)


@pytest.mark.parametrize(
  'name, message',
  [
    ('backtracks', 'must return within its timeout of 0.3 s: it did not'),
    ('leaves', 'must return rewards: its process ended with exit code 3'),
    ('crashes', 'must return rewards: its process was ended by SIGSEGV'),
    ('raises', 'must return rewards: it raised ValueError: a a a'),
  ],
)
def test_faults_cost_one_call(name, message):
  rewards = total(name, timeout=0.3 if name == 'backtracks' else 30.0)
  for _ in range(2):  # the process starts again
    values, metrics, (error,) = score(rewards)
    assert values == [None, None] and metrics['rewards/x/faults'] == 1
    assert message in error and len(error) < 1000, error
  # A fault of the function alone leaves its process.
  assert (popen_of(rewards) is not None) == (name == 'raises')


def test_a_process_that_cannot_start_is_a_fault(monkeypatch):
  def fails(*args, **kwargs):
    raise BlockingIOError('busy')

  monkeypatch.setattr(subprocess, 'Popen', fails)
  values, _, (error,) = score(total('raises'))
  assert values == [None, None] and 'its process cannot start: busy' in error


def test_a_leak_is_a_fault_and_begins_anew():
  rewards = total('leaks', memory=100)
  values = [score(rewards)[0][0] for _ in range(8)]
  assert values[:2] == [1.0, 2.0] and values.count(None) == 1
  assert values[values.index(None) + 1] == 1.0


def test_timeout_and_exit_kill_the_children(tmp_path):
  for name, seconds in (('starts_children', 1.0), ('leaves_children', 30.0)):
    kwargs = {'file': str(tmp_path / name)}
    start = time.monotonic()
    score(total(name, timeout=seconds, kwargs=kwargs))
    assert time.monotonic() - start < 25
    pids = (tmp_path / name).read_text().split()
    fakes.wait_for(lambda pids=pids: not any(map(alive, pids)))


@pytest.mark.parametrize('kills', [False, True])
def test_process_and_children_end_with_the_run(kills, tmp_path):
  program = f"""
import sys, time
from posttrain.rollout import calls, worker
call = worker.Call({{'file': {str(tmp_path / 'pids')!r}}}, (), 2, 1.0)
process = calls.process('{PATH}:keeps_child', 2**30)
print(process(call, calls.Clock(60)).rewards[0], flush=True)
if {kills}: time.sleep(60)
"""
  run = subprocess.Popen(
    [sys.executable, '-c', program], stdout=subprocess.PIPE, text=True
  )
  assert run.stdout.readline() == '1.0\n'
  pids = (tmp_path / 'pids').read_text().split()
  if kills:
    assert all(map(alive, pids))
    run.send_signal(signal.SIGKILL)
  assert run.wait(120) == (-9 if kills else 0)
  run.stdout.close()
  fakes.wait_for(lambda: not any(map(alive, pids)))


def test_function_that_cannot_be_imported_there_is_a_fault():
  rewards = total('process')
  rewards.functions['x'].score._path = 'no.such.module:process'
  _, _, (error,) = score(rewards)
  assert 'process must be importable: ' in error and 'no.such.module' in error
  assert popen_of(rewards) is None


def test_argument_that_cannot_be_pickled_is_named():
  rewards = total('starts_children', kwargs={'file': lambda: 0})
  _, _, (error,) = score(rewards)
  assert 'must get arguments that can be pickled' in error
  assert 'got file: ' in error
