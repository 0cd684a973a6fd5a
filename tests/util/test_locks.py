"""One run per folder: locks of processes."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from posttrain.util import locks

HOLDER = """
import os, sys, time
from posttrain.util import locks
with locks.hold(sys.argv[1], '--workdir'):
  if os.fork() == 0:  # a worker that outlives the run
    time.sleep(60)
    os._exit(0)
  print('held', flush=True)
  time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
  process = subprocess.Popen(
    [sys.executable, '-c', HOLDER, str(tmp_path)],
    stdout=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )
  assert process.stdout.readline() == 'held\n'
  yield process
  os.killpg(process.pid, signal.SIGKILL)
  process.wait()
  process.stdout.close()


def test_a_held_folder_is_refused_in_one_line_that_names_the_holder(
  holder, tmp_path
):
  with pytest.raises(locks.Locked, match='one run at a time') as error:
    with locks.hold(str(tmp_path), '--workdir'):
      pass
  words = f'process {holder.pid} on {os.uname().nodename}, since 20'
  assert words in str(error.value) and '\n' not in str(error.value)


def test_the_lock_ends_with_the_process_and_not_with_its_workers(
  holder, tmp_path
):
  holder.kill()
  holder.wait()  # its worker still sleeps
  start = time.monotonic()
  with locks.hold(str(tmp_path), '--workdir'):
    assert time.monotonic() - start < 1


def test_whether_a_folder_is_held_is_asked_without_a_lock(
  holder, tmp_path, monkeypatch
):
  folder, other = str(tmp_path), tmp_path / 'other'
  other.mkdir()
  monkeypatch.setattr(fcntl, 'lockf', None)  # it takes none
  assert not locks.is_held(str(other))  # without a file
  assert not locks.is_held(str(other / 'none'))
  (other / locks.NAME).touch()
  assert not locks.is_held(str(other))
  assert locks.is_held(folder) and locks.is_held(folder)
  holder.kill()
  holder.wait()  # its worker still sleeps
  assert not locks.is_held(folder)


def test_a_process_that_asks_for_its_own_lock_keeps_it(tmp_path):
  ask = 'import sys; from posttrain.util import locks; '
  ask += 'sys.exit(locks.is_held(sys.argv[1]))'

  def is_held_for_another():
    return subprocess.run([sys.executable, '-c', ask, str(tmp_path)]).returncode

  with locks.hold(str(tmp_path), '--workdir'):
    assert locks.is_held(str(tmp_path)) and is_held_for_another()
  assert not (locks.is_held(str(tmp_path)) or is_held_for_another())


def test_a_lock_of_which_nothing_is_known_counts_as_held(tmp_path, monkeypatch):
  def fail(*_):
    raise OSError(errno.ENOLCK, 'no locks')

  (tmp_path / locks.NAME).touch()
  monkeypatch.setattr(fcntl, 'fcntl', fail)
  assert locks.is_held(str(tmp_path))


def test_a_process_excludes_itself_and_may_come_again(tmp_path):
  for _ in range(2):
    with locks.hold(str(tmp_path), '--workdir'):
      for _ in range(2):
        with pytest.raises(locks.Locked, match=f'process {os.getpid()} '):
          with locks.hold(str(tmp_path), '--workdir'):
            pass


COMES = """
import sys
from posttrain.util import locks
try: locks.hold(sys.argv[1], 'x').__enter__()
except locks.Locked: sys.exit(7)
"""


def test_a_refused_thread_or_call_of_the_holder_drops_nothing(tmp_path):
  def refuse():
    with pytest.raises(locks.Locked):
      with locks.hold(str(tmp_path), '--workdir'):
        pass

  with locks.hold(str(tmp_path), '--workdir'):
    refuse()
    thread = threading.Thread(target=refuse)
    thread.start()
    thread.join()
    done = subprocess.run([sys.executable, '-c', COMES, str(tmp_path)])
    assert done.returncode == 7


def test_one_thread_of_many_has_the_lock(tmp_path):
  start, end, results = threading.Barrier(8), threading.Event(), []

  def come():
    start.wait()
    try:
      with locks.hold(str(tmp_path), '--workdir'):
        results.append('held')
        end.wait(10)
    except locks.Locked:
      results.append('refused')

  threads = [threading.Thread(target=come) for _ in range(8)]
  for thread in threads:
    thread.start()
  while len(results) < 8:
    time.sleep(0.001)
  end.set()
  for thread in threads:
    thread.join()
  assert sorted(results) == ['held', *['refused'] * 7]


def test_a_link_is_not_followed_and_only_files_are_locked(tmp_path):
  victim, lock = tmp_path / 'victim', tmp_path / locks.NAME
  victim.write_text('precious')
  for target in (victim, tmp_path / 'new'):
    lock.symlink_to(target)
    with pytest.raises(OSError, match='symbolic links'):
      with locks.hold(str(tmp_path), '--workdir'):
        pass
    lock.unlink()
  assert victim.read_text() == 'precious' and not (tmp_path / 'new').exists()
  os.mkfifo(lock)
  with pytest.raises(OSError, match='no regular file'):
    with locks.hold(str(tmp_path), '--workdir'):
      pass


def test_a_worker_that_closes_its_files_drops_nothing(tmp_path):
  with locks.hold(str(tmp_path), '--workdir'):
    worker = multiprocessing.get_context('fork').Process(
      target=os.closerange, args=(3, 64)
    )
    worker.start()
    worker.join()
    code = (
      'import sys; from posttrain.util import locks\n'
      'try: locks.hold(sys.argv[1], "x").__enter__()\n'
      'except locks.Locked: sys.exit(7)\n'
    )
    done = subprocess.run([sys.executable, '-c', code, str(tmp_path)])
    assert done.returncode == 7


@pytest.mark.parametrize('text', ['', '[', '3'])
def test_any_content_of_the_file_is_one_line(holder, tmp_path, text):
  (tmp_path / locks.NAME).write_text(text)
  with pytest.raises(locks.Locked) as error:
    with locks.hold(str(tmp_path), '--workdir'):
      pass
  assert str(error.value).isprintable()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
  def refuse(*_):
    raise OSError(errno.ENOLCK, 'No locks available')

  monkeypatch.setattr(fcntl, 'lockf', refuse)
  with pytest.warns(UserWarning, match='No locks available; start no second'):
    with locks.hold(str(tmp_path), '--workdir'):
      pass


def test_other_failures_are_not_hidden(tmp_path):
  with pytest.raises(FileNotFoundError):
    with locks.hold(str(tmp_path / 'no'), '--workdir'):
      pass


def test_a_deleted_file_is_put_back_and_another_one_ends_the_run(tmp_path):
  path = tmp_path / locks.NAME
  locks.check(str(tmp_path))  # not locked here
  with locks.hold(str(tmp_path), '--workdir'):
    locks.check(str(tmp_path))
    path.unlink()
    with pytest.warns(UserWarning, match='was deleted; it is put back'):
      locks.check(str(tmp_path))
    assert 'pid' in path.read_text()
    locks.check(str(tmp_path))
    with pytest.raises(locks.Locked, match='one run at a time'):
      with locks.hold(str(tmp_path), '--workdir'):
        pass
    path.unlink()
    path.touch()  # by a second run
    with pytest.raises(locks.Locked, match='stops without saving'):
      locks.check(str(tmp_path))
  locks.check(str(tmp_path))
  with locks.hold(str(tmp_path), '--workdir'):
    pass
