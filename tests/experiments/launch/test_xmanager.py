"""Work units of XManager's local executor; skipped without XManager."""

import os
import subprocess
import sys

import pytest

from tests.experiments.launch import fake_runs

CONFIG = 'configs/arithmetic.py:tiny'


@pytest.fixture
def xmanager():
  """XManager is big and slow to import: it has a process of its own."""
  code = 'from xmanager import xm_local'
  done = subprocess.run([sys.executable, '-c', code], capture_output=True)
  if done.returncode:
    pytest.skip("XManager cannot be imported (pip install '.[launch]')")


@pytest.mark.slow
@pytest.mark.parametrize(
  'command',
  [
    ['experiments.launch', '--on=xmanager'],
    ['xmanager.cli.cli', 'launch', 'experiments/launch/xm_launch.py', '--'],
  ],
)
def test_a_sweep_ends_with_its_table(xmanager, command, fake, tmp_path):
  python = fake({'1': [75, 0], '2': [0], '3': [0]})
  done = subprocess.run(
    [
      *(sys.executable, '-m', *command, f'--config={CONFIG}'),
      *('--sweep=seed=1,2,3', f'--workdir={tmp_path / "w"}', '--jobs=2'),
      *(f'--python={python}', '--config.sft.steps', '30'),
    ],
    env={**os.environ, 'HOME': str(tmp_path)},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  table = done.stdout[done.stdout.index('| seed | stage') :].splitlines()
  assert table[2:5] == [f'| {n} | grpo | 3 | 0.{n} |' for n in '123']
  rows = fake_runs.read(tmp_path / 'w' / 'seed=1')
  assert [row['code'] for row in rows] == [75, 0]
  assert rows[0]['config'] == CONFIG and rows[0]['config.sft.steps'] == '30'
