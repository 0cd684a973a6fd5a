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
@pytest.mark.parametrize('signal', ['SIGKILL', 'SIGSTOP', 'SIGTERM'])
def test_all_end_with_a_lost_one_and_continue(signal, capsys):
  processes.main(
    ['lost', '--count=2', '--trials=1', f'--signals={signal}', '--seed=3']
  )
  *_, row = _rows(capsys)
  assert row['signal'] == signal and row['ok'] and row['differs'] == []


@pytest.mark.slow
def test_another_number_of_processes_continues(capsys):
  processes.main(['elastic'])
  assert [row['continued_by'] for row in _rows(capsys)] == [1, 2, 4]
