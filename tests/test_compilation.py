"""The compile counter and the persistent compilation cache."""

import subprocess
import sys

import jax
import numpy as np

from posttrain import compilation


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


CACHED = """
import sys, numpy as np, jax
from posttrain import compilation
compilation.enable_compilation_cache(None)
assert jax.config.jax_compilation_cache_dir is None
compilation.enable_compilation_cache(sys.argv[1])
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
for _ in range(2):
  jax.clear_caches()
  with compilation.CompileCounter() as compiles:
    jax.jit(lambda x: x * 5 - 2)(np.ones(3, np.float32))
  print(compiles.count, events.count('/jax/compilation_cache/cache_hits'))
"""


def test_programs_from_the_persistent_cache_count(tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', CACHED, str(tmp_path / 'cache')],
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout.split() == ['1', '0', '1', '1']
  assert not done.stderr
