"""When a run of several trainers is started again, and with which end."""

import signal

import pytest

from experiments.launch.cluster import attempts
from experiments.launch.cluster.attempts import LOST
from posttrain.util import preemption


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(attempts, 'POLL_SECONDS', 0.0)
  monkeypatch.setattr(attempts, 'PAUSES', (0.0, 0.0))


class Trainers:
  """Trainers whose ends are scripted, one list per look; the last stays."""

  def __init__(self, *looks, stop=None, request_at=None):
    self.looks, self.seen = looks, 0
    self.stop, self.request_at = stop, request_at
    self.signals, self.closed = [], 0

  def ends(self):
    look = self.looks[min(self.seen, len(self.looks) - 1)]
    self.seen += 1
    if self.seen == self.request_at:
      self.stop.request()
    return list(look)

  def signal(self, number):
    self.signals.append(number)

  def last_lines(self):
    return ['']

  def close(self):
    self.closed += 1


def run(*trainers, restarts=3, stop=None):
  """Returns the exit code and the lines of a run with these attempts."""
  left, lines = iter(trainers), []

  def start():
    following = next(left)
    if isinstance(following, Exception):
      raise following
    return following

  code = attempts.run(
    start, restarts, stop or preemption.Signal(), lines.append
  )
  assert next(left, None) is None
  for x in trainers:
    assert isinstance(x, Exception) or x.closed == 1
  return code, lines


@pytest.mark.parametrize(
  ('ends', 'code', 'stopped_code'),
  [([0, 0], 0, 0), ([5, 2], 2, 2), ([75, 5], 75, 75), ([1, 5], None, 75)],
)
def test_outcome_of_an_attempt(ends, code, stopped_code):
  assert attempts.outcome(ends, stopped=False) == code
  assert attempts.outcome(ends, stopped=True) == stopped_code


def test_failures_are_followed_by_other_attempts():
  code, lines = run(
    Trainers([None, None], [-9, None], [-9, 5]),
    attempts.StartError('a node'),
    Trainers([LOST, 5]),
    Trainers([0, 0]),
  )
  assert code == 0
  assert [line for line in lines if 'pause' in line] == [
    f'pause of 0 s before restart {n} of 3' for n in (1, 2, 3)
  ]


def test_a_request_to_stop_is_passed_on_once():
  stop = preemption.Signal()
  trainers = Trainers(*[[None, None]] * 4, [75, 75], stop=stop, request_at=2)
  code, _ = run(trainers, stop=stop)
  assert code == 75 and trainers.signals == [signal.SIGTERM]
