"""Standard streams that are closed, broken or full are no failure."""

import os
import subprocess
import sys

import pytest

OPENS = """
import sys
import posttrain
opened = open(sys.argv[1], 'w')
assert opened.fileno() > 2, opened.fileno()
print('shown'), print('shown', file=sys.stderr)
"""
PRINTS = """
import sys
from posttrain.util import streams
with streams.guarded():
  for _ in range(100_000):
    print('line', file=getattr(sys, sys.argv[1]))
open(sys.argv[2], 'w').close()
"""


@pytest.mark.parametrize('closed', [(0,), (2,), (0, 1, 2), (1, 2)])
def test_closed_streams_are_opened_before_files(closed, tmp_path):
  def close():
    for number in closed:
      os.close(number)

  command = [sys.executable, '-c', OPENS, tmp_path / 'file']
  done = subprocess.run(command, capture_output=True, preexec_fn=close)
  assert done.returncode == 0
  assert (tmp_path / 'file').read_text() == ''


@pytest.mark.parametrize('name', ['stdout', 'stderr'])
def test_a_reader_that_ends_first_is_no_failure(name, tmp_path):
  reader, writer = os.pipe()
  os.close(reader)
  command = [sys.executable, '-c', PRINTS, name, tmp_path / 'end']
  done = subprocess.run(command, **{name: writer})
  os.close(writer)
  assert done.returncode == 0 and (tmp_path / 'end').exists()


def test_a_full_disk_under_stdout_is_a_failure_and_under_stderr_none(tmp_path):
  with open('/dev/full', 'w') as full:
    for name, code in (('stderr', 0), ('stdout', 1)):
      command = [sys.executable, '-c', PRINTS, name, tmp_path / name]
      quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
      done = subprocess.run(command, **{**quiet, name: full})
      assert done.returncode == code, name
