"""Metrics are strict JSON; a resumed file equals an uninterrupted one."""

import json
import os
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.metrics import writers
from posttrain.util import preemption


def write(path, position, steps, stage='sft'):
  """Returns the position behind the last row."""
  writer = writers.Writer(str(path), position)
  for step in steps:
    writer.write(stage, step, {'loss/total': 1 / (step + 1)})
  return writer.position()


def test_a_line_is_flat_plain_and_strict_json(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  writer = writers.Writer(str(path), 0)
  values = {'total': jnp.float32(0.5), 'ce': jnp.bfloat16(2.0)}
  plain = {'note': 'a', 'none': None, 'py': 3}
  given = {'loss': values, 'count': np.int64(7), 'ok': np.bool_(True), **plain}
  writer.write('sft', 3, {**given, 'bad': float('nan'), 'worse': jnp.inf})
  assert 'NaN' not in path.read_text() and 'Inf' not in path.read_text()
  assert json.loads(path.read_text()) == {
    'stage': 'sft',
    'step': 3,
    'loss/total': 0.5,
    'loss/ce': 2.0,
    'count': 7,
    'ok': True,
    **plain,
    'bad': None,
    'worse': None,
    'nonfinite': ['bad', 'worse'],
  }


def test_resuming_gives_the_bytes_of_an_uninterrupted_run(tmp_path):
  whole, broken = tmp_path / 'whole.jsonl', tmp_path / 'broken.jsonl'
  write(whole, 0, range(6))
  position = write(broken, 0, range(3))
  write(broken, position, range(3, 5))
  with open(broken, 'a') as f:
    f.write('{"stage": "sft", "st')  # killed while writing
  write(broken, position, range(3, 6))
  assert broken.read_bytes() == whole.read_bytes()


def test_a_repeated_step_raises_after_a_resume_too(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  position = write(path, 0, range(3))
  write(path, position, [0, 1], stage='grpo')
  writer = writers.Writer(str(path), position)
  with pytest.raises(AssertionError, match='stage sft step 2 after step 2'):
    writer.write('sft', 2, {})


@pytest.mark.parametrize('left', ['', '{"stage": "sft", "step": 0}\n{"sta'])
def test_a_file_shorter_than_the_position_warns_and_is_continued(
  tmp_path, left
):
  path = tmp_path / 'metrics.jsonl'
  path.write_text(left)
  with pytest.warns(UserWarning, match='must hold the 5000 bytes'):
    write(path, 5000, [7])
  steps = [row['step'] for row in writers.read(str(path))]
  assert steps == ([0, 7] if left else [7])


@pytest.mark.parametrize('line', [b'garbage', b'{}'])
def test_garbage_within_the_file_names_the_line_and_loses_nothing(
  tmp_path, line
):
  path = tmp_path / 'metrics.jsonl'
  rows = [b'{"stage": "a", "step": 0}', line, b'{"stage": "a", "step": 1}', b'']
  path.write_bytes(before := b'\n'.join(rows))
  for call in (
    lambda: writers.read_metrics(str(path)),
    lambda: writers.Writer(str(path), len(before)),
  ):
    with pytest.raises(ValueError, match=r'metrics\.jsonl:2'):
      call()
  assert path.read_bytes() == before


# --- Goodput ------------------------------------------------------------------


def _row(step, rollout, update, compiling=0.0):
  seconds = {'rollout': rollout, 'update': update, 'compile': compiling}
  return {'step': step} | {f'time/{k}': v for k, v in seconds.items()}


def test_a_step_counts_without_its_compilation():
  assert writers.useful(_row(1, 2.0, 5.0, 4.0)) == 3.0
  assert writers.useful({'step': 0, 'time/eval': 9.0}) == 0.0


def test_repeated_steps_count_once(tmp_path, monkeypatch):
  """Ten seconds ran before; of their two steps the first is kept."""
  path = tmp_path / 'metrics.jsonl'
  first, again = ({'stage': 'sft'} | _row(i, 1.0, 2 * i - 1) for i in (1, 2))
  rows = [first, again | {writers.ELAPSED: 10.0, writers.CPU: 7.0}]
  path.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
  monkeypatch.setattr(preemption, 'STARTED', 100.0)
  measured = writers.Goodput(str(path))
  measured.keep([first])
  monkeypatch.setattr(writers, 'time', mock.Mock(monotonic=lambda: 106.0))
  monkeypatch.setattr(os, 'times', lambda: (1.0, 0.5, 2.0, 0.5, 99.0))
  added = measured.add(again)
  want = {writers.ELAPSED: 16.0, writers.CPU: 11.0, writers.GOODPUT: 6 / 16}
  assert added == want
