"""Isolated reward functions: equal rewards; hangs, crashes and leaks."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments.trials import base
from posttrain import schema
from posttrain.rollout.grading import rewards as rewarding
from tests.algorithms import two_turns

PATH = 'tests.rollout.grading.hostile'


def entry(name, timeout=30.0, **options):
  return schema.RewardFn(
    fn=f'{PATH}:{name}', timeout=timeout, isolate=True, **options
  )


@pytest.fixture(scope='module')
def rollouts():
  return two_turns.group(1.0, 0.0)


def score(rollouts, total):
  scored, metrics, errors = total(rollouts)
  return [r.score.reward for r in scored], metrics, errors


def worker_of(total, name='x'):
  return total._functions[name]._worker


def stat_of(pid):
  """Returns (state, parent, ...) of a process."""
  stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  return stat.rpartition(')')[2].split()


def parent_of(pid):
  return int(stat_of(pid)[1])


def alive(pid):
  """Whether a process runs (and is no zombie)."""
  try:
    return stat_of(pid)[0] != 'Z'
  except (FileNotFoundError, ProcessLookupError):
    return False


@pytest.mark.parametrize('name', ['length', 'later', 'edits'])
def test_rewards_are_those_of_a_thread_to_the_bit(rollouts, name):
  results = []
  for isolate in (False, True):
    cfg = {'x': schema.RewardFn(fn=f'{PATH}:{name}', isolate=isolate)}
    total = rewarding.Rewards('e', cfg)
    rewards, metrics, errors = score(rollouts, total)
    del metrics['rewards/x/seconds']
    results.append((rewards, metrics, errors))
  assert results[0] == results[1] and results[0][2] == ()
  assert results[0][1]['rewards/x'] != 0


def test_process_is_reused_and_has_neither_jax_nor_secrets(
  rollouts, monkeypatch
):
  monkeypatch.setenv('SECRET_KEY', 'sk-123')
  total = rewarding.Rewards(
    'e', {k: entry(k) for k in ('process', 'modules', 'secrets')}
  )
  first, again = score(rollouts, total), score(rollouts, total)
  pid = int(2 * first[1]['rewards/process'])
  assert again[1]['rewards/process'] == pid / 2 and alive(pid)
  assert parent_of(pid) == worker_of(total, 'process')._process.pid
  assert first[1]['rewards/modules'] == 0
  # stdin, stdout, stderr, the socket, and the folder that is listed.
  assert first[1]['rewards/secrets'] == (0 + 5) / 2


@pytest.mark.parametrize(
  'name, message',
  [
    ('backtracks', 'must return within its timeout of 0.3 s: it did not'),
    ('leaves', 'must return rewards: its process ended with exit code 3'),
    ('crashes', 'must return rewards: its process was ended by SIGSEGV'),
    ('fills', 'must return rewards: it raised MemoryError (hostile.py:'),
    ('returns_functions', 'must return finite rewards: got <function return'),
    ('writes_to_all', 'its process'),
    ('raises', 'must return rewards: it raised ValueError: a a a'),
  ],
)
def test_faults_cost_one_call(rollouts, name, message, tmp_path, capfd):
  timeout = 0.3 if name == 'backtracks' else 30.0
  total = rewarding.Rewards('e', {'x': entry(name, timeout)})
  for _ in range(2):  # the process starts again
    rewards, metrics, (error,) = score(rollouts, total)
    assert rewards == [None, None] and metrics['rewards/x/faults'] == 1
    assert message in error and len(error) < 1000, error
  # A fault of the function alone leaves its process.
  running = worker_of(total)._process is not None
  assert running == (name in ('raises', 'returns_functions'))


def test_output_goes_to_stderr(rollouts, capfd):
  total = rewarding.Rewards('e', {'x': entry('prints')})
  assert score(rollouts, total)[0] == [1.0, 1.0]
  worker_of(total).stop()
  out, err = capfd.readouterr()
  assert not out and 'noise noise' in err


def test_leak_restarts_the_process_before_its_memory_is_full(rollouts):
  total = rewarding.Rewards('e', {'x': entry('leaks', memory=100)})
  rewards = [score(rollouts, total)[0][0] for _ in range(6)]
  assert rewards == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]


def test_timeout_kills_the_children_as_well(rollouts, tmp_path):
  file = tmp_path / 'pids'
  kwargs = {'file': str(file)}
  total = rewarding.Rewards(
    'e', {'x': entry('starts_children', 1.0, kwargs=kwargs)}
  )
  assert score(rollouts, total)[0] == [None, None]
  pids = file.read_text().split()
  assert len(pids) == 4 and not any(map(alive, pids))


def test_exit_ends_children_that_hold_the_socket(rollouts, tmp_path):
  file = tmp_path / 'pids'
  cfg = {'x': entry('leaves_children', kwargs={'file': str(file)})}
  start = time.monotonic()
  _, _, (error,) = score(rollouts, rewarding.Rewards('e', cfg))
  assert time.monotonic() - start < 25  # the timeout is 30 s
  assert 'its process ended with exit code 3' in error
  pids = file.read_text().split()
  assert len(pids) == 2 and not any(map(alive, pids))


def test_fork_shifts_no_reward(rollouts, tmp_path):
  file = tmp_path / 'pid'
  cfg = {'x': entry('forks', kwargs={'file': str(file)})}
  total = rewarding.Rewards('e', cfg)
  for call in (1.0, 2.0, 3.0):
    assert score(rollouts, total)[0] == [call, call]
  base.wait_for(lambda: not alive(file.read_text()))


@pytest.mark.parametrize('name', ['replies_early', 'replies_late'])
def test_reply_of_another_call_is_a_fault(rollouts, name):
  total = rewarding.Rewards('e', {'x': entry(name)})
  first = [1.0, 1.0] if name == 'replies_late' else [None, None]
  assert score(rollouts, total)[0] == first
  process = worker_of(total)._process
  if process is not None:  # the next call finds what was left
    base.wait_for(worker_of(total)._socket.poll)
    rewards, _, (error,) = score(rollouts, total)
    assert rewards == [None, None]
    assert 'must leave the socket of its process alone' in error
  assert worker_of(total)._process is None  # it starts again


def test_process_ends_with_the_run_also_if_that_is_killed():
  program = f"""
import sys, time
from posttrain.rollout.grading import calls, isolated
worker = isolated.Worker('{PATH}:process', 2**30)
pid, _ = worker.call({{'completion_ids': []}}, {{}}, calls.Clock(60), 2, 1.0)
print(pid, flush=True)
if len(sys.argv) > 1: time.sleep(60)
"""
  for kills in (False, True):
    run = subprocess.Popen(
      [sys.executable, '-c', program, *(['sleeps'] if kills else [])],
      stdout=subprocess.PIPE,
      text=True,
    )
    pid = int(float(run.stdout.readline()))
    if kills:
      assert alive(pid)
      run.send_signal(signal.SIGKILL)
    assert run.wait(120) == (-9 if kills else 0)
    run.stdout.close()
    base.wait_for(lambda pid=pid: not alive(pid))


def test_function_that_cannot_be_imported_there_is_a_fault(
  rollouts, monkeypatch
):
  total = rewarding.Rewards('e', {'x': entry('process')})
  worker_of(total)._path = 'no.such.module:process'
  _, _, (error,) = score(rollouts, total)
  assert 'process must be importable: ' in error and 'no.such.module' in error
  assert worker_of(total)._process is None


def test_argument_that_cannot_be_pickled_is_a_fault(rollouts):
  kwargs = {'file': lambda: 0}
  total = rewarding.Rewards('e', {'x': entry('starts_children', kwargs=kwargs)})
  _, _, (error,) = score(rollouts, total)
  assert 'must get arguments that can be pickled' in error


def test_judge_is_refused_with_isolate():
  with pytest.raises(schema.FieldError, match='isolate must be False for a'):
    entry('length', judge='init')
