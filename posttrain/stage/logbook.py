"""The part of a job that writes metrics, answers and errors.

Only the first process of a run writes them.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from posttrain import compilation, processes, schema
from posttrain.metrics import display, estimates, writers
from posttrain.pipeline import rollout_rows
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
class Logbook:
  """Everything that one stage writes beside its checkpoints."""

  stage: str
  workdir: str
  writer: writers.Writer
  shown: display.Display
  clock: watchdog.Timers
  compiling: compilation.CompileCounter
  goodput: writers.Goodput
  rollouts_every: int | None = None  # steps between files; None = no files
  report: Report | None = None  # None = only at the run's end

  def write(self, step: int, values: dict[str, Any]) -> None:
    """Writes and shows a row, with the seconds since the last one.

    `time/programs` counts all programs that the stage has compiled so far;
    `time/compile` lies within the other times, `time/scoring` within
    `time/rollout`.
    """
    if not processes.is_first():
      self.clock.take()
      self.compiling.take()
      return
    times = {f'time/{k}': v for k, v in self.clock.take().items()}
    if self.report is not None:  # in every row: when it is due differs
      times.setdefault('time/report', 0.0)
    times['time/compile'] = self.compiling.take()
    times['time/programs'] = self.compiling.count
    speed = None
    if 'batch/tokens' in values:
      speed = values['batch/tokens'] / times['time/update']
      times['time/tokens_per_second'] = speed
    times |= self.goodput.add(times)
    row = self.writer.write(self.stage, step, {**values, **times})
    if self.report is not None:
      self.report.log(row)
    numbers = _shown(values)
    numbers |= {} if speed is None else {'tokens/s': speed}
    self.shown.update(step, numbers, times)
    if self.report is not None and self.report.is_due:
      with self.clock('report'):
        self.report.write()

  def write_errors(
    self, step: int, errors: Sequence[str], what: str = 'errors'
  ) -> None:
    """Writes a step's errors; a repeated step replaces its own file.

    Args:
      step: number of the step.
      errors: one line each.
      what: 'errors', or 'eval_errors' of the evaluation at that step.
    """
    if not processes.is_first():
      return
    path = self._rollouts(what, step)
    if not errors:
      with contextlib.suppress(FileNotFoundError):
        os.remove(path)
      return
    with disk.replacing(path) as f:
      for error in errors:
        f.write(json.dumps({'error': error}) + '\n')

  def write_answers(self, what: str, step: int, answers: Sequence[Any]) -> None:
    """Writes the answers of an evaluation.

    Args:
      what: 'eval' or 'suite'.
      step: number of the step.
      answers: dataclasses, one per line.
    """
    self._write_rows(what, step, map(dataclasses.asdict, answers))

  def write_rollouts(
    self, step: int, played: Mapping[str, rollout_rows.Played]
  ) -> None:
    """Writes the rollouts of a training step, where due."""
    every = self.rollouts_every
    if played and every is not None and (step == 1 or step % every == 0):
      self._write_rows('train', step, rollout_rows.rows(played))

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
    self.writer.close()
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
  goodput: writers.Goodput | None = None,
  report: Report | None = None,
) -> Logbook:
  """Opens the logbook of a stage.

  Args:
    cfg: the run's options.
    name: the stage's name.
    workdir: the run's folder.
    clock: the stage's timers.
    compiling: counts the stage's compilations.
    step: the step that the stage continues from.
    position: bytes of metrics.jsonl that are kept.
    goodput: the run's; None = a new one.
    report: writes the report of the run while it goes on; None = no report.

  Raises:
    ValueError: the kept part of metrics.jsonl is not this run's.
  """
  path = os.path.join(workdir, 'metrics.jsonl')
  writer = writers.Writer(path, position)
  last = writer.latest.get(name, {}).get('step', step)
  if last > step and processes.is_first():
    raise ValueError(
      f'{path} must end at step {step} of stage {name!r}, which continues from '
      f'there: got a row of step {last}; put the file of this run back, '
      'or move it away: the checkpoints do not need it'
    )
  if processes.is_first():
    _announce(name, step, path, position)
  goodput = goodput or writers.Goodput(path)
  goodput.keep(writers.read_metrics(path, position))
  stage, shown = cfg.stages[name], display.current()
  shown.begin(name, step, stage.steps)
  return Logbook(
    name,
    workdir,
    writer,
    shown,
    clock,
    compiling,
    goodput,
    cfg.metrics.rollouts_every,
    report,
  )


def _shown(values: Mapping[str, Any]) -> dict[str, float]:
  """Returns the few numbers of a step that are shown, by short names.

  Rewards, or else the loss; and pass rates, after an evaluation.
  """
  rewards = [x for x in values if x.startswith('rollout/reward')]
  rates = [
    x
    for x in values
    if x.startswith('eval/pass_rate') and not estimates.is_bound(x, values)
  ]
  names = rewards or [x for x in ('loss/total',) if x in values]
  return {
    x.removesuffix('/total')
    .removeprefix('rollout/')
    .removeprefix('eval/'): values[x]
    for x in (*names[:_MOST], *rates[:_MOST])
  }


def _announce(name: str, step: int, path: str, position: int) -> None:
  """Prints where a stage continues, and how many rows it writes again."""
  again = 0
  if os.path.exists(path):
    with open(path, 'rb') as f:
      f.seek(position)
      again = f.read().count(b'\n')
  if not (step or again):
    return
  start = f'continues after step {step}' if step else 'begins anew'
  rows = f'; {again} later rows of {path} are written again' if again else ''
  print(f'stage {name} {start}{rows}', file=sys.stderr)
