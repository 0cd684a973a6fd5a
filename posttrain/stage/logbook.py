"""The part of a job that writes metrics, answers, errors and profiles.

1. `Logbook` writes the rows of metrics.jsonl and the files of rollouts/; only
   the first process of a run does.
2. `Profiler` traces some steps by jax.profiler. WORKDIR/profiles/STAGE is a log
   directory of TensorBoard (plugin `xprof`); the `*.trace.json.gz` in it opens
   in Perfetto and chrome://tracing. A trace has the programs on the devices,
   jax's calls on the host, and one block per step.
"""

import contextlib
import dataclasses
import logging
import os
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax

from posttrain import compilation, processes, schema
from posttrain.metrics import display, estimates, writers
from posttrain.pipeline import batches
from posttrain.util import disk, watchdog

_MOST = 3  # rewards, and pass rates, that are shown


class Report(Protocol):
  """The trackers and the report of a run that goes on, as `report.page`."""

  def log(self, row: writers.Row) -> None:
    """Sends a row to the trackers."""
    ...

  @property
  def is_due(self) -> bool:
    """Whether it is time to write it again."""
    ...

  def write(self) -> None:
    """Writes the report."""


@dataclasses.dataclass(frozen=True)
class Shared:
  """What the stages of a run write together."""

  seconds: writers.Goodput
  report: Report | None = None  # None = only at the run's end


@dataclasses.dataclass(frozen=True)
class Logbook:
  """Everything that one stage writes beside its checkpoints."""

  stage: str
  workdir: str
  writer: writers.Writer
  shown: display.Display
  clock: watchdog.Timers
  compiling: compilation.CompileCounter
  shared: Shared
  rollouts_every: int | None = None  # steps between files; None = no files

  def write(self, step: int, values: dict[str, Any]) -> None:
    """Writes and shows a row, with the seconds since the last one.

    `memory/*` are GiB: of the first device, and the host's peak.
    `time/programs` counts all programs that the stage has compiled so far;
    `time/compile` lies within the other times, `time/scoring` within
    `time/rollout`.
    """
    if not processes.is_first():
      self.clock.take()
      self.compiling.take()
      return
    times = {f'time/{k}': v for k, v in self.clock.take().items()}
    report = self.shared.report
    if report is not None:  # in every row: when it is due differs
      times.setdefault('time/report', 0.0)
    times['time/compile'] = self.compiling.take()
    times['time/programs'] = self.compiling.count
    speed = None
    if 'batch/tokens' in values:
      speed = values['batch/tokens'] / times['time/update']
      times['time/tokens_per_second'] = speed
    times |= self.shared.seconds.add(times)
    # CPUs have no statistics.
    stats = jax.local_devices()[0].memory_stats() or {}
    used = {f'memory/{k}': n / 2**30 for k, n in stats.items() if 'in_use' in k}
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used['memory/host_peak'] = kilobytes / 2**20
    row = self.writer.write(self.stage, step, {**values, **times, **used})
    if report is not None:
      report.log(row)
    # Few numbers are shown, by short names: rewards, or else the loss; and pass
    # rates, after an evaluation.
    rewards = [x for x in values if x.startswith('rollout/reward/')]
    rates = [
      x
      for x in values
      if x.startswith('eval/pass_rate') and not estimates.is_bound(x, values)
    ]
    names = rewards or [x for x in ('loss/total',) if x in values]
    numbers = {
      x.removesuffix('/total')
      .removeprefix('rollout/')
      .removeprefix('eval/'): values[x]
      for x in (*names[:_MOST], *rates[:_MOST])
    }
    numbers |= {} if speed is None else {'tokens/s': speed}
    self.shown.update(step, numbers, times)
    if report is not None and report.is_due:
      with self.clock('report'):
        report.write()

  def write_errors(
    self, step: int, errors: Sequence[str], what: str = 'errors'
  ) -> None:
    """Writes a step's errors; a repeated step replaces its own file.

    Args:
      step: number of the step.
      errors: one line each.
      what: 'errors', or 'eval_errors' of the evaluation at that step.
    """
    if errors:
      self._write_rows(what, step, ({'error': x} for x in errors))
    elif processes.is_first():
      with contextlib.suppress(FileNotFoundError):
        os.remove(self._rollouts(what, step))

  def write_answers(self, what: str, step: int, answers: Sequence[Any]) -> None:
    """Writes the answers of an evaluation.

    Args:
      what: 'eval' or 'suite'.
      step: number of the step.
      answers: dataclasses, one per line.
    """
    self._write_rows(what, step, map(dataclasses.asdict, answers))

  def write_rollouts(
    self, step: int, played: Mapping[str, batches.Played]
  ) -> None:
    """Writes the rollouts of a training step, where due."""
    every = self.rollouts_every
    if played and every is not None and (step == 1 or step % every == 0):
      self._write_rows('train', step, batches.rows(played))

  def _write_rows(
    self, what: str, step: int, rows: Iterable[dict[str, Any]]
  ) -> None:
    """Writes a file of rows; a repeated step replaces its own."""
    if not processes.is_first():
      return
    with disk.replacing(self._rollouts(what, step)) as f:
      for row in rows:
        f.write(writers.dumps(row) + '\n')

  def bad_batch_path(self, step: int) -> str:
    """Returns the file for a batch whose gradients were not finite."""
    return os.path.join(self.workdir, f'bad_batch_{self.stage}_{step}.npz')

  def close(self) -> None:
    """Closes the files."""
    self.shown.end()
    self.compiling.close()

  def _rollouts(self, what: str, step: int) -> str:
    name = f'{self.stage}_{what}_{step:06d}.jsonl'
    return os.path.join(self.workdir, 'rollouts', name)


def make(
  cfg: schema.Run,
  name: str,
  workdir: str,
  clock: watchdog.Timers,
  compiling: compilation.CompileCounter,
  step: int = 0,
  position: int = 0,
  shared: Shared | None = None,
) -> Logbook:
  """Opens the logbook of a stage; prints where it continues.

  Args:
    cfg: the run's options.
    name: the stage's name.
    workdir: the run's folder.
    clock: the stage's timers.
    compiling: counts the stage's compilations.
    step: the step that the stage continues from.
    position: bytes of metrics.jsonl that are kept.
    shared: what the stages of the run write together; None = a new one.

  Raises:
    ValueError: the kept part of metrics.jsonl is not this run's.
  """
  path = os.path.join(workdir, 'metrics.jsonl')
  writer = writers.Writer(path, position)
  if processes.is_first():
    last = writer.latest.get(name, {}).get('step', step)
    if last > step:
      raise ValueError(
        f'{path} must end at step {step} of stage {name!r}, which continues '
        f'from there: got a row of step {last}; put the file of this run back, '
        'or move it away: the checkpoints do not need it'
      )
    again = 0
    if os.path.exists(path):
      with open(path, 'rb') as f:
        f.seek(position)
        again = f.read().count(b'\n')
    if step or again:
      start = f'continues after step {step}' if step else 'begins anew'
      rows = f'; {again} later rows of {path} are written again'
      print(f'stage {name} {start}{rows if again else ""}', file=sys.stderr)
  shared = shared or Shared(writers.Goodput(path))
  shared.seconds.keep(writers.read_metrics(path, position))
  options = cfg.metrics
  shown = display.Display(
    name,
    step,
    cfg.stages[name].steps,
    options.log_seconds,
    options.progress and processes.is_first(),
  )
  every = options.rollouts_every
  return Logbook(name, workdir, writer, shown, clock, compiling, shared, every)


class Profiler:
  """Traces some steps of a stage; writes the trace after the last of them.

  Python's own calls are not traced: there are too many of them in a rollout.
  """

  def __init__(self, workdir: str, name: str, steps: range):
    """Makes a profiler that has not begun.

    Args:
      workdir: the run's folder.
      name: the stage's name, which is that of its steps in the trace.
      steps: the steps to trace; an empty range = none.
    """
    self._folder = os.path.join(workdir, 'profiles', name)
    self._name, self._steps = name, steps
    self._trace, self._step = contextlib.ExitStack(), contextlib.ExitStack()
    self._traces = False

  def begin(self, step: int) -> None:
    """Ends the step before, and begins a step: with a trace where due."""
    self._step.close()
    if step not in self._steps:
      self.close()
      return
    if not self._traces:
      options = jax.profiler.ProfileOptions()
      options.python_tracer_level = 0
      trace = jax.profiler.trace(self._folder, profiler_options=options)
      self._trace.enter_context(trace)
      self._traces = True
    block = jax.profiler.StepTraceAnnotation(self._name, step_num=step)
    self._step.enter_context(block)

  def close(self) -> None:
    """Ends the trace, if there is one, and writes it."""
    self._step.close()
    self._trace.close()
    self._traces = False


def traced(name: str, steps: range | None, done: int, total: int) -> range:
  """Returns the steps that can still be traced; warns if others were meant.

  Args:
    name: the stage's name.
    steps: the steps to trace; None = none.
    done: the last step that is trained already.
    total: the last step of the stage.
  """
  if steps is None:
    return range(0)
  left = range(max(steps[0], done + 1), min(steps[-1], total) + 1)
  if left != steps:
    logging.getLogger('absl').warning(
      '--profile=%d:%d: stage %s has steps %d to %d left, so %s traced',
      steps[0],
      steps[-1],
      name,
      done + 1,
      total,
      f'steps {left[0]} to {left[-1]} are' if left else 'no step is',
    )
  return left
