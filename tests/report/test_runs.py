"""Runs as the report reads them: names, ends, headline numbers, runs."""

import pytest

from posttrain.report import runs

CONFIG = {
  'seed': 3,
  'model': {'layers': 2, 'embed_dim': 8, 'dtype': 'float32'},
  'stages': ['sft', 'grpo'],
  'sft': {'steps': 4, 'init': 'random', 'envs': {'a': {}}},
  'grpo': {'steps': 6, 'envs': {'a': {}, 'b': {}}},
}
START = {
  'time': '2026-01-02 03:04:05 UTC',
  'devices': '1 x H200',
  'host': '16 CPU cores, Linux x86_64',
  'versions': {'posttrain': '0.1', 'jax': '0.11'},
}


def row(stage, step, **values):
  return {'stage': stage, 'step': step} | {
    f'eval/{name}': value for name, value in values.items()
  }


def make(rows=(), config=CONFIG, about=None, name='run'):
  return runs.Run('', name, list(rows), config, about or {}, None)


def test_names_are_the_parts_of_the_paths_that_differ():
  assert runs.names(['/x/a/']) == ['a']
  assert runs.names(['/x/a/run', '/x/b/run']) == ['a/run', 'b/run']


@pytest.mark.parametrize(
  'step, ended, state',
  [
    (6, None, 'unfinished'),  # its last save may be ahead
    (3, 'now', 'finished'),  # its patience ended it
  ],
)
def test_a_run_is_finished_at_its_end(step, ended, state):
  run = make([row('grpo', step)], about={'ended': ended})
  assert run.finished is (state == 'finished')
  assert runs.status(run)[0] == state


def test_the_headline_is_the_pass_rate_of_each_environment():
  bounds = {'pass_rate_low/a': 0.25, 'pass_rate_high/a': 0.75}
  run = make(
    [
      row('sft', 0, **{'pass_rate/c': 0.5, 'pass_rate/a': 0.75}),
      row('sft', 4, **{'pass_rate/c': 0.5, 'pass_rate/a': None}),
      row('grpo', 6, **{'pass_rate/a': 0.5, 'reward/b': 1.0}, **bounds),
    ]
  )
  first, second = runs.headlines(run)
  assert tuple(first.values()) == (
    'a',  # of the last stage
    'pass rate, greedy',
    ('75.0%', ''),
    ('50.0%', '[25.0%, 75.0%]'),
    '',  # the start has no interval
    '\N{MINUS SIGN}25.0 points',
    True,
    'grpo, step 6',
  )
  assert (second['env'], second['where']) == ('c', 'sft, step 4')
  (line,) = runs.headlines(make([row('sft', 1) | {'loss/total': 2.0}]))
  assert (line['title'], line['last'].text) == ('training loss', '2')


def test_numbers_of_the_suite_come_last():
  row_ = row('sft', 0, **{'suite/length': 3.0, 'pass_rate/zebra': 0.5})
  run = make([row_])
  assert [env for env, _ in runs.keys([run], runs.columns(run))] == [
    'zebra',
    'suite',
  ]


def test_tables_of_several_runs_have_their_starts_and_ends():
  rows = [row('sft', i, **{'pass_rate/a': i / 4}) for i in (0, 4)]
  both = [make(rows, name='x'), make(rows[:1], name='y')]
  table = runs.side_by_side(both)
  key = 'a', 'pass rate, greedy'
  assert {title: cells[key].text for title, cells in table.items()} == {
    'x: start': '0.0%',
    'x: after sft': '100.0%',
    'y: start': '0.0%',
    'y: sft so far': '0.0%',
  }
  assert runs.keys(both, table) == [key]


def test_facts_are_model_device_seed_versions_and_times():
  rows = [row('sft', 1) | {'batch/tokens': 1000, 'time/elapsed': 3725.0}]
  size = {'parameters': 1000, 'trained': 1000}
  sizes = {'sft': size, 'grpo': size | {'trained': 16}}
  about = {'starts': [START, START | {'devices': '2 x H200'}], 'stages': sizes}
  assert dict(runs.facts(make(rows, about=about))) == {
    'model': 'layers 2, width 8, float32, from random',
    'parameters': 'sft: 1,000; grpo: 1,000, of which 16 train',
    'device': '2 x H200',
    'host': '16 CPU cores, Linux x86_64',
    'seed': 3,
    'tokens of batches': '1,000',
    'training time': '1:02:05',
    'started': '2026-01-02 03:04:05 UTC, 2 starts',
    'versions': 'posttrain 0.1, jax 0.11',
  }
  assert runs.facts(make(config={})) == []


def test_options_that_differ_are_listed():
  other = {**CONFIG, 'seed': 4, 'sft': {'steps': 4, 'init': 'random'}}
  both = [make(), make(config=other)]
  assert runs.differences(both) == [
    ('seed', ['3', '4']),
    ('sft.envs.a', ['{}', 'none']),
  ]
