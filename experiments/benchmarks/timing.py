"""Clock, machine speed and output of the benchmarks."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping

MATMUL_GFLOP = 8 * 2 * 1024**3 / 1e9


def parser(doc: str, **defaults) -> argparse.ArgumentParser:
  """Returns a parser with a flag per default, and of its type."""
  result = argparse.ArgumentParser(description=doc.splitlines()[0])
  for name, default in defaults.items():
    result.add_argument(f'--{name}', type=type(default), default=default)
  return result


def set_threads(count: int | None) -> None:
  """Sets the number of threads, None = all; call before jax has a client.

  Freed memory is kept, as in `posttrain.main`.
  """
  if count:
    os.environ['NPROC'] = str(count)
    if count == 1:
      flag = '--xla_cpu_multi_thread_eigen=false'
      os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flag}'
  from posttrain.util import memory

  memory.keep_freed_memory()


def emit(**fields) -> None:
  """Prints a row as JSON."""
  print(json.dumps(fields), flush=True)


def rounded(x: float) -> float:
  """Returns x with four significant digits."""
  return float(f'{x:.4g}')


class Clock:
  """Wall and CPU seconds of repeated work."""

  def __init__(self, work: Callable[[], object]):
    self._work, self.wall, self.cpu = work, [], []

  def run(self) -> None:
    """Does the work once and measures it."""
    wall, cpu = time.perf_counter(), time.process_time()
    self._work()
    self.wall.append(time.perf_counter() - wall)
    self.cpu.append(time.process_time() - cpu)

  def forget(self) -> None:
    """Drops all measurements."""
    self.wall, self.cpu = [], []

  @property
  def median_cpu(self) -> float:
    """Returns the median of CPU seconds."""
    return statistics.median(self.cpu)

  def rates(self, amount: float, unit: str) -> dict:
    """Returns median and spread, (max - min) / median, of amount per second."""
    out = {}
    for name, seconds in (('', self.wall), ('cpu_', self.cpu)):
      rate = [amount / s for s in seconds]
      median = statistics.median(rate)
      out[f'{unit}_per_{name}s'] = rounded(median)
      out[f'{name}spread'] = rounded((max(rate) - min(rate)) / median)
    return out


def alternate(clocks: Mapping[str, Clock], repeats: int) -> None:
  """Runs the clocks in turns, under the same noise; drops the first turn."""
  for clock in clocks.values():
    clock.run()  # warm
    clock.forget()
  for _ in range(repeats):
    for clock in clocks.values():
      clock.run()


def matmul_clock() -> Clock:
  """Returns the clock of eight matrix products of 1024 x 1024."""
  import jax

  x = jax.random.normal(jax.random.key(0), (1024, 1024))
  matmul = jax.jit(lambda a, b: a @ b)

  def work():
    for _ in range(8):
      matmul(x, x).block_until_ready()

  work()
  return Clock(work)


def emit_matmul(clock: Clock, bench: str, threads: int | None = None) -> None:
  """Prints the machine's rate, beside which other rows are to be read.

  Args:
    clock: of eight products of 1024 x 1024; runs five times if it has not.
    bench: the name of the row.
    threads: of the run, None = all.
  """
  if not clock.cpu:
    alternate({bench: clock}, 5)
  rates = clock.rates(MATMUL_GFLOP, 'gflop')
  emit(bench=bench, threads=threads, **rates)


def compare(
  args, works: dict, amount: float, unit: str, **fields
) -> dict[str, Clock]:
  """Runs works in turns; prints a row for each, and of the matrix product.

  Args:
    args: has the bench's name, shape, threads and repeats.
    works: name -> a function that builds the work.
    amount: what one call of a work does.
    unit: the unit of it.
    **fields: further fields of every row.

  Returns:
    The clocks by name.
  """
  clocks, first = {'matmul': matmul_clock()}, {}
  for name, make in works.items():
    begin = time.perf_counter()
    work = make()
    work()  # compiles
    first[name] = rounded(time.perf_counter() - begin)
    work()  # compiles once more, for arrays of the first call
    clocks[name] = Clock(work)
  alternate(clocks, args.repeats)
  emit_matmul(clocks['matmul'], 'matmul', args.threads)
  for name in works:
    emit(
      bench=args.bench,
      impl=name,
      shape=args.shape,
      threads=args.threads,
      **clocks[name].rates(amount, unit),
      cpu_seconds=rounded(clocks[name].median_cpu),
      first_s=first[name],
      **fields,
    )
  return clocks
