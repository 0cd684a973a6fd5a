"""When a process ends with another: heartbeats of threads, over loopback."""

import re
import socket
import time

import pytest

from posttrain.hosts import heartbeat
from posttrain.util import errors, preemption


@pytest.fixture
def world(monkeypatch):
  """Returns the heartbeats of three processes, and the ends of processes."""
  ends = {}  # process -> (exit code, text)

  def end(text, code):
    who = re.search(r'process (\d) ends in phase', text)[1]
    ends.setdefault(int(who), (code, text))

  monkeypatch.setattr(heartbeat.watchdog, 'end', end)
  monkeypatch.setattr(heartbeat, 'BEAT_SECONDS', 0.02)
  monkeypatch.setattr(heartbeat, 'LOST_SECONDS', 0.5)
  monkeypatch.setattr(heartbeat, 'GRACE_SECONDS', 0.5)
  monkeypatch.setattr(heartbeat, 'SAVED_SECONDS', 0.6)
  monkeypatch.setattr(heartbeat.processes, 'count', lambda: 3)
  first, made = [], []
  monkeypatch.setattr(
    heartbeat.processes, 'gather', lambda own: first.append(own) or first
  )
  for index in range(3):
    monkeypatch.setattr(heartbeat.processes, 'index', lambda i=index: i)
    made.append(heartbeat.Heartbeat('127.0.0.1'))
  for beats in made:
    beats.start()
  wait(lambda: len(made[0]._beats) == 2 and 0 in made[1]._beats)
  yield made, ends
  for beats in made[::-1]:
    beats.finish()
    beats.join(10)
    assert not beats.is_alive()


def wait(condition):
  end = time.monotonic() + 10
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.01)


def test_a_process_whose_connection_closes_is_lost_for_all_others(world):
  made, ends = world
  made[2]._connection.shutdown(socket.SHUT_RDWR)
  wait(lambda: ends.keys() >= {0, 1})
  for code, text in (ends[0], ends[1]):
    assert code == errors.PEER_LOST
    assert f'process 2 on {socket.gethostname()} (pid ' in text
    assert 'is lost, last in phase ' in text


def test_a_silent_process_is_lost(world, monkeypatch):
  made, ends = world
  monkeypatch.setattr(made[1], '_beat', lambda: b'')  # sends nothing
  wait(lambda: ends.keys() >= {0, 2})
  assert all('process 1 on' in ends[i][1] for i in (0, 2))


def test_without_answers_process_0_is_lost(world, monkeypatch):
  made, ends = world
  monkeypatch.setattr(made[0], '_beat', lambda: b'')  # sends nothing
  wait(lambda: ends.keys() >= {1, 2})
  assert all(ends[i][1].startswith('process 0 on') for i in (1, 2))


@pytest.mark.parametrize(
  ('error', 'code'),
  [
    (ValueError('bad'), errors.FAILED),
    (preemption.Preempted('step 3'), errors.PREEMPTED),
    (KeyboardInterrupt(), errors.INTERRUPTED),
  ],
)
def test_the_others_end_as_one_that_failed(error, code, world):
  made, ends = world
  made[1].finish(error)
  wait(lambda: ends.keys() == {0, 2})
  assert {x for x, _ in ends.values()} == {code}
  kind = type(error).__name__
  assert all(f'has ended: {kind}' in text for _, text in ends.values())


def test_those_that_fail_alike_and_those_that_are_done_end_by_themselves(world):
  made, ends = world
  made[1].finish()
  time.sleep(0.7)
  assert not ends
  made[2].finish(ValueError('bad'))
  made[0].finish(ValueError('bad'))
  assert not ends


def test_progress_of_others_counts_while_this_one_waits(world, monkeypatch):
  made, _ = world
  counted = []
  monkeypatch.setattr(
    heartbeat.watchdog, 'others_progress', lambda: counted.append(1)
  )
  with made[2].waiting():
    wait(lambda: counted)  # that of `waiting` itself, which all three share
    time.sleep(0.1)
    counted.clear()
    time.sleep(0.1)
    assert not counted
    heartbeat.watchdog.progress()
    wait(lambda: counted)
