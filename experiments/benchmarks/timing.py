"""Clock, machine speed and output of the benchmarks."""

import argparse
import contextlib
import json
import multiprocessing
import os
import pathlib
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

MATMUL_GFLOP = 8 * 2 * 1024**3 / 1e9
_FORK = multiprocessing.get_context('fork')


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


Figures = dict[str, float]
# Does the work; may return a function that counts what it did, which is called
# once the clock has stopped.
Work = Callable[[], Any]


def measure(work: Work) -> Figures:
  """Does the work once; returns `wall` and `cpu` seconds and what it counts."""
  wall, cpu = time.perf_counter(), time.process_time()
  count = work()
  spent = {'wall': time.perf_counter() - wall, 'cpu': time.process_time() - cpu}
  return spent | (count() if callable(count) else {})


def apart(make: Callable[[], Work], folder: str = '') -> Work:
  """Returns a work that is made and done in a process of its own.

  So its memory is its own, and its buffers are not those that other works have
  freed. Must be called before jax has a client.

  Args:
    make: builds the work; imports posttrain there.
    folder: another checkout, whose posttrain is measured; '' = this one's.
  """
  ours, theirs = multiprocessing.Pipe()

  def serve():
    ours.close()
    if folder:
      for name in [*sys.modules]:
        if name.partition('.')[0] in ('posttrain', 'kernels', 'configs'):
          del sys.modules[name]
      sys.path.insert(0, folder)
    work = make()
    with contextlib.suppress(EOFError):  # the caller has ended
      while True:
        theirs.recv()
        figures = measure(work)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        theirs.send(figures | {'peak_mib': peak})

  _FORK.Process(target=serve, daemon=True).start()
  theirs.close()

  def work():
    ours.send(None)
    figures = ours.recv()
    return lambda: figures

  return work


def cpu_seconds(process: int) -> float:
  """Returns the CPU seconds of a process since its start."""
  stat = pathlib.Path(f'/proc/{process}/stat').read_text()
  user, system = stat.rpartition(')')[2].split()[11:13]
  return (int(user) + int(system)) / os.sysconf('SC_CLK_TCK')


class Clock:
  """Figures of repeated work."""

  def __init__(self, work: Work):
    self._work, self.rows = work, []

  def run(self) -> None:
    """Does the work once and measures it."""
    self.rows.append(measure(self._work))

  def forget(self) -> None:
    """Drops all measurements."""
    self.rows = []

  def median(self, name: str) -> float:
    """Returns the median of a figure."""
    return statistics.median(row[name] for row in self.rows)

  @property
  def wall(self) -> list[float]:
    """Wall seconds of each run."""
    return [row['wall'] for row in self.rows]

  @property
  def cpu(self) -> list[float]:
    """CPU seconds of each run."""
    return [row['cpu'] for row in self.rows]

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


def matmul() -> Work:
  """Returns eight matrix products of 1024 x 1024 by XLA."""
  import jax

  x = jax.random.normal(jax.random.key(0), (1024, 1024))
  product = jax.jit(lambda a, b: a @ b)

  def work():
    for _ in range(8):
      product(x, x).block_until_ready()

  return work


def emit_box() -> None:
  """Prints where the rows that follow are measured, and what runs beside."""

  def show():  # apart: it imports jax
    from posttrain import machine

    with open('/proc/cpuinfo') as file:
      names = [x.partition(':')[2] for x in file if x.startswith('model name')]
    emit(
      bench='box',
      time=time.strftime('%Y-%m-%d %H:%M', time.gmtime()),
      cpu=names[0].strip(),
      cores=len(os.sched_getaffinity(0)),
      load=rounded(os.getloadavg()[0]),  # 0 = nothing else runs
      versions=machine.versions(*machine.VERSIONS, 'torch', 'trl'),
    )

  process = _FORK.Process(target=show)
  process.start()
  process.join()


def emit_matmul(clock: Clock, bench: str, threads: int | None = None) -> None:
  """Prints the machine's rate, beside which other rows are to be read.

  Args:
    clock: of eight products of 1024 x 1024, which has run.
    bench: the name of the row.
    threads: of the run, None = all.
  """
  rates = clock.rates(MATMUL_GFLOP, 'gflop')
  emit(bench=bench, threads=threads, **rates)


def compare(
  args,
  works: Mapping[str, Callable[[], Work]],
  amount: float,
  unit: str,
  folders: Mapping[str, str] | None = None,
  **fields,
) -> dict[str, Clock]:
  """Runs works in turns; prints a row for each, and of the matrix product.

  A row has the CPU seconds of a call, and `of_matmul`, the share of the matrix
  product's rate, by `gflop` that the model's needed tokens cost; beside them
  whatever the work counts, and its peak memory.

  Args:
    args: has the bench's name, shape, threads and repeats.
    works: name -> a function that builds the work.
    amount: what one call of a work does.
    unit: the unit of it.
    folders: name -> the checkout of a work in a process of its own, see
      `apart`; None = all works run in this process.
    **fields: further fields of every row.

  Returns:
    The clocks by name.
  """
  clocks, first = {}, {}
  for name, make in {'matmul': matmul, **works}.items():
    begin = time.perf_counter()
    work = make() if folders is None else apart(make, folders.get(name, ''))
    work()  # compiles
    first[name] = rounded(time.perf_counter() - begin)
    clocks[name] = Clock(work)
  # The turn that is dropped compiles once more, for arrays of the first call.
  alternate(clocks, args.repeats)
  if folders is not None:
    for process in multiprocessing.active_children():
      process.terminate()
  emit_matmul(clocks['matmul'], 'matmul', args.threads)
  rate = MATMUL_GFLOP / clocks['matmul'].median('cpu')
  for name in works:
    clock = clocks[name]
    counted = {
      key: x if isinstance(x := clock.median(key), int) else rounded(x)
      for key in clock.rows[0]
      if key not in ('wall', 'cpu')
    }
    if 'gflop' in counted:
      share = clock.median('gflop') / clock.median('cpu') / rate
      counted['of_matmul'] = rounded(share)
    emit(
      bench=args.bench,
      impl=name,
      shape=args.shape,
      threads=args.threads,
      **clock.rates(amount, unit),
      cpu_seconds=rounded(clock.median('cpu')),
      first_s=first[name],
      **counted,
      **fields,
    )
  return clocks
