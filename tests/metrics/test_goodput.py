"""The share of a run's time in steps that counted."""

import json
import os
import time

import pytest

from posttrain.metrics import goodput


def _row(step, rollout, update, compiling=0.0, **times):
  return {
    'stage': 'sft',
    'step': step,
    'time/rollout': rollout,
    'time/update': update,
    'time/compile': compiling,
    **times,
  }


def test_a_step_counts_without_its_compilation():
  assert goodput.useful(_row(1, 2.0, 5.0, 4.0)) == 3.0
  assert goodput.useful(_row(1, 1.0, 1.0, 4.0)) == 0.0
  assert goodput.useful({'step': 0, 'time/eval': 9.0}) == 0.0


def test_repeated_steps_count_once(tmp_path, monkeypatch):
  """Ten seconds ran before; of their two steps the first is kept."""
  path = tmp_path / 'metrics.jsonl'
  rows = [
    _row(1, 1.0, 1.0, **{goodput.ELAPSED: 4.0}),
    _row(2, 1.0, 3.0, **{goodput.ELAPSED: 10.0, goodput.CPU: 7.0}),
  ]
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  measured = goodput.Goodput(str(path), began=100.0)
  measured.keep(rows[:1])
  monkeypatch.setattr(time, 'monotonic', lambda: 106.0)
  monkeypatch.setattr(os, 'times', lambda: (1.0, 0.5, 2.0, 0.5, 99.0))
  added = measured.add(_row(2, 1.0, 3.0))
  assert added == {
    goodput.ELAPSED: 16.0,
    goodput.CPU: 11.0,
    goodput.GOODPUT: 6.0 / 16.0,
  }


@pytest.mark.parametrize('text', ['', '{"stage": "sft"}\n', 'no json\n'])
def test_a_file_without_times_starts_at_zero(text, tmp_path, monkeypatch):
  path = tmp_path / 'metrics.jsonl'
  path.write_text(text)
  measured = goodput.Goodput(str(path), began=1.0)
  monkeypatch.setattr(time, 'monotonic', lambda: 5.0)
  assert measured.add(_row(1, 1.0, 1.0))[goodput.ELAPSED] == 4.0
