"""Strict on purpose: what is only suspicious elsewhere fails here.

CPU unless `-m gpu` asks for the GPU tests; rank promotion raises; warnings are
errors, but for the allow-list in .pytest.ini. Quick tests compile with hardly
an optimization, in a quarter of the time; the others as runs do.
"""

import ctypes
import gc
import importlib.metadata
import os
import pathlib
import re
import tempfile

import pytest

# Halve the time that XLA compiles for CPUs; jaxlib 0.11 dies of the first flag.
FLAGS = (
  '--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1'
)


def pytest_configure(config):
  """Settles the platform before anything imports jax."""
  wanted = re.findall(
    r'(?<!not )\b(gpu|slow|aot|gate)\b', config.getoption('-m') or ''
  )
  # Subprocesses inherit what is said by way of the environment.
  if 'gpu' not in wanted:
    os.environ['JAX_PLATFORMS'] = 'cpu'
  if not wanted:
    os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
    flags = os.environ.get('XLA_FLAGS', '')
    known = importlib.metadata.version('jaxlib').startswith('0.10.')
    if known and FLAGS not in flags:
      os.environ['XLA_FLAGS'] = f'{flags} {FLAGS}'
  import jax

  if not wanted:
    # What one test has compiled, no other of this process compiles again.
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    jax.config.update('jax_compilation_cache_dir', folder.name)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.05)
    gc.set_threshold(10_000)  # fewer searches for garbage
  jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.fixture(autouse=True, scope='module')
def forget_programs():
  """Drops compiled programs where the process has more than 768 MiB."""
  yield
  import jax

  memory = pathlib.Path('/proc/self/statm')  # of Linux
  pages = int(memory.read_text().split()[1]) if memory.exists() else 0
  if pages * os.sysconf('SC_PAGE_SIZE') > 3 * 2**28:
    jax.clear_caches()
    # The C library keeps freed memory for later use, unless it is told not to.
    getattr(ctypes.CDLL(None), 'malloc_trim', int)(0)


@pytest.fixture
def optimized():
  """Compiles as runs do, also where the test is a quick one."""
  import jax

  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', False)
  yield
  jax.config.update('jax_disable_most_optimizations', before)


def pytest_collection_modifyitems(items):
  """Skips the GPU tests that another mark brought in on a CPU."""
  import jax

  marked = [item for item in items if item.get_closest_marker('gpu')]
  if marked and jax.default_backend() != 'gpu':
    for item in marked:
      item.add_marker(pytest.mark.skip(reason='needs a GPU and -m gpu'))
