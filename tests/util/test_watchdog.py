"""The watchdog: what it reports, what it ends, and what it lets pass."""

import signal
import subprocess
import sys

import pytest

from posttrain.util import errors, watchdog

RUN = """
import os, signal, sys, time
from posttrain.util import watchdog

kind = sys.argv[1]
first = 60 if kind == 'first' else 0
with watchdog.watch(0.3, first, None if kind == 'report' else 0.6, code=4):
  with watchdog.phase('save', first=True):
    time.sleep(1.2 if first else 0)
  with watchdog.phase('rollout'), watchdog.waiting(lambda: 'reward exact'):
    if kind == 'lock':
      sum(range(10**12))
    if kind == 'report':
      time.sleep(1.2)
    if kind == 'killed':
      os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(20):
      watchdog.progress()
      time.sleep(60 if kind == 'hang' else 0.05)
  time.sleep(0.1)
"""


@pytest.mark.parametrize(
  ('kind', 'code', 'ends'),
  [
    ('hang', errors.STALLED, True),
    ('lock', -signal.SIGKILL, True),
    ('report', 0, False),
    ('first', 0, False),
    ('killed', -signal.SIGKILL, False),
  ],
)
def test_a_process_without_progress_is_named_and_ended(kind, code, ends):
  done = subprocess.run(
    [sys.executable, '-c', RUN, kind],
    capture_output=True,  # returns when the watchdog has ended as well
    text=True,
    timeout=60,
  )
  assert done.returncode == code, done.stderr
  stalls = kind in ('hang', 'lock', 'report')
  assert ('in phase rollout, which waits for reward exact' in done.stderr) == (
    stalls
  )
  assert ('File "<string>"' in done.stderr) == ends  # a stack
  assert ('progress again' in done.stderr) == (kind == 'report')


def test_the_phase_and_the_oldest_waits_are_described(monkeypatch):
  monkeypatch.setattr(watchdog, '_waits', {})
  with watchdog.phase('update'):
    assert watchdog.current() == 'update'
    waits = [watchdog.waiting(lambda i=i: f'call {i}') for i in range(5)]
    for wait in waits:
      wait.__enter__()
    assert 'call 0, call 1, call 2, 2 more' in watchdog.describe()
    before = watchdog.count()
    for wait in waits:
      wait.__exit__(None, None, None)
    assert watchdog.count() == before + 5
  assert watchdog.current() == 'start'


def test_a_watched_process_leaves_no_watchdog_and_no_handler(monkeypatch):
  popen, started = subprocess.Popen, []
  monkeypatch.setattr(
    subprocess,
    'Popen',
    lambda *a, **k: started.append(popen(*a, **k)) or started[0],
  )
  with watchdog.watch(5.0, 5.0, 9.0, errors.STALLED):
    pass
  assert started[0].returncode is not None
  assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_timers_accumulate_until_taken(monkeypatch):
  now = iter([0.0, 1.0, 10.0, 12.0])
  monkeypatch.setattr(watchdog.time, 'perf_counter', lambda: next(now))
  clock = watchdog.Timers()
  with clock('data'):
    pass
  with pytest.raises(KeyError), clock('data'):
    raise KeyError
  assert clock.take() == {'data': 3.0}
  assert clock.take() == {}
