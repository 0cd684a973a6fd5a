"""What the benchmarks share: the clock, the machine's speed, the output.

`REFERENCE` holds reference figures of another machine, with one thread, per
CPU second. `scaled_NAME` is such a figure times this machine's matrix product
over that one's; `to_NAME` is the measured rate over it. With more threads
they are rough.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping

MATMUL_GFLOP = 8 * 2 * 1024**3 / 1e9
REFERENCE_GFLOPS = 190  # of the matrix product, per CPU second
REFERENCE = {
  'train_step': {
    'S': {'plain': 6758, 'aim': 7702},
    'M': {'plain': 954, 'aim': 1000},
  },
  'decode': {
    'S': {'plain': 11_515, 'transformers': 4728, 'tunix': 5628},
    'M': {'plain': 1643, 'transformers': 712, 'tunix': 803},
  },
  # Steps per second.
  'grpo': {'S': {'plain': 1 / 0.72, 'trl': 1 / 1.31, 'tunix': 1 / 1.16}},
}


def emit(**fields) -> None:
  print(json.dumps(fields), flush=True)


def rounded(x: float) -> float:
  return float(f'{x:.4g}')


class Clock:
  """Wall and CPU seconds of the repeats of one piece of work."""

  def __init__(self, work: Callable[[], object]):
    self._work, self.wall, self.cpu = work, [], []

  def run(self) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    self._work()
    self.wall.append(time.perf_counter() - wall)
    self.cpu.append(time.process_time() - cpu)

  def forget(self) -> None:
    self.wall, self.cpu = [], []

  def rates(self, amount: float, unit: str) -> dict:
    """Medians, and the spread (max - min) / median, of amount per second."""
    out = {}
    for name, seconds in (('', self.wall), ('cpu_', self.cpu)):
      rate = [amount / s for s in seconds]
      median = statistics.median(rate)
      out[f'{unit}_per_{name}s'] = rounded(median)
      out[f'{name}spread'] = rounded((max(rate) - min(rate)) / median)
    return out


def alternate(clocks: Mapping[str, Clock], repeats: int) -> None:
  """Runs the clocks in turns, once unmeasured, so that they share the noise."""
  for clock in clocks.values():
    clock.run()  # warm
    clock.forget()
  for _ in range(repeats):
    for clock in clocks.values():
      clock.run()


def matmul_clock() -> Clock:
  import jax

  x = jax.random.normal(jax.random.key(0), (1024, 1024))
  matmul = jax.jit(lambda a, b: a @ b)

  def work():
    for _ in range(8):
      matmul(x, x).block_until_ready()

  work()
  return Clock(work)


def scaled(bench: str, shape: str, rate: float, gflops: float) -> dict:
  """The reference figures on this machine, and the measured over them."""
  out = {}
  for name, figure in REFERENCE[bench].get(shape, {}).items():
    here = figure * gflops / REFERENCE_GFLOPS
    out[f'scaled_{name}'] = rounded(here)
    out[f'to_{name}'] = rounded(rate / here)
  return out
