"""The numbers of the interactive panels: axes, gaps, intervals, limits."""

from posttrain.report import curves, runs


def make_rows(values, stage='sft', start=1):
  """One row per dict of values."""
  return [
    {'stage': stage, 'step': start + i, **row} for i, row in enumerate(values)
  ]


def make_run(rows, envs=()):
  config = {'stages': ['sft'], 'sft': {'envs': dict.fromkeys(envs)}}
  return runs.Run('', 'run', rows, config, {}, None)


def build(rows, envs=(), values=10**6):
  return curves.build([make_run(rows, envs)], values)


def lines(data, key):
  (panel,) = [x for x in data['panels'] if x['key'] == key]
  return panel['lines']


def test_listed_panels_come_first_then_components_then_others():
  row = dict.fromkeys(('b/y', 'c', 'rl/x', 'loss/rl', 'loss/total', 'b/a'), 1.0)
  data = build(make_rows([row]))
  first, *panels = [(x['key'], x['group']) for x in data['panels']]
  assert first[0] == 'loss/total' and data['panels'][0]['kind'] == 'noisy'
  components = [(x, curves.COMPONENTS) for x in ('loss/rl', 'rl/x')]
  assert panels[:-1] == [*components, ('b/a', 'b'), ('b/y', 'b')]
  assert panels[-1][0] == 'c'


def test_environments_share_the_panel_of_a_metric():
  row = {'entropy': 1.0, 'entropy/a': 2.0, 'entropy/b': 3.0, 'mine/x/b': 4.0}
  row |= {'time/update': 1.0, 'time/mine': 2.0}  # have no panel
  row |= {'eval/a/b': 0.5, 'eval/a_low/b': 0.4, 'eval/a_high/b': 0.6}
  data = build(make_rows([row]), envs={'a', 'b'})
  assert sorted(x['key'] for x in data['panels']) == [
    'entropy',
    'eval/a',
    'mine/x',
  ]
  found = {x['label']: x['y'] for x in lines(data, 'entropy')}
  assert found == {'': [1], 'a': [2], 'b': [3]}
  (line,) = lines(data, 'eval/a')
  assert (line['low'], line['y'], line['high']) == ([0.4], [0.5], [0.6])


def test_values_that_are_no_numbers_are_gaps():
  values = 2, None, 'text', True  # NaN is written as null
  data = build(make_rows([{'mine/x': value} for value in values]))
  assert lines(data, 'mine/x')[0]['y'] == [2, None, None, 1]


def test_stages_follow_each_other_on_every_axis():
  rows = make_rows(
    [{'batch/tokens': 5, 'time/elapsed': 2.0 + i} for i in (0, 1)]
  )
  more = [{'eval/x': 1.0}, {'batch/tokens': 7, 'time/elapsed': 9.5}]
  data = build(rows + make_rows(more, stage='grpo', start=0))
  before, after = data['runs'][0]['stages']
  assert list(after['start'].values()) == [2, 10, 3]
  train = [list(x['grids']['train'].values()) for x in (before, after)]
  assert train == [[[1, 2], [5, 10], [2, 3]], [[3], [17], [9.5]]]
  # An evaluation before the first step begins where the stage before ended.
  assert list(after['grids']['eval'].values()) == [[2], [10], [3]]
  # The sum of the tokens goes on over the stages.
  assert [x['y'] for x in lines(data, 'batch/tokens')] == [[5, 10], [17]]


def test_points_of_long_runs_are_means_and_evaluations_are_thinned():
  rows = make_rows([{'x': float(i)} for i in range(90)])
  for row in rows[5::10]:
    row['eval/x'] = row['x']
  data = build(rows, values=39)  # 9 of them of the evaluations
  assert data['average'] == 3
  assert lines(data, 'x')[0]['y'] == [1 + 3 * i for i in range(30)]
  assert lines(data, 'eval/x')[0]['y'] == [5 + 10 * i for i in range(9)]


def test_panels_and_lines_are_limited():
  names = [f'{i:03d}' for i in range(42)]
  rows = make_rows([{f'mine/{name}': 1.0 for name in names}])
  data = build(rows)
  assert len(data['panels']) == curves.MAX_PANELS
  assert data['dropped'] == ['mine/040', 'mine/041']
  (panel,) = build(rows, names)['panels']
  assert len(panel['lines']) == curves.MAX_LABELS
  assert panel['hidden'] == 42 - curves.MAX_LABELS


def test_the_summary_has_the_numbers_of_every_metric_and_stage():
  rows = make_rows([{'x': 3.0}, {'x': None}, {'x': 0.25}, {'y': 'text'}])
  rows += make_rows([{'x': 12345678}], stage='grpo')
  assert [tuple(x.values()) for x in curves.summary(make_run(rows))] == [
    ('x', 'sft', 2, ['3', '0.25', '0.25', '3']),
    ('x', 'grpo', 1, ['12,345,678'] * 4),
  ]


def test_the_listed_panels_are_drawn(tmp_path):
  rows = make_rows([{'loss/total': 1 / (i + 1), 'x': 1.0} for i in range(90)])
  rows += make_rows([{'eval/pass_rate/a': 0.5}, {}], stage='grpo', start=0)
  figure = curves.draw(rows)
  titles = [axis.get_title(loc='left') for axis in figure.axes]
  assert titles == ['Pass rate, greedy', 'Training loss']
  figure.savefig(tmp_path / 'curves.png')
  assert curves.draw([]) is None
