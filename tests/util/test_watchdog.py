"""The watchdog: what it reports, what it ends, and what it lets pass."""

import signal
import subprocess
import sys
from unittest import mock

import pytest

from posttrain.util import errors, watchdog

RUN = """
import ctypes, os, signal, sys, time
from posttrain.util import watchdog

kind = sys.argv[1]
first = 60 if kind == 'first' else 0
with watchdog.watch(0.3, first, None if kind == 'report' else 0.6, code=4):
  with watchdog.phase('save', first=True):
    time.sleep(1.2 if first else 0)
  with watchdog.phase('rollout'), watchdog.waiting(lambda: 'reward exact'):
    if kind == 'lock':
      # Waits for a byte that never comes; unlike CDLL, PyDLL keeps the lock.
      ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
    if kind == 'report':
      time.sleep(1.2)
    if kind == 'killed':
      os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(20):
      watchdog.progress()
      time.sleep(60 if kind == 'hang' else 0.05)
  time.sleep(0.1)
"""


CASES = {  # exit code, whether stacks are written
  'hang': (errors.STALLED, True),
  'lock': (-signal.SIGKILL, True),
  'report': (0, False),
  'first': (0, False),
  'killed': (-signal.SIGKILL, False),
}


@pytest.fixture(scope='module')
def processes():
  """A process of each kind, all at once: they only wait."""
  pipes = {'stderr': subprocess.PIPE, 'text': True}
  return {
    kind: subprocess.Popen([sys.executable, '-c', RUN, kind], **pipes)
    for kind in CASES
  }


@pytest.mark.parametrize('kind', CASES)
def test_a_process_without_progress_is_named_and_ended(kind, processes):
  code, ends = CASES[kind]
  # Returns when the watchdog has ended as well.
  _, shown = processes[kind].communicate(timeout=60)
  assert processes[kind].returncode == code, shown
  stalls = kind in ('hang', 'lock', 'report')
  assert ('in phase rollout, which waits for reward exact' in shown) == stalls
  assert ('File "<string>"' in shown) == ends  # a stack
  assert ('progress again' in shown) == (kind == 'report')


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
  monkeypatch.setattr(
    watchdog, 'time', mock.Mock(perf_counter=lambda: next(now))
  )
  clock = watchdog.Timers()
  with clock('data'):
    pass
  with pytest.raises(KeyError), clock('data'):
    raise KeyError
  assert clock.take() == {'data': 3.0}
  assert clock.take() == {}
