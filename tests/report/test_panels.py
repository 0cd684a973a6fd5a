"""The numbers of the interactive panels: axes, gaps, intervals, limits."""

import pytest

from posttrain.report import curves, panels, runs


def make_rows(values, stage='sft', start=1):
  """One row per dict of values."""
  return [
    {'stage': stage, 'step': start + i, **row} for i, row in enumerate(values)
  ]


def make_run(rows, envs=(), name='run'):
  config = {'stages': ['sft'], 'sft': {'envs': dict.fromkeys(envs)}}
  return runs.Run('', name, rows, config, {}, None)


def build(rows, envs=(), values=10**6):
  return panels.build([make_run(rows, envs)], values)


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
  assert keys(data, panels.COMPONENTS) == ['loss/rl', 'rl/x']
  assert [x['kind'] for x in data['panels'][:2]] == ['noisy', 'other']


def test_times_and_bounds_have_no_panel():
  row = {'time/update': 1.0, 'time/mine': 2.0}
  row |= {'eval/a/e': 0.5, 'eval/a_low/e': 0.4, 'eval/a_high/e': 0.6}
  data = build(make_rows([row]), envs={'e'})
  assert keys(data) == ['eval/a']
  (line,) = lines(data, 'eval/a')
  assert (line['low'], line['y'], line['high']) == ([0.4], [0.5], [0.6])


def test_environments_share_the_panel_of_a_metric():
  row = {'entropy': 1.0, 'entropy/a': 2.0, 'entropy/b': 3.0, 'mine/x/b': 4.0}
  data = build(make_rows([row]), envs={'a', 'b'})
  found = [(x['label'], x['y']) for x in lines(data, 'entropy')]
  assert found == [('', [1]), ('a', [2]), ('b', [3])]
  assert [x['label'] for x in lines(data, 'mine/x')] == ['b']
  assert len(build(make_rows([row]))['panels']) == 4


@pytest.mark.parametrize(
  'values, expected',
  [
    ([1, 2, None, 2], [1, 2, None, 2]),  # null, as NaN is written
    ([True, False], [1, 0]),
    ([1e300, -1e300], [1e300, -1e300]),
    ([1, 'text', 2], [1, None, 2]),
    ([0.123456789, 123456789], [0.123457, 123456789]),
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
  rows += make_rows(
    [{'eval/x': 1.0}, {'x': 1.0, 'batch/tokens': 7, 'time/elapsed': 9.5}],
    stage='grpo',
    start=0,
  )
  data = build(rows)
  sft, grpo = data['runs'][0]['stages']
  assert sft['start'] == {'step': 0, 'token': 0, 'time': 0}
  assert grpo['start'] == {'step': 2, 'token': 10, 'time': 3}
  assert sft['grids']['eval'] == {'step': [0], 'token': [0], 'time': [1]}
  assert sft['grids']['train'] == {
    'step': [1, 2],
    'token': [5, 10],
    'time': [2, 3],
  }
  assert grpo['grids']['train'] == {'step': [3], 'token': [17], 'time': [9.5]}
  # An evaluation before the first step begins where the stage before ended.
  assert grpo['grids']['eval'] == {'step': [2], 'token': [10], 'time': [3]}
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
  few = make_rows([{'x': 1.0}, {'x': 3.0}, {'y': 1.0}, {'x': None}])
  grid = panels.Grid(few, 2, averages=True)
  assert grid.points([row.get('x') for row in few]) == [2, None]


def test_panels_and_lines_are_limited():
  data = build(make_rows([{f'mine/{i:03d}': 1.0 for i in range(42)}]))
  assert len(data['panels']) == panels.MAX_PANELS
  assert data['dropped'] == ['mine/040', 'mine/041']
  envs = [f'e{i}' for i in range(25)]
  data = build(make_rows([{f'x/{env}': 1.0 for env in envs}]), envs)
  (panel,) = data['panels']
  assert len(panel['lines']) == panels.MAX_LABELS
  assert panel['hidden'] == 25 - panels.MAX_LABELS


def test_the_summary_has_the_numbers_of_every_metric_and_stage():
  rows = make_rows([{'x': 3.0}, {'x': None}, {'x': 0.25}, {'y': 'text'}])
  rows += make_rows([{'x': 12345678}], stage='grpo')
  assert panels.summary(make_run(rows)) == [
    {
      'metric': 'x',
      'stage': 'sft',
      'count': 2,
      'values': ['3', '0.25', '0.25', '3'],
    },
    {'metric': 'x', 'stage': 'grpo', 'count': 1, 'values': ['12,345,678'] * 4},
  ]


def test_no_line_of_the_figure_joins_evaluations_over_other_steps():
  rows = make_rows([{'loss/total': 1.0}] * 9)
  for row in rows[::4]:
    row['eval/pass_rate/a'] = row['eval/entropy/a'] = 0.5
  rows += make_rows([{'eval/pass_rate/a': 0.5}] * 3, stage='grpo')
  figure = curves.draw(rows)
  widths = {
    axis.get_title(loc='left'): [
      (line.get_linewidth(), line.get_marker())
      for line in axis.lines
      if line.get_linestyle() != ':'  # where a stage begins
    ]
    for axis in figure.axes
  }
  assert widths == {
    'Pass rate, greedy': [(0, 'o'), (1.6, 'o')],
    'Entropy, nats per token': [(0, 'o')],
    'Training loss': [(1.6, 'None')],
  }
