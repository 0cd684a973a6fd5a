"""The watchdog: what it reports, and what it lets pass."""

import logging
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from experiments.trials import base
from posttrain.util import exits, watchdog


@pytest.fixture
def lines(monkeypatch):
  """Returns the list of what is logged."""
  texts = []
  monkeypatch.setattr(
    logging.getLogger('absl'),
    'error',
    lambda text, *values: texts.append(text % values),
  )
  return texts


def test_a_hang_is_reported_once_with_stacks_and_its_end(lines, tmp_path):
  with watchdog.watch(0.1, None, str(tmp_path / 'stalls')):
    with (
      watchdog.phase('rollout'),
      watchdog.waiting(lambda: 'environment sums: step'),
    ):
      base.wait_for(lambda: list(tmp_path.glob('stalls/*.txt')) and lines)
      time.sleep(0.3)
    base.wait_for(lambda: len(lines) == 2)
  first, second = lines
  (path,) = tmp_path.glob('stalls/*.txt')
  assert first.endswith(f'stacks: {path}')
  assert 'in phase rollout, which waits for environment sums: step (0 s)' in (
    first
  )
  assert 'test_a_hang_is_reported_once' in path.read_text()
  assert second == 'watchdog: progress again after the stall'


def test_a_phase_without_a_registered_wait_names_the_usual_one():
  with watchdog.phase('update'):
    assert 'waits for the device, or another process' in watchdog.describe()
  assert watchdog.describe().startswith('in phase start, ')


def test_the_oldest_waits_are_named():
  with watchdog.phase('rollout'):
    waits = [watchdog.waiting(lambda i=i: f'call {i}') for i in range(5)]
    for wait in waits:
      wait.__enter__()
    assert 'call 0 (0 s), call 1 (0 s), call 2 (0 s), 2 more' in (
      watchdog.describe()
    )
    for wait in waits:
      wait.__exit__(None, None, None)


def test_progress_and_compilation_are_no_hang(lines, tmp_path, monkeypatch):
  with watchdog.watch(0.2, None, str(tmp_path)):
    for _ in range(50):
      watchdog.progress()
      time.sleep(0.01)
    path = str(pathlib.Path('site', 'jax', '_src', 'compiler.py'))
    scope = {'sleep': time.sleep}
    exec(compile('def compiles(): sleep(0.6)', path, 'exec'), scope)
    thread = threading.Thread(target=scope['compiles'])
    thread.start()
    thread.join()
  assert not lines and not list(tmp_path.iterdir())


def test_compilation_is_seen_behind_many_threads():
  """faulthandler shows the newest 100 threads, and the main thread is older."""
  path = str(pathlib.Path('site', 'jax', '_src', 'compiler.py'))
  scope, ends = {'look': watchdog.compiles}, threading.Event()
  exec(compile('def compiles(): return look()', path, 'exec'), scope)
  threads = [threading.Thread(target=ends.wait) for _ in range(110)]
  for thread in threads:
    thread.start()
  try:
    assert scope['compiles']() and not watchdog.compiles()
  finally:
    ends.set()
    for thread in threads:
      thread.join()


HANGS = """
import sys, time
from posttrain.util import watchdog
watchdog.LOCK_MARGIN = 0.3
with watchdog.watch(0.2, 0.5, sys.argv[1]):
  with watchdog.phase('save'):
    if sys.argv[2] == 'lock':
      sum(range(10**12))
    time.sleep(60)
"""


WORKS = """
import sys, time
from posttrain.util import watchdog
with watchdog.watch(0.5, 1, sys.argv[1]):
  print('ready', flush=True)
  for _ in range(60):
    time.sleep(0.05)
    watchdog.progress()
"""


def test_a_suspended_process_goes_on(tmp_path):
  command = [sys.executable, '-c', WORKS, tmp_path / 'stalls']
  with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    process.send_signal(signal.SIGCONT)
    process.communicate()
  assert process.returncode == 0


@pytest.mark.parametrize(
  ('kind', 'code'), [('sleep', exits.STALLED), ('lock', 1)]
)
def test_a_hung_process_ends(kind, code, tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', HANGS, tmp_path / 'stalls', kind],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == code
  if kind == 'sleep':
    assert 'in phase save, which waits for the file system' in done.stderr
    assert 'exit 4' in done.stderr and list(tmp_path.glob('stalls/*.txt'))
  else:
    assert '<module>' in done.stderr
