"""Runs that sample in another process, against the run of one process."""

import signal
import subprocess
import sys
import time

import pytest

from experiments.launch import beside
from experiments.trials import base, kill_resume

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')

SECONDS = 400  # for a wait; the machine may be busy


def start(workdir, lag, *flags):
  options = {
    **kill_resume.setting('arithmetic', 'grpo'),
    'grpo.rollout.max_lag': lag,
    'grpo.eval.every': 5,
  }
  return subprocess.Popen(
    [
      sys.executable,
      '-m',
      'posttrain.main',
      '--config=configs/arithmetic.py:tiny',
      f'--workdir={workdir}',
      *(f'--config.{key}={value}' for key, value in options.items()),
      *flags,
    ],
    stdout=subprocess.DEVNULL,
  )


def wait_for(step, workdir, process):
  """Returns once the row of a step is written."""
  end = time.monotonic() + SECONDS
  while not any(
    (row['stage'], row['step']) == ('grpo', step) for row in base.rows(workdir)
  ):
    assert process.poll() is None and time.monotonic() < end
    time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize('lag', [0, 2])
def test_a_sampler_and_kills_change_no_bit(tmp_path, lag):
  """The sampler is killed once, then the learner, then both."""
  assert start(tmp_path / 'one', lag).wait(SECONDS) == 0
  port = beside.free_port()
  flag = f'--samplers=http://127.0.0.1:{port}'
  workdir = tmp_path / 'two'
  learner = start(workdir, lag, flag)
  sampler = beside.start_sampler(port)
  try:
    wait_for(3, workdir, learner)
    sampler.kill()
    sampler.wait()
    sampler = beside.start_sampler(port)
    wait_for(8, workdir, learner)
    learner.kill()
    learner.wait()
    learner = start(workdir, lag, flag)
    wait_for(12, workdir, learner)
    for process in (sampler, learner):
      process.kill()
      process.wait()
    sampler, learner = beside.start_sampler(port), start(workdir, lag, flag)
    assert learner.wait(SECONDS) == 0
  finally:
    for process in (sampler, learner):
      process.kill()
      process.wait()
  outcomes = [kill_resume.outcome(tmp_path / x) for x in ('one', 'two')]
  assert not kill_resume.differences(*outcomes)
  rows = outcomes[0]['rows']
  assert any(
    row.get('optim/grad_norm') for row in rows if row['stage'] == 'grpo'
  )


@pytest.mark.slow
@pytest.mark.parametrize('lag', [0, 2])
def test_a_run_stops_where_its_sampler_stays_away(tmp_path, lag):
  """SIGTERM ends the wait; what was trained is saved, and the run goes on."""
  port = beside.free_port()
  flag = f'--samplers=http://127.0.0.1:{port}'
  learner, sampler = start(tmp_path, lag, flag), beside.start_sampler(port)
  try:
    wait_for(7, tmp_path, learner)
    sampler.kill()
    sampler.wait()
    time.sleep(5)  # it is waited for
    step = base.rows(tmp_path)[-1]['step']
    learner.send_signal(signal.SIGTERM)
    assert learner.wait(SECONDS) == base.PREEMPTED
    saved = tmp_path / 'checkpoints' / 'grpo' / str(step)
    assert saved.exists()
    sampler, learner = beside.start_sampler(port), start(tmp_path, lag, flag)
    assert learner.wait(SECONDS) == 0
  finally:
    for process in (sampler, learner):
      process.kill()
      process.wait()


@pytest.mark.slow
def test_one_command_starts_all_processes(tmp_path):
  """Two samplers; a mistake of the config is the command's exit code."""
  words = [
    f'--config.{key}={value}'
    for key, value in {
      **kill_resume.setting('arithmetic', 'grpo'),
      'sft.steps': 2,
      'grpo.steps': 2,
    }.items()
  ]
  command = [sys.executable, '-m', 'experiments.launch.beside', '--samplers=2']
  command += ['--', '--config=configs/arithmetic.py:tiny', *words]
  command += [f'--workdir={tmp_path}']
  assert subprocess.run(command, timeout=SECONDS).returncode == 0
  assert base.rows(tmp_path)[-1]['step'] == 2
  command.append('--config.seed=1')
  assert subprocess.run(command, timeout=SECONDS).returncode == base.USAGE
