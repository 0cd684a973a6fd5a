"""Lines where there is no terminal, and a bar on one."""

import io
import sys
from unittest import mock

import pytest

from posttrain.metrics import display


def test_lines_say_how_far_the_stage_is(monkeypatch, capsys):
  now = [100.0]
  monkeypatch.setattr(display, 'time', mock.Mock(monotonic=lambda: now[0]))
  shown = display.Display('grpo', 10, 30, log_seconds=60.0)
  for step, now[0], compiled in (
    (11, 101.0, 3.0),
    (12, 103.0, 0.0),
    (15, 162.0, 0.0),
  ):
    numbers = {'tokens/s': 13400.4, 'reward': 0.12345}
    shown.update(step, numbers, {'time/compile': compiled})
  shown.end()
  assert capsys.readouterr().err.splitlines() == [
    'stage grpo: 20 steps to go',
    'stage grpo: step 11 of 30, compiled for 3 s, tokens/s 13,400, '
    'reward 0.1235',
    'stage grpo: step 15 of 30, tokens/s 13,400, reward 0.1235, '
    'about 03:48 left of the stage',
  ]


@pytest.mark.parametrize('on', [True, False])
def test_a_terminal_has_a_bar(on, monkeypatch):
  terminal = io.StringIO()
  terminal.isatty = lambda: True
  monkeypatch.setattr(sys, 'stderr', terminal)
  shown = display.Display('sft', 30, 40, log_seconds=0.001, on=on)
  shown.update(40, {'loss': 0.25, 'tokens/s': 12.0}, {})
  shown.end()
  text = terminal.getvalue()
  assert ('40/40' in text and 'loss 0.25, tokens/s 12' in text) == on
  assert bool(text) == on
