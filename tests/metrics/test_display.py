"""Lines where there is no terminal; a bar and what goes above it on one."""

import io
import logging
import sys
import threading
import warnings

import pytest

from posttrain.metrics import display, pace
from posttrain.util import logs, watchdog

STAGES = {'sft': 40, 'grpo': 30}


class Terminal(io.StringIO):
  """A terminal that records what is written to it."""

  def isatty(self):
    return True


@pytest.fixture
def now(monkeypatch):
  """Returns the clock, in a list."""
  clock = [100.0]
  monkeypatch.setattr(display.time, 'monotonic', lambda: clock[0])
  monkeypatch.setattr(watchdog, 'compiles', lambda: False)
  return clock


def step(shown, clock, seconds, number, **numbers):
  clock[0] = seconds
  shown.update(number, numbers, {})
  shown.beat()


def test_lines_say_how_far_the_run_is(now, capsys):
  shown = display.Display(STAGES, log_seconds=60.0)
  shown.begin('grpo', 10, pace.Pace(30, every=10, evaluation=20.0))
  tokens = {'tokens/s': 13400.4}
  step(shown, now, 101.0, 11, reward=0.5, **tokens)
  for number, seconds in ((12, 103.0), (13, 105.0), (14, 107.0)):
    step(shown, now, seconds, number, reward=0.5, **tokens)
  step(shown, now, 162.0, 15, reward=0.12345, **tokens)
  shown.end()
  assert capsys.readouterr().err.splitlines() == [
    'stage grpo: step 11 of 30, reward 0.5, 13,400 tokens/s',
    'about 80 s for the rest of stage grpo (2 s a step), evaluations included',
    # 20 evaluations of 15.25 s, and two evaluations of 20 s.
    'stage grpo: step 15 of 30, reward 0.1235, 13,400 tokens/s, '
    'about 4.5 min left of the run',
  ]


def test_stages_that_follow_make_it_a_lower_bound(now, capsys):
  shown = display.Display({**STAGES, 'dpo': 7}, log_seconds=3.0)
  shown.begin('sft', 0, pace.Pace(40))
  for number in range(1, 4):
    step(shown, now, 100.0 + 2 * number, number, loss=1.0)
  line = capsys.readouterr().err.splitlines()[-1]
  assert line == (
    'stage sft: step 3 of 40, loss 1, at least 74 s left of the run: stage '
    'grpo (30 steps) and dpo (7 steps) follow'
  )


@pytest.mark.parametrize(
  'stages, line',
  [
    (STAGES, 'at most 74 s left of the stage: stage grpo (30 steps) follows'),
    ({'sft': 40}, 'at most 74 s left of the run'),
  ],
)
def test_a_stage_that_patience_may_end_has_an_upper_bound(
  now, capsys, stages, line
):
  shown = display.Display(stages, log_seconds=3.0)
  shown.begin('sft', 0, pace.Pace(40, may_end=True))
  for number in range(1, 5):
    step(shown, now, 100.0 + 2 * number, number, loss=1.0)
  lines = capsys.readouterr().err.splitlines()
  assert lines[-2:] == [
    f'stage sft: step 3 of 40, loss 1, {line}',
    'at most 80 s for stage sft (2 s a step), evaluations included',
  ]


def test_a_step_that_compiles_has_no_speed(now, capsys):
  shown = display.Display(STAGES, log_seconds=1.0)
  shown.begin('grpo', 0, pace.Pace(30))
  for number, compiling in ((1, 3.0), (2, 0.0), (3, 0.25)):
    now[0] += 2.0
    times = {'time/compile': compiling}
    shown.update(number, {'loss': 1.0, 'tokens/s': 120.0}, times)
    shown.beat(finished=True)
  first, second, third = capsys.readouterr().err.splitlines()
  assert first == 'stage grpo: step 1 of 30, compiled for 3 s, loss 1'
  assert second.startswith('stage grpo: step 2 of 30, loss 1, 120 tokens/s, ')
  assert third.startswith('stage grpo: step 3 of 30, loss 1, about')


def test_a_long_phase_has_lines_too(now, capsys, monkeypatch):
  shown = display.Display(STAGES, log_seconds=60.0)
  monkeypatch.setattr(watchdog.time, 'monotonic', lambda: now[0])
  with watchdog.phase('setup'):
    for now[0] in (109.0, 110.5):
      shown.beat()
  shown.begin('sft', 0, pace.Pace(40))
  step(shown, now, 111.0, 1, loss=1.0)
  with watchdog.phase('eval', 'evaluating 500 prompts'):
    for now[0] in (150.0, 172.0, 238.0):
      shown.beat()
  monkeypatch.setattr(watchdog, 'compiles', lambda: True)
  for now[0] in (248.0, 308.0):
    shown.beat()
  assert capsys.readouterr().err.splitlines() == [
    'loading models for 10 s',
    'stage sft: step 1 of 40, loss 1',
    'stage sft: step 1 of 40, evaluating 500 prompts for 61 s, loss 1',
    'stage sft: step 1 of 40, evaluating 500 prompts for 127 s, loss 1',
    'stage sft: step 1 of 40, compiling for 60 s, loss 1',
  ]


def test_the_thread_shows_phases_without_any_step(monkeypatch):
  monkeypatch.setattr(display, '_BEFORE', 0.0)
  monkeypatch.setattr(display, '_TICK', 0.01)
  seen, lines = threading.Event(), []

  def record(self, text):
    lines.append(text)
    seen.set()

  monkeypatch.setattr(display.Display, '_print', record)
  with watchdog.phase('save'), display.show(STAGES, log_seconds=60.0):
    assert seen.wait(10)
  assert lines == ['saving']


def test_nothing_is_shown_if_it_is_off(capsys):
  with display.show(STAGES, log_seconds=0.001, on=False):
    shown = display.current()
    shown.begin('sft', 0, pace.Pace(40))
    for number in range(1, 9):
      shown.update(number, {'loss': 1.0}, {})
      shown.beat()
  assert capsys.readouterr().err == ''


def test_the_bar_has_the_phase_and_the_numbers(monkeypatch):
  terminal = Terminal()
  monkeypatch.setattr(sys, 'stderr', terminal)
  monkeypatch.setattr(watchdog, 'compiles', lambda: False)
  with display.show(STAGES, log_seconds=60.0) as shown:
    shown.begin('sft', 30, pace.Pace(40))
    shown.update(40, {'loss': 0.25, 'tokens/s': 12.0}, {})
    with watchdog.phase('eval', 'evaluating 500 prompts'):
      shown.beat()
    shown.end()
  text = terminal.getvalue()
  assert '40/40' in text and 'loss 0.25, 12 tokens/s' in text
  assert 'sft evaluating 500 prompts' in text


def test_warnings_and_logs_are_whole_lines_above_the_bar(monkeypatch):
  terminal = Terminal()
  monkeypatch.setattr(sys, 'stderr', terminal)
  handler = logging.StreamHandler(terminal)  # set up before the run
  monkeypatch.setattr(logging.getLogger('absl'), 'handlers', [handler])
  with logs.one_form(), display.show(STAGES, log_seconds=60.0) as shown:
    shown.begin('sft', 0, pace.Pace(40))
    shown.update(1, {'loss': 0.25}, {})
    print('half', end=' ', file=sys.stderr)
    print('a line', file=sys.stderr)
    with warnings.catch_warnings():
      warnings.simplefilter('always')
      warnings.warn('careful', stacklevel=1)
    logging.getLogger('absl').warning('logged')
    print('unfinished', end='', file=sys.stderr)
    shown.update(2, {'loss': 0.25}, {})
  assert sys.stderr is terminal and handler.stream is terminal
  # A carriage return clears the bar before a line is written.
  lines = [x.split('\r')[-1] for x in terminal.getvalue().split('\n')]
  for expected in ('half a line', 'logged', 'unfinished'):
    assert expected in lines
  assert any(x.startswith('warning: careful') for x in lines)


def test_a_stage_has_a_line_within_seconds(now, capsys):
  shown = display.Display(STAGES, log_seconds=60.0)
  shown.begin('sft', 0, pace.Pace(40))
  now[0] = 101.0
  shown.beat()
  with watchdog.phase('eval', 'evaluating 500 prompts'):
    now[0] = 102.5
    shown.beat()
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('stage sft: evaluating 500 prompts')
