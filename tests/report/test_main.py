"""The report command, and the reports that a run writes while it goes on."""

import json
import logging

import pytest

from posttrain.report import __main__ as command
from posttrain.report import page
from posttrain.util import locks


def make_run(folder, step=1, ended=None):
  folder.mkdir(exist_ok=True)
  row = {'stage': 'sft', 'step': step, 'loss/total': 1.0}
  (folder / 'metrics.jsonl').write_text(json.dumps(row) + '\n')
  (folder / 'about.json').write_text(json.dumps({'ended': ended}))
  return str(folder)


def test_the_report_of_a_run_is_written_into_its_folder(tmp_path, capsys):
  run = make_run(tmp_path / 'run')
  assert command.main([run]) == 0
  assert capsys.readouterr().out == f'{tmp_path}/run/report.html\n'
  assert '<title>run</title>' in (tmp_path / 'run/report.html').read_text()


def test_several_runs_share_a_page(tmp_path, monkeypatch, capsys):
  runs = [make_run(tmp_path / name) for name in 'ab']
  monkeypatch.chdir(tmp_path)
  assert command.main(runs) == 0
  assert capsys.readouterr().out == 'report.html\n'
  assert '<title>a, b</title>' in (tmp_path / 'report.html').read_text()
  assert command.main([*runs, '--output=mine.html']) == 0
  assert (tmp_path / 'mine.html').exists()


@pytest.mark.parametrize(
  'argv, error',
  [
    ([], 'RUN'),
    (['run', 'none', 'no'], "got 'none', 'no'"),
    (['none', 'run', '--live'], "got 'none'"),
    (['run', '--output=no/x.html'], '--output must be a file in a folder'),
    (['run', '--live', '--seconds=0'], '--seconds must be at least 1.0'),
    (['run', 'damaged'], 'damaged/metrics.jsonl:1'),
  ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, argv, error):
  make_run(tmp_path / 'run')
  (tmp_path / 'damaged').mkdir()
  (tmp_path / 'damaged' / 'metrics.jsonl').write_text('garbage\n')
  monkeypatch.chdir(tmp_path)
  assert command.main(argv) == 2
  lines = capsys.readouterr().err
  assert error in lines and lines.count('\n') == 1


def test_a_live_page_is_written_again_until_the_run_has_ended(
  tmp_path, monkeypatch
):
  folder, pages = tmp_path / 'run', []

  def sleep(seconds):
    pages.append((seconds, (folder / 'report.html').read_text()))
    step = len(pages)
    if step != 2:  # then nothing is new
      make_run(folder, 10**step, ended='now' if step == 4 else None)

  folder.mkdir()  # no row yet
  monkeypatch.setattr(command.time, 'sleep', sleep)
  assert command.main([str(folder), '--live', '--seconds=3']) == 0
  # Two looks within the second wait.
  assert [seconds for seconds, _ in pages] == [3, 3, 0.5, 3]
  texts = [text for _, text in pages] + [(folder / 'report.html').read_text()]
  steps = ['no step yet', 'step 10', 'step 10', 'step 1,000', 'step 10,000']
  assert all(x in text for x, text in zip(steps, texts, strict=True))
  reloads = ['"reload":3.0' in text for text in texts]
  assert reloads == [True] * 4 + [False]


class Process:
  """A process that trains runs, as `--live` sees it.

  `time.sleep` calls `act` with the seconds that have passed.
  """

  def __init__(self, monkeypatch, held, act):
    self.held, self.seconds, self.waits, self._act = {*held}, 0.0, 0, act
    monkeypatch.setattr(locks, 'is_held', lambda run: run in self.held)
    monkeypatch.setattr(command.time, 'sleep', self._sleep)

  def _sleep(self, seconds):
    self.seconds += seconds
    self.waits += 1
    assert self.waits < 1000, 'it goes on forever'
    self._act(self)


def test_a_live_page_ends_half_a_minute_after_all_runs_have_stopped(
  tmp_path, monkeypatch, capsys
):
  runs = [make_run(tmp_path / name) for name in 'ab']

  def act(process):
    if process.seconds == 60.0:  # a long step
      make_run(tmp_path / 'a', 7)
    if process.seconds > 70.0:
      process.held.clear()

  process = Process(monkeypatch, runs[:1], act)
  path = tmp_path / 'page.html'
  assert command.main([*runs, '--live', f'--output={path}']) == 0
  assert 100.0 <= process.seconds < 102.0
  (line,) = capsys.readouterr().err.splitlines()
  assert repr(runs[0]) in line and '--live ends' in line
  assert 'step 7' in path.read_text() and '"reload":null' in path.read_text()


def test_a_live_page_waits_for_a_run_that_has_not_begun_or_begins_again(
  tmp_path, monkeypatch, capsys
):
  run = tmp_path / 'run'
  run.mkdir()

  def act(process):
    if process.seconds == 300.0:
      make_run(run)
    elif process.seconds == 320.0:
      process.held.add(str(run))
    elif process.seconds == 400.0:
      make_run(run, 9, ended='now')

  process = Process(monkeypatch, (), act)
  assert command.main([str(run), '--live']) == 0
  assert 400.0 <= process.seconds < 410.0
  (line,) = capsys.readouterr().err.splitlines()
  assert line == f'waiting for the first step of {str(run)!r}'


class Clock:
  """Time that passes when a report is written."""

  def __init__(self, cost):
    self.now, self.cost = 100.0, cost

  def monotonic(self):
    return self.now

  def write(self, *_):
    self.now += self.cost


@pytest.mark.parametrize('cost, wait', [(0.05, 20.0), (2.0, 200.0)])
def test_reports_take_a_hundredth_of_the_time(monkeypatch, cost, wait):
  clock = Clock(cost)
  monkeypatch.setattr(page, 'time', clock)
  monkeypatch.setattr(page, 'write_all', clock.write)
  report = page.Periodic('')
  assert report.is_due  # from the first row on
  report.write()
  clock.now += wait - 0.1
  assert not report.is_due
  clock.now += 0.2
  assert report.is_due


def test_a_report_that_fails_is_a_warning(tmp_path, caplog, monkeypatch):
  logger = logging.getLogger('absl')
  monkeypatch.setattr(logger, 'propagate', True)
  (tmp_path / 'metrics.jsonl').write_text('garbage\n')
  report = page.Periodic(str(tmp_path))
  report.write()
  report.write()
  assert caplog.text.count('the report could not be written') == 1
  assert not report.is_due


def test_a_report_under_way_loads_itself_again(tmp_path):
  run = make_run(tmp_path / 'run')
  page.Periodic(run).write()
  text = (tmp_path / 'run' / 'report.html').read_text()
  assert f'"reload":{page.RELOAD}' in text
  page.write(run)
  assert '"reload":null' in (tmp_path / 'run' / 'report.html').read_text()
