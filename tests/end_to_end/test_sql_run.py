"""The SQL recipes from command to result: every part, in seconds.

`python -m pytest -m slow tests/end_to_end/test_sql_run.py`
"""

import os
import types

import pytest

from posttrain.metrics import writers
from posttrain.stage import job
from tests.end_to_end import test_gsm8k_run

SHORT = ['--config.sft.steps=11', '--config.grpo.steps=4']
folder = test_gsm8k_run.folder  # a fixture


def run(recipe, workdir, *flags):
  test_gsm8k_run.train(recipe, workdir, *flags)
  return writers.read(str(workdir / 'metrics.jsonl'))


@pytest.mark.slow
def test_echo_reads_what_queries_give(tmp_path):
  rows = run('sql_echo.py:tiny', tmp_path, *SHORT)
  last = rows[-1]
  assert (last['stage'], last['step']) == ('grpo', 4)
  # What is no action is a query, and what it hears is learned.
  assert any(
    row['batch/ce_tokens']
    for row in rows
    if row['stage'] == 'grpo' and row['step']
  )
  assert 'eval/pass_rate_hard/sql_hard' in last
  assert 'rollout/reward/sql_hard' in last


@pytest.mark.slow
@pytest.mark.skipif(
  'POSTTRAIN_DATA' not in os.environ,
  reason='POSTTRAIN_DATA (folder of real files) is unset',
)
def test_a_directory_explores_real_databases(folder, tmp_path):
  last = run(f'sql_llm.py:{folder},tiny', tmp_path)[-1]
  assert (last['stage'], last['step']) == ('grpo', 2)
  assert last['eval/errors/sql'] == 0


@pytest.mark.parametrize(
  'values, by_trial, warned',
  [
    ({'eval/sampled_pass_rate/a': 0.05, 'eval/pass_rate/a': 0.9}, True, True),
    ({'eval/pass_rate/a': 0.1}, True, False),
    ({'eval/pass_rate/a': 0.0}, False, False),
  ],
)
def test_a_cold_start_is_warned_about(caplog, values, by_trial, warned):
  pipeline = types.SimpleNamespace(learns_by_trial=('a',) if by_trial else ())
  stage = types.SimpleNamespace(
    name='grpo', sampling=types.SimpleNamespace(pipeline=pipeline)
  )
  with caplog.at_level('WARNING', logger='absl'):
    job.Job.warn_if_cold(stage, values)
  assert ('grpo begins with a pass rate of 5.0% on a' in caplog.text) == warned
