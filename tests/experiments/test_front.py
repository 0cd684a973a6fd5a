"""The picture of the README, from the metrics of two seeds."""

import json
import sys

import numpy as np

from experiments.examples import front


def test_the_picture_is_drawn(tmp_path, monkeypatch):
  for seed in (0, 1):
    (tmp_path / f'{seed}').mkdir()
    with open(tmp_path / f'{seed}' / 'metrics.jsonl', 'w') as file:
      for stage in ('sft', 'grpo'):
        for step in range(13):
          row = {'stage': stage, 'step': step, 'time/update': 1.0}
          if step:
            row['rollout/reward/sums'] = step / 24 + seed / 2
          if step % 6 == 0:
            row |= {f'eval/{x}pass_rate/sums': 0.5 for x in ('', 'sampled_')}
          file.write(json.dumps(row) + '\n')
  path = tmp_path / 'front.png'
  words = [f'{tmp_path}/0', f'{tmp_path}/1', f'--output={path}']
  monkeypatch.setattr(sys, 'argv', ['front', *words])
  assert front.main() == 0
  assert path.read_bytes().startswith(b'\x89PNG')


def test_series_are_at_the_steps_of_all_runs():
  runs = [
    [{'step': i, 'x/a': float(i + 10 * k)} for i in range(k, 3)] for k in (0, 1)
  ]
  steps, values = front.series(runs, 'x/')
  np.testing.assert_array_equal(steps, [1, 2])
  np.testing.assert_array_equal(values, [[1, 2], [11, 12]])
