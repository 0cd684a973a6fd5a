"""Host memory settings; the out-of-memory error is that of a run."""

import platform
import subprocess
import sys

import pytest

from posttrain.util import memory


def test_freed_memory_is_kept_on_glibc():
  code = 'from posttrain.util import memory as i; print(i.keep_freed_memory())'
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  glibc = platform.libc_ver()[0] == 'glibc'
  assert done.stdout.strip() == str(glibc)


SIZES, KNOBS = {'rows': 4}, ['model.remat']


@pytest.mark.parametrize(
  'error',
  [RuntimeError('INTERNAL: something else'), ValueError('RESOURCE_EXHAUSTED')],
)
def test_other_errors_pass_unchanged(error):
  with pytest.raises(type(error), match=str(error)):
    with memory.explain_oom(SIZES, KNOBS):
      raise error
  assert not memory.is_oom(error)
