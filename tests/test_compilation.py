"""The compile counter, timers, out-of-memory errors and log filters."""

import logging
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import compilation
from posttrain.util import logs, memory, timers


def test_compilations_are_counted_while_open():
  f = jax.jit(lambda x: x * 3 + 1)
  inputs = [np.ones(n, np.float32) for n in (2, 2, 3)]
  with compilation.CompileCounter() as outer:
    f(inputs[0])
    with compilation.CompileCounter() as inner:
      f(inputs[1])
    f(inputs[2])
  f(np.ones(4, np.float32))
  assert (inner.count, outer.count) == (0, 2)
  assert outer.seconds > 0
  assert inner.seconds == 0
  counter = compilation.CompileCounter().open()
  counter.close()
  counter.close()


CACHED = """
import sys, numpy as np, jax
from posttrain import compilation
compilation.enable_compilation_cache(None)
assert jax.config.jax_compilation_cache_dir is None
compilation.enable_compilation_cache(sys.argv[1])
with compilation.CompileCounter() as compiles:
  jax.jit(lambda x: x * 5 - 2)(np.ones(3, np.float32))
print(compiles.count, compiles.cached)
"""


def test_programs_from_the_persistent_cache_count_as_cached(tmp_path):
  for cached in (0, 1):
    done = subprocess.run(
      [sys.executable, '-c', CACHED, str(tmp_path / 'cache')],
      capture_output=True,
      text=True,
      check=True,
    )
    assert done.stdout.split() == ['1', str(cached)]
    assert not done.stderr


def test_timers_accumulate_until_taken(monkeypatch):
  now = iter([0.0, 1.0, 10.0, 12.0])
  monkeypatch.setattr(timers.time, 'perf_counter', lambda: next(now))
  clock = timers.Timers()
  with clock('data'):
    pass
  with pytest.raises(KeyError), clock('data'):
    raise KeyError
  assert clock.take() == {'data': 3.0}
  assert clock.take() == {}


def test_freed_memory_is_kept_on_glibc():
  code = 'from posttrain.util import memory as i; print(i.keep_freed_memory())'
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  glibc = platform.libc_ver()[0] == 'glibc'
  assert done.stdout.strip() == str(glibc)


def test_keep_freed_memory_does_nothing_outside_linux(monkeypatch):
  monkeypatch.setattr(memory.sys, 'platform', 'darwin')
  assert not memory.keep_freed_memory()


SIZES = {'rows': 4, 'row_tokens': 256}
KNOBS = ['sft.batch.micro_batch_tokens', 'model.remat']


@pytest.mark.parametrize(
  'text',
  [
    'RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.',
    'INTERNAL: Out of memory',
  ],
)
def test_out_of_memory_errors_name_sizes_and_config_keys(text):
  with pytest.raises(memory.OutOfDeviceMemory) as caught:
    with memory.explain_oom(SIZES, KNOBS):
      raise jax.errors.JaxRuntimeError(text)
  message = str(caught.value)
  assert 'got rows=4, row_tokens=256' in message
  assert 'config.sft.batch.micro_batch_tokens, or config.model.remat' in message
  assert text in message
  assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def test_an_explained_error_is_not_explained_again():
  with pytest.raises(memory.OutOfDeviceMemory, match='rows=4'):
    with memory.explain_oom({'outer': 1}, []):
      with memory.explain_oom(SIZES, KNOBS):
        raise RuntimeError('RESOURCE_EXHAUSTED')


@pytest.mark.parametrize(
  'error',
  [RuntimeError('INTERNAL: something else'), ValueError('RESOURCE_EXHAUSTED')],
)
def test_other_errors_pass_unchanged(error):
  with pytest.raises(type(error), match=str(error)):
    with memory.explain_oom(SIZES, KNOBS):
      raise error
  assert not memory.is_oom(error)


def test_a_real_allocation_that_cannot_fit_is_explained():
  with pytest.raises(memory.OutOfDeviceMemory):
    with memory.explain_oom(SIZES, KNOBS):
      jax.block_until_ready(jnp.zeros((2**45,), jnp.int8))


def test_quiet_drops_logs_of_a_package_below_errors():
  logs.quiet('chatty')
  logs.quiet('chatty')
  (mine,) = [
    f
    for f in logging.getLogger('absl').filters
    if getattr(f, 'package', None) == 'chatty'
  ]

  def passes(path, level):
    return mine.filter(logging.LogRecord('absl', level, path, 1, '', (), None))

  assert not passes('/lib/chatty/a.py', logging.WARNING)
  assert passes('/lib/chatty/a.py', logging.ERROR)
  assert passes('/lib/other/a.py', logging.INFO)
