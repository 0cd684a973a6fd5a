"""Host memory settings, and the out-of-memory error."""

import platform
import subprocess
import sys

import jax
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


def test_out_of_memory_errors_name_sizes_and_config_keys():
  text = 'RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.'
  with pytest.raises(memory.OutOfDeviceMemory) as caught:
    with memory.explain_oom(SIZES, KNOBS):
      raise jax.errors.JaxRuntimeError(text)
  for part in ('got rows=4', 'config.model.remat', text):
    assert part in str(caught.value)


@pytest.mark.parametrize(
  'error',
  [RuntimeError('INTERNAL: something else'), ValueError('RESOURCE_EXHAUSTED')],
)
def test_other_errors_pass_unchanged(error):
  with pytest.raises(type(error), match=str(error)):
    with memory.explain_oom(SIZES, KNOBS):
      raise error
  assert not memory.is_oom(error)
