"""The report in a headless browser: whole, offline, and it does what it says.

Needs the package playwright (the extra `browser`) and a chromium of the system.
"""

import json
import shutil

import numpy as np
import pytest

from posttrain.report import page

playwright = pytest.importorskip('playwright.sync_api')
NAMES = ('chromium', 'chromium-browser', 'google-chrome')
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
if CHROMIUM is None:
  pytest.skip('chromium is not installed', allow_module_level=True)
pytestmark = pytest.mark.slow


def make_run(folder, seed, stages=('sft', 'grpo')):
  """A run with gaps, intervals, hostile names, stories and rollouts."""
  rng, rows, elapsed = np.random.default_rng(seed), [], 0.0
  for stage in stages:
    for step in range(31):
      elapsed += 1.5
      row = {'stage': stage, 'step': step, 'time/elapsed': elapsed}
      if step:
        row |= {'loss/total': 2.0 + rng.random(), 'batch/tokens': 100}
        row['mine/<img src=x onerror=alert(1)>'] = -1.0
      if 10 < step < 20:
        row['loss/total'] = None
      if step % 10 == 0:
        rate = step / 40 + seed / 10
        row |= {'eval/pass_rate/sums': rate, 'eval/pass_rate/<b>x': rate / 2}
        row |= {'eval/pass_rate_low/sums': rate - 0.1}
        row |= {'eval/pass_rate_high/sums': rate + 0.1}
      rows.append(row)
  folder.mkdir()
  text = ''.join(json.dumps(row) + '\n' for row in rows)
  (folder / 'metrics.jsonl').write_text(text)
  (folder / 'rollouts').mkdir()
  rollouts = [
    {
      'env': 'sums',
      'group': i // 4,
      'task': 't',
      'reward': float(i % 4 > i // 8),
    }
    | {'completion': [{'role': 'assistant', 'content': '</script><b>hi'}]}
    for i in range(16)
  ]
  text = ''.join(json.dumps(row) + '\n' for row in rollouts)
  (folder / 'rollouts' / 'grpo_train_000001.jsonl').write_text(text)
  return folder


@pytest.fixture(scope='module')
def browser():
  with playwright.sync_playwright() as p:
    browser = p.chromium.launch(
      executable_path=CHROMIUM, args=['--no-sandbox', '--disable-dev-shm-usage']
    )
    yield browser
    browser.close()


@pytest.fixture(scope='module')
def paths(tmp_path_factory):
  """The pages of a run, and of two runs overlaid."""
  folder = tmp_path_factory.mktemp('runs')
  runs = [str(make_run(folder / f'run{i}', i)) for i in (1, 2)]
  page.write_all(runs, str(folder / 'both.html'))
  return page.write(runs[0]), str(folder / 'both.html')


@pytest.fixture
def open_page(browser):
  """Opens a page; in the end, nothing was requested, refused or logged."""
  contexts, wrong = [], []

  def open_(path, width=1280, scheme='light', **options):
    context = browser.new_context(
      viewport={'width': width, 'height': 900}, color_scheme=scheme, **options
    )
    contexts.append(context)
    tab = context.new_page()
    tab.on('console', lambda message: wrong.append(message.text))
    tab.on('pageerror', lambda error: wrong.append(str(error)))
    tab.on(
      'request',
      lambda x: x.url.startswith(('file:', 'data:')) or wrong.append(x.url),
    )
    tab.goto(f'file://{path}')
    return tab

  yield open_
  for context in contexts:
    context.close()
  assert wrong == []


def figure(tab, title):
  """The drawn panel with a title."""
  found = tab.locator(f'.card[data-name^="{title}"]')
  found.scroll_into_view_if_needed()
  found.locator('.main-svg').first.wait_for()
  return found


def plot(tab, title, expression):
  """The value of an expression on the plot of a panel."""
  return figure(tab, title).locator('.plot').evaluate(f'plot => {expression}')


@pytest.mark.parametrize('scheme', ['light', 'dark'])
@pytest.mark.parametrize('width', [1280, 390])
def test_the_page_is_whole_at_both_widths_in_light_and_dark(
  open_page, paths, width, scheme
):
  for path in paths:
    tab = open_page(path, width, scheme)
    for node in tab.locator('details').all():
      node.evaluate('node => { node.open = true; }')
    for card in tab.locator('.card').all():
      card.scroll_into_view_if_needed()
      card.locator('.main-svg').first.wait_for()
    assert tab.evaluate('document.documentElement.scrollWidth') == width
    color = tab.evaluate('getComputedStyle(document.body).backgroundColor')
    assert (color == 'rgb(255, 255, 255)') == (scheme == 'light')


def test_values_that_were_not_measured_are_gaps_and_stages_are_apart(
  open_page, paths
):
  tab = open_page(paths[0])
  traces = plot(
    tab, 'Training loss', 'plot.data.map(x => [x.connectgaps, x.y])'
  )
  assert len(traces) == 4  # measured and smoothed, of two stages
  for connects, y in traces:
    assert connects is False and y[10:19] == [None] * 9
  shapes = plot(tab, 'Training loss', 'plot.layout.shapes.map(x => x.x0)')
  assert shapes == [30]
  # A gap is drawn as two lines.
  lines = figure(tab, 'Training loss').locator('.trace').last
  assert lines.locator('.lines path').count() == 2


def test_axes_smoothing_logarithm_and_stages_are_chosen_by_clicks(
  open_page, paths
):
  tab = open_page(paths[0])
  figure(tab, 'Training loss')
  last = 'plot.data.at(-1).x.at(-1)'
  assert plot(tab, 'Training loss', last) == 60
  tab.click('#axis [data-value=token]')
  assert plot(tab, 'Training loss', last) == 6000
  tab.click('#axis [data-value=time]')
  assert plot(tab, 'Training loss', last) == pytest.approx(93 / 60)
  tab.click('#axis [data-value=step]')
  tab.click('#stage [data-value=grpo]')
  assert plot(tab, 'Training loss', last) == 30
  assert plot(tab, 'Training loss', 'plot.data.length') == 2
  tab.locator('#smoothing').fill('0')
  assert plot(tab, 'Training loss', 'plot.data.length') == 1
  assert plot(tab, 'Training loss', 'plot.layout.yaxis.type') == 'linear'
  tab.check('#log')
  assert plot(tab, 'Training loss', 'plot.layout.yaxis.type') == 'log'
  figure(tab, 'Training loss').locator('button.log').click()
  assert plot(tab, 'Training loss', 'plot.layout.yaxis.type') == 'linear'
  width = figure(tab, 'Training loss').bounding_box()['width']
  figure(tab, 'Training loss').locator('button.wide').click()
  assert figure(tab, 'Training loss').bounding_box()['width'] > 2 * width


def test_hovering_shows_the_value_its_interval_and_its_step(open_page, paths):
  tab = open_page(paths[0])
  box = figure(tab, 'Pass rate, greedy').locator('.nsewdrag').bounding_box()
  tab.mouse.move(box['x'] + box['width'] / 3, box['y'] + box['height'] / 2)
  hover = figure(tab, 'Pass rate, greedy').locator('.hoverlayer .legend')
  hover.wait_for()
  text = hover.text_content()
  assert 'sums: 60.0% [50.0%, 70.0%] · sft 20' in text
  assert '<b>x: 30.0%' in text  # a name is no HTML


def test_dragging_zooms(open_page, paths):
  tab = open_page(paths[0])
  box = figure(tab, 'Training loss').locator('.nsewdrag').bounding_box()
  y = box['y'] + box['height'] / 2
  tab.mouse.move(box['x'] + box['width'] * 0.25, y)
  tab.mouse.down()
  tab.mouse.move(box['x'] + box['width'] * 0.5, y, steps=5)
  tab.mouse.up()
  low, high = plot(tab, 'Training loss', 'plot.layout.xaxis.range')
  assert 10 < low < 20 < high < 40


def test_runs_are_overlaid_each_in_its_color_and_can_be_hidden(
  open_page, paths
):
  tab = open_page(paths[1])
  names = plot(tab, 'Training loss', 'plot.data.map(x => x.name)')
  assert set(names) == {'run1', 'run2'}
  colors = plot(tab, 'Training loss', 'plot.data.map(x => x.line.color)')
  assert len(set(colors)) == 4  # two runs, measured and smoothed
  tab.locator('#runs').get_by_role('button', name='run1').click()
  names = plot(tab, 'Training loss', 'plot.data.map(x => x.name)')
  assert set(names) == {'run2'}


def test_a_live_page_loads_itself_again_where_it_was(open_page, tmp_path):
  run = make_run(tmp_path / 'run', 1)
  path = str(tmp_path / 'live.html')
  (run / 'about.json').write_text('{"ended": null}')
  assert page.write_all([str(run)], path, reload=8.0) is False
  tab = open_page(path)
  tab.evaluate('scrollTo(0, 400)')
  with open(run / 'metrics.jsonl', 'a') as f:
    f.write('{"stage": "grpo", "step": 31, "loss/total": 1.0}\n')
  (run / 'about.json').write_text('{"ended": "now"}')
  assert page.write_all([str(run)], path, reload=8.0) is True
  tab.locator('b.finished').wait_for(timeout=40_000)
  tab.wait_for_function('scrollY === 400')
  assert tab.evaluate('data.reload') is None  # and no more
