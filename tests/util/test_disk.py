"""Files that replace others as a whole, JSON files, the lock of a folder."""

import errno
import signal
import subprocess
import sys
import threading

import pytest

from posttrain.util import disk


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
  path = tmp_path / 'x'
  for text in ('one', 'é'):
    with disk.replacing(path) as file:
      file.write(text)
      assert not path.exists() or path.read_text() == 'one'
    assert path.read_text(encoding='utf-8') == text
  with disk.replacing(str(path), 'xb') as file:
    file.write(b'two')
  assert path.read_bytes() == b'two'
  assert [x.name for x in tmp_path.iterdir()] == ['x']


def test_a_block_that_raises_changes_nothing(tmp_path):
  path = tmp_path / 'x'
  path.write_text('old')
  with pytest.raises(ZeroDivisionError):
    with disk.replacing(path) as file:
      file.write('new')
      raise ZeroDivisionError
  assert path.read_text() == 'old'
  assert [x.name for x in tmp_path.iterdir()] == ['x']


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
  path = tmp_path / 'a.json'
  path.write_bytes('{"a": [1, -2.5, null, "é[{"]}'.encode('utf-8-sig'))
  assert disk.read_json(path) == {'a': [1, -2.5, None, 'é[{']}


@pytest.mark.parametrize('data', [b'\xff\xfe', b'{"a": 1', b'[1, 2]', None])
def test_files_are_refused_by_name(data, tmp_path):
  path = tmp_path / 'a.json'
  if data:
    path.write_bytes(data)
  with pytest.raises(ValueError, match=f'{path}.* must (be|hold)') as error:
    disk.read_json_object(path)
  assert '\n' not in str(error.value)


HOLDS = """
import subprocess, sys, time
from posttrain.util import disk
with disk.lock(sys.argv[1], '--workdir', ['process 1 on far']):
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
  assert disk.is_locked(str(tmp_path))
  with pytest.raises(disk.Locked) as error, disk.lock(str(tmp_path), '--x'):
    pass
  assert f'process {held.pid} on ' in str(error.value)
  assert 'with process 1 on far' in str(error.value)
  assert '\n' not in str(error.value)
  held.send_signal(signal.SIGKILL)
  held.wait()
  assert not disk.is_locked(str(tmp_path))
  with disk.lock(str(tmp_path), '--workdir'):
    assert disk.is_locked(str(tmp_path))


def test_a_lock_may_be_waited_for(held, tmp_path):
  threading.Timer(0.3, held.kill).start()
  with disk.lock(str(tmp_path), '--workdir', seconds=30.0):
    assert held.wait() == -signal.SIGKILL


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
  def flock(*_):
    raise OSError(errno.ENOLCK, 'No locks available')

  monkeypatch.setattr(disk.fcntl, 'flock', flock)
  with pytest.warns(match='No locks'), disk.lock(str(tmp_path), '--workdir'):
    assert disk.is_locked(str(tmp_path))  # unknown
