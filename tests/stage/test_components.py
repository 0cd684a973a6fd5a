"""Errors and warnings of a stage's components name the stage's keys."""

import pytest

from posttrain import schema
from posttrain.stage import preflight


def make(env, **stage):
  entry = schema.EnvEntry(env=env)
  run = schema.Run(
    model=schema.PRESETS['tiny'],
    stages={'sft': schema.Stage(envs={'a': entry}, **stage)},
  )
  return preflight.make(preflight.resolve(run), 'sft')


@pytest.fixture
def path(tmp_path):
  path = tmp_path / 'rows.jsonl'
  path.write_text('{"prompt": "a", "completion": "b"}\n')
  return str(path)


def test_errors_of_evaluation_splits_begin_with_the_stage(path):
  env = schema.Rows(path=path, eval_path='nowhere.jsonl')
  with pytest.raises(
    ValueError, match=r'^config\.sft\.envs\.a\.env\.eval_path'
  ):
    make(env)
