"""Panels of the metrics that the learning curves do not list."""

import json
import re

import numpy as np
import pytest

from posttrain.report import curves, page, unlisted


def make_rows(values, stage='sft', start=0):
  """One row per dict of values."""
  return [
    {'stage': stage, 'step': start + i, **row} for i, row in enumerate(values)
  ]


def panels(text):
  """Returns {caption: HTML of the panel}."""
  return {
    re.search('<figcaption>(.*?)</figcaption>', x)[1]: x
    for x in text.split('<figure>')[1:]
  }


def groups(text):
  return re.findall(r'<summary>(\S+) \(', text)


def test_a_new_metric_has_a_panel():
  text = unlisted.write(make_rows([{'mine/number': 1.5}, {'mine/number': 4}]))
  assert groups(text) == ['mine']
  panel = panels(text)['mine/number']
  # Steps 0 and 1, from the lower left to the upper right corner.
  assert 'points="4.0,56.0 216.0,4.0"' in panel
  assert '1.5 to 4' in panel and 'last: 4' in panel


def test_the_report_shows_the_listed_metrics_first(tmp_path):
  values = {'mine/number': 1.0, 'loss/total': 2.0, 'optim/lr': 0.1}
  rows = make_rows([values, values])
  path = tmp_path / 'metrics.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  page.write(str(tmp_path))
  text = (tmp_path / 'report.html').read_text()
  assert text.index('Learning curves') < text.index('All other metrics')
  assert panels(text).keys() == {'mine/number'}
  titles = [axis.get_title(loc='left') for axis in curves.draw(rows).axes]
  assert titles[:2] == ['Training loss', 'Learning rate']


def test_listed_metrics_times_and_bounds_have_no_panel():
  row = {key + '/x' * (key[-1] in '/@'): 1.0 for _, key, _ in curves.PANELS}
  row |= {'time/update': 1.0, 'time/mine': 2.0}
  row |= {'eval/a/e': 0.5, 'eval/a_low/e': 0.4, 'eval/a_high/e': 0.6}
  text = unlisted.write(make_rows([row]), envs={'e'})
  assert panels(text).keys() == {'eval/a'}


def test_a_name_that_is_no_bound_has_a_panel():
  text = unlisted.write(make_rows([{'eval/a_low/e': 0.4, 'rl/clip_low': 0.1}]))
  assert panels(text).keys() == {'eval/a_low/e', 'rl/clip_low'}


def test_environments_share_the_panel_of_a_metric():
  row = {'entropy': 1.0, 'entropy/a': 2.0, 'entropy/b': 3.0, 'mine/x/b': 4.0}
  text = unlisted.write(make_rows([row]), envs={'a', 'b'})
  assert groups(text) == ['entropy', 'mine']
  entropy, mine = panels(text).values()
  labels = [re.findall(r'</span>(\w+): (\d)', x) for x in (entropy, mine)]
  assert labels == [[('all', '1'), ('a', '2'), ('b', '3')], [('b', '4')]]
  text = unlisted.write(make_rows([row]), envs=())
  assert len(panels(text)) == 4


def test_groups_and_panels_are_sorted_by_name():
  rows = make_rows([{'b/y': 1.0, 'c': 1.0, 'b/x': 1.0, 'a/z': 1.0}])
  text = unlisted.write(rows)
  assert groups(text) == ['a', 'b', 'c']
  assert list(panels(text)) == ['a/z', 'b/x', 'b/y', 'c']


@pytest.mark.parametrize(
  'values, shapes',
  [
    ([3, 3, 3], {'polyline': 1, 'circle': 0}),  # a constant
    ([0], {'polyline': 0, 'circle': 1}),
    ([1, 2, None, 2, 1], {'polyline': 2, 'circle': 0}),  # null is a gap
    ([1, None, 2], {'polyline': 0, 'circle': 2}),
    ([True, False], {'polyline': 1, 'circle': 0}),
    ([1e300, -1e300, 1], {'polyline': 1, 'circle': 0}),
    ([1, 'text', 2], {'polyline': 1, 'circle': 0}),
  ],
)
def test_numbers_are_drawn_and_other_values_left_out(values, shapes):
  text = unlisted.write(make_rows([{'mine/x': value} for value in values]))
  panel = panels(text)['mine/x']
  assert {x: panel.count(f'<{x}') for x in shapes} == shapes
  numbers = re.findall(r'points="(.*?)"|c[xy]="(.*?)"', panel)
  for text in (x for pair in numbers for x in pair if x):
    assert np.isfinite([float(x) for x in re.split('[ ,]', text)]).all()


@pytest.mark.parametrize('value', [None, 'text', ['a'], {'a': 1}])
def test_a_metric_without_a_number_has_no_panel(value):
  assert unlisted.write(make_rows([{'mine/x': value}])) == ''


def test_no_rows_give_no_section():
  assert unlisted.write([]) == ''


def test_stages_lie_side_by_side():
  rows = make_rows([{'x': 1.0}, {'x': 1.0}, {'x': 1.0}])
  rows += make_rows([{'x': 1.0}, {'x': 1.0}], stage='grpo', start=1)
  panel = panels(unlisted.write(rows))['x']
  # Steps 0 to 2, and 2 + 1 to 2 + 2, over a width of 212 from 4 on.
  lines = re.findall('points="(.*?)"', panel)
  xs = [[point.split(',')[0] for point in line.split()] for line in lines]
  assert xs == [['4.0', '57.0', '110.0'], ['163.0', '216.0']]


def test_names_are_escaped():
  text = unlisted.write(make_rows([{'<b>/x': 1.0, 'm/<i>': 1.0}]), {'<i>'})
  assert '<b>/' not in text and '<i>' not in text
  assert '&lt;b&gt;/x' in text and '&lt;i&gt;: 1' in text


def test_panels_lines_and_points_are_limited():
  rows = make_rows([{f'mine/{i:03d}': 1.0 for i in range(60)}])
  text = unlisted.write(rows)
  assert '(60 metrics)' in text and len(panels(text)) == unlisted.MAX_PANELS
  assert re.search('Not drawn: mine/040, .*, mine/059</p>', text)
  envs = [f'e{i}' for i in range(25)]
  text = unlisted.write(make_rows([{f'x/{e}': 1.0 for e in envs}]), envs)
  (panel,) = panels(text).values()
  assert panel.count('<circle') == unlisted.MAX_LINES
  assert 'and 15 more' in panel
  steps = make_rows([{'x': float(i)} for i in range(1001)])
  (panel,) = panels(unlisted.write(steps)).values()
  (points,) = re.findall('points="(.*?)"', panel)
  assert len(points.split()) == 167  # means of 6


def test_a_value_that_is_no_number_does_not_break_a_listed_panel():
  rows = make_rows([{'loss/total': 1.0}, {'loss/total': 'text'}])
  rows += make_rows([{'optim/lr': 'text'}], stage='grpo')
  titles = [axis.get_title(loc='left') for axis in curves.draw(rows).axes]
  assert titles == ['Training loss']
