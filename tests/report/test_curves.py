"""The numbers of the interactive panels: axes, gaps, intervals, limits."""

import pytest

from posttrain.report import curves, runs


def make_rows(values, stage='sft', start=1):
  """One row per dict of values."""
  return [
    {'stage': stage, 'step': start + i, **row} for i, row in enumerate(values)
  ]


def make_run(rows, envs=(), name='run'):
  config = {'stages': ['sft'], 'sft': {'envs': dict.fromkeys(envs)}}
  return runs.Run('', name, rows, config, {}, None)


def build(rows, envs=(), values=10**6):
  return curves.build([make_run(rows, envs)], values)


def keys(data, group=None):
  return [x['key'] for x in data['panels'] if group in (None, x['group'])]


def lines(data, key):
  (panel,) = [x for x in data['panels'] if x['key'] == key]
  return panel['lines']


def test_listed_panels_come_first_then_components_then_others():
  row = dict.fromkeys(('b/y', 'c', 'rl/x', 'loss/rl', 'loss/total', 'b/a'), 1.0)
  data = build(make_rows([row]))
  assert keys(data) == ['loss/total', 'loss/rl', 'rl/x', 'b/a', 'b/y', 'c']
  assert keys(data, 'b') == ['b/a', 'b/y']
  assert keys(data, curves.COMPONENTS) == ['loss/rl', 'rl/x']
  assert [x['kind'] for x in data['panels'][:2]] == ['noisy', 'other']


def test_environments_share_the_panel_of_a_metric():
  row = {'entropy': 1.0, 'entropy/a': 2.0, 'entropy/b': 3.0, 'mine/x/b': 4.0}
  row |= {'time/update': 1.0, 'time/mine': 2.0}  # have no panel
  row |= {'eval/a/b': 0.5, 'eval/a_low/b': 0.4, 'eval/a_high/b': 0.6}
  data = build(make_rows([row]), envs={'a', 'b'})
  assert sorted(keys(data)) == ['entropy', 'eval/a', 'mine/x']
  found = [(x['label'], x['y']) for x in lines(data, 'entropy')]
  assert found == [('', [1]), ('a', [2]), ('b', [3])]
  (line,) = lines(data, 'eval/a')
  assert (line['low'], line['y'], line['high']) == ([0.4], [0.5], [0.6])


@pytest.mark.parametrize(
  'values, expected',
  [
    ([1, 2, None, 2], [1, 2, None, 2]),  # null, as NaN is written
    ([1, 'text', True], [1, None, 1]),
  ],
)
def test_values_that_are_no_numbers_are_gaps(values, expected):
  data = build(make_rows([{'mine/x': value} for value in values]))
  assert lines(data, 'mine/x')[0]['y'] == expected


def test_stages_follow_each_other_on_every_axis():
  first = [
    {'x': 1.0, 'batch/tokens': 5, 'time/elapsed': 2.0 + i} for i in (0, 1)
  ]
  rows = make_rows([{'eval/x': 0.0, 'time/elapsed': 1.0}, *first], start=0)
  more = [{'eval/x': 1.0}, {'x': 1.0, 'batch/tokens': 7, 'time/elapsed': 9.5}]
  data = build(rows + make_rows(more, stage='grpo', start=0))
  stages = data['runs'][0]['stages']
  assert [list(stage['start'].values()) for stage in stages] == [
    [0, 0, 0],
    [2, 10, 3],
  ]
  grids = [
    [list(grid.values()) for grid in (x['grids']['eval'], x['grids']['train'])]
    for x in stages
  ]
  assert grids == [
    [[[0], [0], [1]], [[1, 2], [5, 10], [2, 3]]],
    # An evaluation before the first step begins where the stage before ended.
    [[[2], [10], [3]], [[3], [17], [9.5]]],
  ]
  # The sum of the tokens goes on over the stages.
  assert [x['y'] for x in lines(data, 'batch/tokens')] == [[5, 10], [17]]


def test_points_of_long_runs_are_means_and_evaluations_are_thinned():
  rows = make_rows([{'x': float(i)} for i in range(90)])
  for row in rows[5::10]:
    row['eval/x'] = row['x']
  data = build(rows, values=39)  # 9 of them of the evaluations
  assert data['average'] == 3
  assert lines(data, 'x')[0]['y'] == [1 + 3 * i for i in range(30)]
  axis = data['runs'][0]['stages'][0]['grids']['train']['step']
  assert axis == [2 + 3 * i for i in range(30)]
  assert lines(data, 'eval/x')[0]['y'] == [5 + 10 * i for i in range(9)]


def test_panels_and_lines_are_limited():
  data = build(make_rows([{f'mine/{i:03d}': 1.0 for i in range(42)}]))
  assert len(data['panels']) == curves.MAX_PANELS
  assert data['dropped'] == ['mine/040', 'mine/041']
  envs = [f'e{i}' for i in range(25)]
  data = build(make_rows([{f'x/{env}': 1.0 for env in envs}]), envs)
  (panel,) = data['panels']
  assert len(panel['lines']) == curves.MAX_LABELS
  assert panel['hidden'] == 25 - curves.MAX_LABELS


def test_the_summary_has_the_numbers_of_every_metric_and_stage():
  rows = make_rows([{'x': 3.0}, {'x': None}, {'x': 0.25}, {'y': 'text'}])
  rows += make_rows([{'x': 12345678}], stage='grpo')
  assert curves.summary(make_run(rows)) == [
    {
      'metric': 'x',
      'stage': 'sft',
      'count': 2,
      'values': ['3', '0.25', '0.25', '3'],
    },
    {'metric': 'x', 'stage': 'grpo', 'count': 1, 'values': ['12,345,678'] * 4},
  ]


def test_the_listed_panels_are_drawn(tmp_path):
  rows = make_rows([{'loss/total': 1 / (i + 1), 'x': 1.0} for i in range(90)])
  rows += make_rows([{'eval/pass_rate/a': 0.5}, {}], stage='grpo', start=0)
  figure = curves.draw(rows)
  titles = [axis.get_title(loc='left') for axis in figure.axes]
  assert titles == ['Pass rate, greedy', 'Training loss']
  assert [len(axis.lines) for axis in figure.axes] == [2, 3]  # one: the stage
  figure.savefig(tmp_path / 'curves.png')
  assert curves.draw([]) is None
