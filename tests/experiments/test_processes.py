"""Runs of several processes, some of which are lost; see the trial."""

import json

import pytest

from experiments.trials import processes


def _rows(capsys):
  return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize('recipe', processes.recipes())
def test_two_processes_agree_with_one(recipe, capsys):
  processes.main(['same', '--counts=2', f'--recipes={recipe}'])
  truth, row = _rows(capsys)
  assert truth['updates'] > 0
  assert row['processes'] == 2 and row['ok']


@pytest.mark.slow
def test_all_end_with_a_lost_one_and_continue(capsys):
  processes.main(['lost', '--count=2', '--trials=1', '--seed=3'])
  _, *rows = _rows(capsys)
  assert [x['signal'] for x in rows] == ['SIGKILL', 'SIGSTOP', 'SIGTERM']
  assert all(row['ok'] and row['differs'] == [] for row in rows)


@pytest.mark.slow
def test_another_number_of_processes_continues(capsys):
  processes.main(['elastic'])
  assert [row['continued_by'] for row in _rows(capsys)] == [1, 2, 4]
