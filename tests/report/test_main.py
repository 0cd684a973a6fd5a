"""The report command, and the reports that a run writes while it goes on."""

import json
import logging
from unittest import mock

import pytest

from posttrain.report import __main__ as command
from posttrain.report import page
from posttrain.util import disk


def make_run(folder, step=1, ended=None):
  folder.mkdir(exist_ok=True)
  row = {'stage': 'sft', 'step': step, 'loss/total': 1.0}
  (folder / 'metrics.jsonl').write_text(json.dumps(row) + '\n')
  (folder / 'about.json').write_text(json.dumps({'ended': ended}))
  return str(folder)


def test_several_runs_share_a_page(tmp_path, monkeypatch, capsys):
  runs = [make_run(tmp_path / name) for name in 'ab']
  monkeypatch.chdir(tmp_path)
  for words, path in (
    (runs[:1], f'{tmp_path}/a/report.html'),
    (runs, 'report.html'),
    ([*runs, '--output=mine.html'], 'mine.html'),
  ):
    assert command.main(words) == 0
    assert capsys.readouterr().out == f'{path}\n'
  assert '<title>a, b</title>' in (tmp_path / 'mine.html').read_text()


@pytest.mark.parametrize(
  'argv, error',
  [
    (['run', 'none'], "got 'none'"),
    (['run', '--live', '--seconds=0'], '--seconds'),
    (['damaged'], 'damaged/metrics.jsonl:1'),
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
  folder, pages, waits = tmp_path / 'run', [], []

  def sleep(seconds):
    waits.append(seconds)
    pages.append((folder / 'report.html').read_text())
    if len(waits) != 2:  # then nothing is new
      step = 10 ** len(waits)
      make_run(folder, step, ended='now' if len(waits) == 4 else None)

  folder.mkdir()  # no row yet
  monkeypatch.setattr(command, 'time', mock.Mock(sleep=sleep))
  assert command.main([str(folder), '--live', '--seconds=3']) == 0
  assert waits == [3, 3, 0.5, 3]  # two looks within the second wait
  pages.append((folder / 'report.html').read_text())
  steps = ['no step yet', 'step 10', 'step 10', 'step 1,000', 'step 10,000']
  assert all(x in text for x, text in zip(steps, pages, strict=True))


def test_a_live_page_ends_half_a_minute_after_all_runs_have_stopped(
  tmp_path, monkeypatch, capsys
):
  runs = [make_run(tmp_path / name) for name in 'ab']
  held, clock = {runs[0]}, [0.0]

  def sleep(seconds):
    clock[0] += seconds
    assert clock[0] < 200.0, 'it goes on forever'
    if clock[0] > 70.0:  # a long step
      held.clear()

  monkeypatch.setattr(disk, 'is_locked', lambda run: run in held)
  monkeypatch.setattr(command, 'time', mock.Mock(sleep=sleep))
  path = tmp_path / 'page.html'
  assert command.main([*runs, '--live', f'--output={path}']) == 0
  assert 100.0 <= clock[0] < 102.0
  assert repr(runs[0]) in capsys.readouterr().err
  assert '"reload":null' in path.read_text()


@pytest.mark.parametrize('cost, wait', [(0.05, 20.0), (2.0, 200.0)])
def test_reports_take_a_hundredth_of_the_time(monkeypatch, cost, wait):
  times = iter([0.0, 0.0, cost, cost + wait - 0.1, cost + wait + 0.1])
  monkeypatch.setattr(page, 'time', mock.Mock(monotonic=lambda: next(times)))
  monkeypatch.setattr(page, 'write_all', lambda *_: None)
  report = page.Periodic('', print)
  assert report.is_due  # from the first row on
  report.write()
  assert (report.is_due, report.is_due) == (False, True)


def test_a_report_that_fails_is_a_warning(tmp_path, caplog, monkeypatch):
  monkeypatch.setattr(logging.getLogger('absl'), 'propagate', True)
  (tmp_path / 'metrics.jsonl').write_text('garbage\n')
  report = page.Periodic(str(tmp_path), print)
  report.write()
  report.write()
  assert len(caplog.records) == 1
