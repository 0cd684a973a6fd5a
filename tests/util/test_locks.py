"""The lock of a folder: one holder, whatever ends it."""

import errno
import signal
import subprocess
import sys
import threading

import pytest

from posttrain.util import locks

HOLDS = """
import subprocess, sys, time
from posttrain.util import locks
with locks.hold(sys.argv[1], '--workdir', ['process 1 on far']):
  subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])
  print('held', flush=True)
  time.sleep(60)
"""


@pytest.fixture
def held(tmp_path):
  """Returns a process that holds a lock, and that has a worker."""
  with subprocess.Popen(
    [sys.executable, '-c', HOLDS, tmp_path],
    stdout=subprocess.PIPE,
    start_new_session=True,
  ) as process:
    assert process.stdout.readline()
    yield process
    process.kill()
    process.stdout.close()


def test_a_held_folder_is_refused_until_its_process_is_killed(held, tmp_path):
  assert locks.is_held(str(tmp_path))
  with pytest.raises(locks.Locked) as error, locks.hold(str(tmp_path), '--x'):
    pass
  assert f'process {held.pid} on ' in str(error.value)
  assert 'with process 1 on far' in str(error.value)
  assert '\n' not in str(error.value)
  held.send_signal(signal.SIGKILL)
  held.wait()
  assert not locks.is_held(str(tmp_path))
  with locks.hold(str(tmp_path), '--workdir'):
    assert locks.is_held(str(tmp_path))


def test_a_lock_may_be_waited_for(held, tmp_path):
  threading.Timer(0.3, held.kill).start()
  with locks.hold(str(tmp_path), '--workdir', seconds=30.0):
    assert held.wait() == -signal.SIGKILL


def test_a_process_excludes_itself_and_may_come_again(tmp_path):
  folder = str(tmp_path)
  assert not locks.is_held(folder)
  for _ in range(2):
    with locks.hold(folder, '--workdir'):
      with pytest.raises(locks.Locked), locks.hold(folder, '--workdir'):
        pass
      assert locks.is_held(folder)
    assert not locks.is_held(folder)


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
  def flock(*_):
    raise OSError(errno.ENOLCK, 'No locks available')

  monkeypatch.setattr(locks.fcntl, 'flock', flock)
  with pytest.warns(match='No locks'), locks.hold(str(tmp_path), '--workdir'):
    assert locks.is_held(str(tmp_path))  # unknown
