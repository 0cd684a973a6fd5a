"""The command with Ray: flags, SIGTERM, and the same command again."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments.trials import faults
from posttrain.util import errors

BASE = ['--config=configs/arithmetic.py:tiny']


def launch(module, workdir, *words):
  return subprocess.Popen(
    [sys.executable, '-m', module, f'--workdir={workdir}', *words],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=pathlib.Path(__file__).parents[3],
  )


def wait_for_rows(workdir, count):
  end = time.monotonic() + 300
  path = workdir / 'metrics.jsonl'
  while not path.exists() or len(path.read_text().splitlines()) < count:
    assert time.monotonic() < end
    time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('module', 'words'),
  [
    ('experiments.launch.cluster', [*BASE, '--hosts=2']),
    (
      'posttrain.main',
      [*BASE, '--config.grpo.rollout.workers=ray', faults.custom('waits')],
    ),
  ],
)
def test_sigterm_saves_and_the_same_command_continues(module, words, tmp_path):
  pytest.importorskip('ray')
  process = launch(module, tmp_path, *words)
  wait_for_rows(tmp_path, 4)
  process.send_signal(signal.SIGTERM)
  _, shown = process.communicate(timeout=300)
  assert process.returncode == errors.PREEMPTED, shown
  process = launch(module, tmp_path, *words)
  output, shown = process.communicate(timeout=600)
  assert process.returncode == 0, shown
  result = json.loads(output.splitlines()[-1])
  assert (result['stage'], result['step']) == ('grpo', 20)
  rows = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  steps = [(x['stage'], x['step']) for x in map(json.loads, rows)]
  assert len(set(steps)) == len(steps)
