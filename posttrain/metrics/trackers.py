"""Trackers: the rows of metrics.jsonl, in other tools as well.

    with trackers.use(('wandb',), stages, config, workdir):
      trackers.log(row)

metrics.jsonl is the primary record; a tracker gets a copy of its numbers.

1. A tracker's step grows over all stages: it is the stage's own step plus the
   steps of the stages before it, plus one for each of them, because a stage
   begins with an evaluation at its step 0.
2. WORKDIR/trackers.json holds the run's name, made at its first start, and the
   trackers that have begun. A later start continues the tracker's run of this
   name.
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
import importlib.util
import json
import logging
import os
import re
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from posttrain.metrics import writers
from posttrain.util import disk, errors, imports

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
    self._offsets, offset = {}, 0
    for stage, steps in stages.items():
      self._offsets[stage] = offset
      offset += steps + 1
    run, begun = _read(workdir)
    rows = writers.read_metrics(os.path.join(workdir, 'metrics.jsonl'))
    written = max(map(self._step, rows), default=-1)
    self._last: dict[str, int] = {}  # the step that a tracker has
    self._failed: set[str] = set()
    self._active: dict[str, Tracker] = {}
    for name in names:
      with self._tolerant(name):
        tracker = _class(name)()
        last = tracker.start(run, config, workdir)
        if name not in begun:
          last = -1
        self._last[name] = written if last is None else last
        self._active[name] = tracker
    begun = list(dict.fromkeys([*begun, *self._active]))
    with disk.replacing(os.path.join(workdir, FILE)) as f:
      json.dump({'run': run, 'trackers': begun}, f)
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
    offset = self._offsets.get(row['stage'])
    return -1 if offset is None else offset + row['step']

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
          errors.describe(error),
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


def _read(workdir: str) -> tuple[str, list[str]]:
  """Returns the run's name, and the trackers that have begun."""
  path = os.path.join(workdir, FILE)
  if os.path.exists(path):
    values = disk.read_json_object(path)
    return values['run'], values['trackers']
  folder = os.path.basename(os.path.abspath(workdir))
  # Signs that every tracker takes.
  folder = re.sub(r'[^A-Za-z0-9_.-]+', '-', folder)
  return f'{folder}-{uuid.uuid4().hex[:8]}', []
