"""Runs killed with SIGKILL end where the undisturbed run ends, bit by bit."""

import json
import os
import signal
import threading

import numpy as np
import pytest

from experiments import doomed, kill_resume


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
  """An evaluation polls the engine, too."""

  def evaluate(self):
    self.play()

  def play(self):
    self.poll()
    self.poll()

  def poll(self):
    pass


@pytest.fixture
def stage(tmp_path, monkeypatch):
  """(make a watch, its report, the stage it watches)."""
  for name in ('evaluate', 'play', 'poll'):
    monkeypatch.setattr(Stage, name, vars(Stage)[name])  # put back later

  def watch(**doom):
    made = doomed.Watch(str(tmp_path / 'report'), **doom)
    made.wrap('eval', Stage, 'evaluate')
    made.wrap('rollout', Stage, 'play', counts=False)
    made.wrap('rollout', Stage, 'poll')
    return made

  return watch, tmp_path / 'report', Stage()


def test_a_phase_is_counted_where_it_is_not_within_another(stage):
  watch, report, runs = stage
  made = watch()
  runs.evaluate()
  runs.play()
  made.tell(made.entries)
  assert json.loads(report.read_text()) == {'eval': 1, 'rollout': 2}


@pytest.mark.parametrize(
  ('phase', 'entry', 'polls'), [('rollout', 2, 4), ('eval', 1, 1)]
)
def test_death_comes_within_the_phase(stage, monkeypatch, phase, entry, polls):
  watch, report, runs = stage
  sent, at, done = [], [], []
  dead = threading.Event()

  def kill(pid, number):
    sent.append((pid, number))
    at.append(len(done))
    dead.set()

  def poll(self):
    done.append(None)
    if len(done) == polls:  # it does not end before death comes
      assert dead.wait(timeout=10)

  monkeypatch.setattr(os, 'kill', kill)
  monkeypatch.setattr(Stage, 'poll', poll)
  watch(phase=phase, entry=entry)
  runs.evaluate()
  runs.play()
  assert sent == [(os.getpid(), signal.SIGKILL)]
  assert polls - 1 <= at[0] <= polls  # the poll has begun, or is about to
  assert json.loads(report.read_text()) == [phase]


def test_one_bit_is_a_difference():
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


def test_a_stage_that_did_not_train_is_noticed():
  truth = {
    'arrays': {'sft/params/w': np.ones(2), 'grpo/params/w': np.ones(2)},
    'rows': [{'stage': 'grpo', 'optim/empty': 1.0}],
  }
  with pytest.raises(AssertionError, match='not grpo/params/w'):
    kill_resume.check_moved(truth)
  truth['arrays']['grpo/params/w'] = np.array([1.0, 2.0])
  assert kill_resume.check_moved(truth) == 0
