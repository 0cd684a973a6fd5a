"""Runs killed with SIGKILL end where the undisturbed run ends, bit by bit."""

import json

import pytest

from experiments import kill_resume


@pytest.mark.slow
def test_killed_runs_end_bitwise_the_same(capsys):
  kill_resume.main(['--kills=4', '--saving=1', '--seed=0'])
  last = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert last['kills'] >= 4 and last['while_saving'] >= 1
  assert last['differences'] == 0
