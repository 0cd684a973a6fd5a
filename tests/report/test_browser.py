"""The report in a headless browser: whole, offline, and it does what it says.

Needs the package playwright (the extra `browser`) and a chromium of the system.
"""

import shutil

import pytest

from posttrain.report import page
from tests.report import example

playwright = pytest.importorskip('playwright.sync_api')
NAMES = ('chromium', 'chromium-browser', 'google-chrome')
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
if CHROMIUM is None:
  pytest.skip('chromium is not installed', allow_module_level=True)
pytestmark = pytest.mark.slow


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
  runs = [str(example.make_run(folder / f'run{i}', i)) for i in (1, 2)]
  page.write_all(runs, str(folder / 'both.html'))
  page.write_all(runs[:1], page.path_of(runs[0]))
  return page.path_of(runs[0]), str(folder / 'both.html')


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


def test_axes_smoothing_logarithm_stages_and_zoom_are_chosen_by_mouse(
  open_page, paths
):
  tab = open_page(paths[0])
  figure(tab, 'Training loss')
  last, kind = 'plot.data.at(-1).x.at(-1)', 'plot.layout.yaxis.type'
  for axis, value in (('token', 6000), ('time', 93 / 60), ('step', 60)):
    tab.click(f'#axis [data-value={axis}]')
    assert plot(tab, 'Training loss', last) == pytest.approx(value)
  tab.click('#stage [data-value=grpo]')
  assert plot(tab, 'Training loss', last) == 30
  assert plot(tab, 'Training loss', 'plot.data.length') == 2
  tab.locator('#smoothing').fill('0')
  assert plot(tab, 'Training loss', 'plot.data.length') == 1
  box = figure(tab, 'Training loss').locator('.nsewdrag').bounding_box()
  y = box['y'] + box['height'] / 2
  tab.mouse.move(box['x'] + box['width'] * 0.25, y)
  tab.mouse.down()
  tab.mouse.move(box['x'] + box['width'] * 0.5, y, steps=5)
  tab.mouse.up()  # zooms
  low, high = plot(tab, 'Training loss', 'plot.layout.xaxis.range')
  assert 4 < low < 11 < high < 20
  tab.check('#log')
  assert plot(tab, 'Training loss', kind) == 'log'
  figure(tab, 'Training loss').locator('button.log').click()
  assert plot(tab, 'Training loss', kind) == 'linear'
  width = figure(tab, 'Training loss').bounding_box()['width']
  figure(tab, 'Training loss').locator('button.wide').click()
  assert figure(tab, 'Training loss').bounding_box()['width'] > 2 * width


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
  tab.locator('#runs').get_by_role('button', name='run1').click()
  tab.check('#mean')
  names = plot(tab, 'Training loss', 'plot.data.map(x => x.name)')
  assert 'mean of 2 runs' in names
  tab.locator('.sortable').get_by_role('button', name='run').click()
  rows = tab.locator('.sortable tbody tr td:first-child')
  assert rows.all_text_contents() == ['run2', 'run1']


def test_all_panels_are_drawn_without_scrolling(open_page, paths):
  for path in paths:
    tab = open_page(path)
    tab.wait_for_function(
      '[...document.querySelectorAll(".card")].every('
      'x => !x.offsetParent || x.querySelector(".main-svg"))'
    )


def test_a_live_page_loads_itself_again_where_it_was(open_page, tmp_path):
  run = example.make_run(tmp_path / 'run', 1)
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
