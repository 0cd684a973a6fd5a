"""Runs killed with SIGKILL end like the undisturbed run, bit by bit."""

import json
import os
import signal
import threading

import numpy as np
import pytest

from experiments.trials import doomed, kill_resume


@pytest.mark.slow
@pytest.mark.parametrize('stage', kill_resume.RECIPES)
def test_killed_runs_end_bitwise_the_same(stage, capsys):
  """At least one kill in every phase, and one at a random time."""
  kill_resume.main(
    ['--kills=5', '--each=1', '--saving=1', '--seed=0', f'--stage={stage}']
  )
  last = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert last['kills'] >= 5 and last['while_saving'] >= 1
  phases = {'rollout', 'update', 'save', 'eval', 'random'}
  assert phases <= last['by_phase'].keys()
  assert last['differences'] == 0


class Stage:
  """Phases within each other: an evaluation plays, and playing polls."""

  def evaluate(self):
    self.play()

  def play(self):
    self.poll()
    self.poll()

  def poll(self):
    pass


@pytest.fixture
def stage(tmp_path, monkeypatch):
  """Returns a function that makes a watch, its report, and the stage."""
  for name in ('evaluate', 'play', 'poll'):
    monkeypatch.setattr(Stage, name, vars(Stage)[name])  # undone afterwards

  def make_watch(**options):
    watch = doomed.Watch(str(tmp_path / 'report'), **options)
    watch.wrap('eval', Stage, 'evaluate')
    watch.wrap('rollout', Stage, 'play', counts=False)
    watch.wrap('rollout', Stage, 'poll')
    return watch

  return make_watch, tmp_path / 'report', Stage()


def test_entries_within_another_phase_do_not_count(stage):
  make_watch, report, phases = stage
  watch = make_watch()
  phases.evaluate()
  phases.play()
  watch.write_report(watch.entries)
  assert json.loads(report.read_text()) == {'eval': 1, 'rollout': 2}


@pytest.mark.parametrize(
  ('phase', 'entry', 'polls'), [('rollout', 2, 4), ('eval', 1, 1)]
)
def test_the_kill_is_within_the_phase(stage, monkeypatch, phase, entry, polls):
  make_watch, report, phases = stage
  signals, polls_at_kill, poll_calls = [], [], []
  killed = threading.Event()

  def kill(pid, number):
    signals.append((pid, number))
    polls_at_kill.append(len(poll_calls))
    killed.set()

  def poll(self):
    poll_calls.append(None)
    if len(poll_calls) == polls:  # the phase lasts until the kill
      assert killed.wait(timeout=10)

  monkeypatch.setattr(os, 'kill', kill)
  monkeypatch.setattr(Stage, 'poll', poll)
  make_watch(phase=phase, entry=entry)
  phases.evaluate()
  phases.play()
  assert signals == [(os.getpid(), signal.SIGKILL)]
  # The poll has begun, or is about to.
  assert polls - 1 <= polls_at_kill[0] <= polls
  assert json.loads(report.read_text()) == [phase]


def test_differences_are_bitwise_and_name_the_array():
  def outcome(value, dtype=np.float32, **row):
    return {'arrays': {'sft/params/w': np.array([value], dtype)}, 'rows': [row]}

  truth = outcome(0.0, loss=1.0)
  assert kill_resume.differences(truth, outcome(0.0, loss=1.0)) == []
  # -0.0 == 0.0, but it is another weight.
  assert kill_resume.differences(truth, outcome(-0.0, loss=1.0)) == [
    'sft/params/w'
  ]
  assert kill_resume.differences(truth, outcome(0.0, np.float16, loss=1.0)) == [
    'sft/params/w'
  ]
  assert kill_resume.differences(truth, outcome(0.0, loss=2.0)) == ['metrics']
  assert 'tree' in kill_resume.differences(truth, {'arrays': {}, 'rows': []})


def test_check_moved_fails_for_an_unchanged_array():
  truth = {
    'arrays': {'sft/params/w': np.ones(2), 'grpo/params/w': np.ones(2)},
    'rows': [{'stage': 'grpo', 'optim/empty': 1.0}],
  }
  with pytest.raises(AssertionError, match='not grpo/params/w'):
    kill_resume.check_moved(truth)
  truth['arrays']['grpo/params/w'] = np.array([1.0, 2.0])
  assert kill_resume.check_moved(truth) == 0
