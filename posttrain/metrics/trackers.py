"""Trackers: the rows of metrics.jsonl, in other tools as well.

    with trackers.use(('wandb',), stages, config, workdir):
      trackers.log(row)

metrics.jsonl is the primary record; a tracker gets a copy of its numbers.

1. A tracker's step grows over all stages: it is the stage's own step plus an
   offset, the steps of the stages before it, plus one for each of them, because
   a stage begins with an evaluation at its step 0.
2. WORKDIR/trackers.json holds the run's name, made at its first start, the
   trackers that have begun, and the offsets. A later start continues the
   tracker's run of this name, and a stage keeps its offset, even if the stages
   before it are given more steps. If their new rows would have steps that a
   later stage has already used (it was begun, and begins again), they follow
   the last step of all, and the later stage follows them: a tracker keeps the
   rows of both its trainings.
3. No step is logged twice. A tracker that continues names its last step, and
   first gets the later rows of metrics.jsonl, which were not sent when the
   process was killed. If a tracker does not report its last step, the
   rows that are in metrics.jsonl at a start count as logged.
4. A tracker that is new to the workdir gets all rows of metrics.jsonl first.
5. A tracker that raises is warned about once, and never stops the run; it gets
   the next rows nevertheless, unless it failed to start. The output of
   trackers goes to stderr.
"""

import contextlib
import dataclasses
import importlib.util
import json
import logging
import math
import os
import re
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from posttrain.metrics import writers
from posttrain.util import files, foreign, imports, json_files

FILE = 'trackers.json'
KEY = 'config.metrics.trackers'
PROJECT = 'posttrain'  # name for W&B (but WANDB_PROJECT) and trackio


class Tracker(Protocol):
  """A tool that keeps the metrics of runs."""

  def start(
    self, name: str, config: dict[str, Any], workdir: str
  ) -> int | None:
    """Begins a run, or continues the run of this name.

    Args:
      name: the run's name, unique, the same at every start of the run.
      config: the run's options, as in config.json.
      workdir: the run's folder.

    Returns:
      The last step that the tracker holds of the run, -1 without any; None if
      it cannot say.
    """
    ...

  def log(self, step: int, values: dict[str, float]) -> None:
    """Logs numbers by name; the steps of a run grow."""
    ...

  def finish(self) -> None:
    """Ends this start of the run; another may continue it."""
    ...


class TensorBoard:
  """Event files in WORKDIR/tensorboard."""

  def start(self, name: str, config: dict[str, Any], workdir: str) -> None:
    import tensorboardX

    del name, config  # the folder is the run's own
    folder = os.path.join(workdir, 'tensorboard')
    # Names of files differ in whole seconds only.
    suffix = f'.{uuid.uuid4().hex[:8]}'
    self._events = tensorboardX.SummaryWriter(folder, filename_suffix=suffix)

  def log(self, step: int, values: dict[str, float]) -> None:
    for name, value in values.items():
      self._events.add_scalar(name, value, step)
    self._events.flush()

  def finish(self) -> None:
    self._events.close()


class Wandb:
  """W&B, configured by its variables (WANDB_MODE, WANDB_PROJECT, ...)."""

  def start(
    self, name: str, config: dict[str, Any], workdir: str
  ) -> int | None:
    import wandb

    self._run = wandb.init(
      project=os.environ.get('WANDB_PROJECT', PROJECT),
      id=name,
      name=name,
      resume='allow',
      config=config,
      dir=workdir,
      settings=wandb.Settings(console='off', quiet=True),
    )
    # Offline no run is resumed: each start has a file, which `wandb sync` adds.
    return self._run.starting_step - 1 if self._run.resumed else None

  def log(self, step: int, values: dict[str, float]) -> None:
    self._run.log(values, step=step)

  def finish(self) -> None:
    self._run.finish()


class Trackio:
  """Trackio, in its local folder, or by its variables."""

  def start(
    self, name: str, config: dict[str, Any], workdir: str
  ) -> int | None:
    import trackio

    del workdir
    self._trackio = trackio
    run = trackio.init(
      project=PROJECT, name=name, resume='allow', config=config, embed=False
    )
    after = getattr(run, '_next_step', None)  # no public name has it
    return None if after is None else after - 1

  def log(self, step: int, values: dict[str, float]) -> None:
    self._trackio.log(values, step=step)

  def finish(self) -> None:
    # That of the run alone would be repeated, on stdout, as the process ends.
    self._trackio.finish()


# Name -> its package, its class.
ADAPTERS = {
  'tensorboard': ('tensorboardX', TensorBoard),
  'wandb': ('wandb', Wandb),
  'trackio': ('trackio', Trackio),
}


def check(names: Sequence[str]) -> None:
  """Checks that each tracker can be imported.

  Raises:
    ValueError: a package is missing, or a path names no class.
  """
  for name in names:
    if name not in ADAPTERS:
      imports.function(name, KEY)
      continue
    package = ADAPTERS[name][0]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a folder may have its name
      raise ValueError(
        f'{KEY} must name installed packages: got {name!r} without {package}; '
        f"run pip install 'posttrain[{name}]', or leave it out"
      )


@dataclasses.dataclass(frozen=True)
class _Span:
  """The rows of a stage from a step on: a tracker's step is theirs + offset."""

  stage: str
  first: int  # the stage's step
  offset: int


class _Trackers:
  """The trackers of a run under way."""

  def __init__(
    self,
    names: Sequence[str],
    stages: Mapping[str, int],
    config: dict[str, Any],
    workdir: str,
  ):
    """Starts the trackers; see `use`."""
    self._offsets, offset = {}, 0  # offsets of a new run
    for stage, steps in stages.items():
      self._offsets[stage] = offset
      offset += steps + 1
    self._path = os.path.join(workdir, FILE)
    self._name, self._begun, self._spans = _read(workdir)
    self._next = 0  # above all steps that were used
    rows = writers.read_metrics(os.path.join(workdir, 'metrics.jsonl'))
    written = max(map(self._step, rows), default=-1)
    self._last: dict[str, int] = {}  # the step that a tracker has
    self._failed: set[str] = set()
    self._active: dict[str, Tracker] = {}
    for name in names:
      with self._tolerant(name):
        tracker = _class(name)()
        last = tracker.start(self._name, config, workdir)
        if name not in self._begun:
          last = -1
        self._last[name] = written if last is None else last
        self._next = max(self._next, self._last[name] + 1)
        self._active[name] = tracker
    self._begun = list(dict.fromkeys([*self._begun, *self._active]))
    self._write()
    for row in rows:
      self.log(row)

  def log(self, row: writers.Row) -> None:
    """Logs a row to the trackers that do not have its step."""
    step = self._step(row)
    for name, tracker in self._active.items():
      if step > self._last[name]:
        self._last[name] = step
        with self._tolerant(name):
          tracker.log(step, _numbers(row))

  def finish(self) -> None:
    """Ends all trackers."""
    for name, tracker in self._active.items():
      with self._tolerant(name):
        tracker.finish()

  def _step(self, row: writers.Row) -> int:
    """Returns the step of a row over all stages; -1 of one that is gone."""
    if row['stage'] not in self._offsets:
      return -1
    span = self._span(row) or self._begin_span(row)
    step = span.offset + row['step']
    self._next = max(self._next, step + 1)
    return step

  def _span(self, row: writers.Row) -> _Span | None:
    """Returns the span of a row; None if later ones have its step."""
    end = math.inf
    for span in reversed(self._spans):  # their steps grow
      if span.stage == row['stage'] and span.first <= row['step']:
        return span if span.offset + row['step'] < end else None
      end = span.offset + span.first
    return None

  def _begin_span(self, row: writers.Row) -> _Span:
    """Adds a span that begins with a row; later stages begin again."""
    stage, step = row['stage'], row['step']
    stages = list(self._offsets)
    later = stages[stages.index(stage) + 1 :]
    self._spans = [span for span in self._spans if span.stage not in later]
    offset = max(self._offsets[stage], self._next - step)
    self._spans.append(_Span(stage, step, offset))
    self._write()
    return self._spans[-1]

  def _write(self) -> None:
    """Writes trackers.json."""
    values = {
      'run': self._name,
      'trackers': self._begun,
      'offsets': [dataclasses.astuple(span) for span in self._spans],
    }
    with files.replacing(self._path) as f:
      json.dump(values, f)

  @contextlib.contextmanager
  def _tolerant(self, name: str) -> Iterator[None]:
    """Warns once of a tracker that raises in the block."""
    try:
      with contextlib.redirect_stdout(sys.stderr):
        yield
    except (Exception, SystemExit) as error:
      if name not in self._failed:
        logging.getLogger('absl').warning(
          'tracker %s failed, and the run goes on: %s; metrics.jsonl has all '
          'rows',
          name,
          foreign.error(error),
        )
      self._failed.add(name)


_current: _Trackers | None = None


@contextlib.contextmanager
def use(
  names: Sequence[str],
  stages: Mapping[str, int],
  config: dict[str, Any],
  workdir: str,
) -> Iterator[None]:
  """Starts trackers, and finishes them at the end of the block.

  Args:
    names: keys of `ADAPTERS`, or import paths 'package.module:Class'.
    stages: name -> number of steps, in order.
    config: the run's options, as in config.json.
    workdir: the run's folder, locked by this process.
  """
  global _current
  if not names:
    yield
    return
  _current = _Trackers(names, stages, config, workdir)
  try:
    yield
  finally:
    trackers, _current = _current, None
    trackers.finish()


def log(row: writers.Row) -> None:
  """Logs a row that was written to metrics.jsonl; nothing outside of `use`."""
  if _current is not None:
    _current.log(row)


def _class(name: str) -> Any:
  """Returns the class of a tracker."""
  if name in ADAPTERS:
    return ADAPTERS[name][1]
  return imports.function(name, KEY)


def _numbers(row: writers.Row) -> dict[str, float]:
  return {
    name: value
    for name, value in row.items()
    if name != 'step' and isinstance(value, int | float)
  }


def _read(workdir: str) -> tuple[str, list[str], list[_Span]]:
  """Returns the run's name, the trackers that have begun, and the offsets."""
  path = os.path.join(workdir, FILE)
  with contextlib.suppress(ValueError, KeyError, TypeError):
    values = json_files.read_object(path)
    spans = [
      _Span(str(stage), int(first), int(offset))
      for stage, first, offset in values.get('offsets', ())  # of older runs: ()
    ]
    return _plain(values['run']), [str(x) for x in values['trackers']], spans
  folder = os.path.basename(os.path.abspath(workdir))
  return _plain(f'{folder}-{uuid.uuid4().hex[:8]}'), [], []


def _plain(name: str) -> str:
  """Returns a name of signs that every tracker takes."""
  return re.sub(r'[^A-Za-z0-9_.-]+', '-', name)
