"""Runs killed, of several processes, and of lost ones; see the trials."""

import json
import sys

import numpy as np
import pytest

from experiments.trials import kill_resume, processes


@pytest.mark.slow
@pytest.mark.parametrize(
  ('trial', 'argv'),
  [
    *(
      (kill_resume, [f'--stage={x}', '--kills=5']) for x in kill_resume.RECIPES
    ),
    *(
      (processes, ['same', '--counts=2', f'--recipes={x}'])
      for x in processes.RECIPES
    ),
    (processes, ['lost', '--counts=2', '--trials=1']),
  ],
)
def test_runs_end_bitwise_the_same(trial, argv, capsys, monkeypatch):
  monkeypatch.setattr(sys, 'argv', [trial.__name__, *argv])
  trial.main()
  rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert all(row.get('ok', True) for row in rows)
  assert not rows[-1].get('wrong')


def test_differences_are_bitwise_and_name_the_array():
  def outcome(value, dtype=np.float32, **row):
    return {'arrays': {'sft/params/w': np.array([value], dtype)}, 'rows': [row]}

  truth = outcome(0.0, loss=1.0)
  for other, names in (
    (outcome(0.0, loss=1.0), []),
    # -0.0 == 0.0, but it is another weight.
    (outcome(-0.0, loss=1.0), ['sft/params/w']),
    (outcome(0.0, np.float16, loss=1.0), ['sft/params/w']),
    (outcome(0.0, loss=2.0), ['metrics']),
    ({**truth, 'arrays': {}}, ['tree']),
  ):
    assert kill_resume.differences(truth, other) == names
