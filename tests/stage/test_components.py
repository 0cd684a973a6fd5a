"""Errors and warnings of a stage's components name the stage's keys."""

import pytest

from posttrain import schema
from posttrain.stage import preflight


def make(env, **stage):
  entry = schema.EnvEntry(env=env)
  return preflight.make(
    schema.Run(
      model=schema.PRESETS['tiny'],
      stages={'sft': schema.Stage(envs={'a': entry}, **stage)},
    ),
    'sft',
  )


def test_errors_of_evaluation_splits_begin_with_the_stage(tmp_path):
  path = tmp_path / 'rows.jsonl'
  path.write_text('{"prompt": "a", "completion": "b"}\n')
  env = schema.Rows(path=str(path), eval_path='nowhere.jsonl')
  with pytest.raises(
    ValueError, match=r'^config\.sft\.envs\.a\.env\.eval_path'
  ):
    make(env)


def test_an_evaluation_without_tasks_is_named(tmp_path, caplog):
  path = tmp_path / 'rows.jsonl'
  path.write_text('{"prompt": "a", "completion": "b"}\n')
  env = schema.Rows(path=str(path))
  make(env)
  assert not caplog.text
  make(env, eval=schema.Eval(every=5))
  assert 'config.sft.eval.every=5 needs tasks to evaluate' in caplog.text
  caplog.clear()
  make(env, eval=schema.Eval(every=5, suite=('Hello',)))
  assert not caplog.text
  pairs = {'kind': 'preference', 'eval': schema.Eval(every=5)}
  make(env, **pairs)
  assert not caplog.text
  make(env, **pairs, pairs=schema.MadePairs(eval_fraction=0.0))
  assert 'config.sft.eval.every=5 needs tasks to evaluate' in caplog.text
