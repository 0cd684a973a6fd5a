"""Trackers: the rows of metrics.jsonl, in other tools as well.

    sent = trackers.Trackers(('wandb',), stages)
    sent.start(config, workdir)
    sent.log(row)
    sent.finish()

metrics.jsonl is the primary record; a tracker gets a copy of its numbers. It is
an object with three methods:

    start(name, config, workdir)  # begins, or continues, the run of this name,
                                  # which is unique; config as in config.json
    log(step, values)             # numbers by name; the steps of a run grow
    finish()                      # ends this start; another may continue it

1. A tracker's step grows over all stages: it is the stage's own step plus the
   steps of the stages before it, plus one for each of them, because a stage
   begins with an evaluation at its step 0.
2. WORKDIR/trackers.json holds the run's name, made at its first start, and the
   trackers that have begun. A later start continues the tracker's run of this
   name.
3. No step is logged twice: the rows that are in metrics.jsonl at a start count
   as logged. A tracker that is new to the workdir gets them first.
4. A tracker that raises is warned about once, and never stops the run; it gets
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
from typing import Any

from posttrain.metrics import writers
from posttrain.util import disk, errors, imports

FILE = 'trackers.json'
KEY = 'config.metrics.trackers'
PROJECT = 'posttrain'  # name for W&B (but WANDB_PROJECT) and trackio


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

  def start(self, name: str, config: dict[str, Any], workdir: str) -> None:
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

  def log(self, step: int, values: dict[str, float]) -> None:
    self._run.log(values, step=step)

  def finish(self) -> None:
    self._run.finish()


class Trackio:
  """Trackio, in its local folder, or by its variables."""

  def start(self, name: str, config: dict[str, Any], workdir: str) -> None:
    import trackio

    del workdir
    self._trackio = trackio
    trackio.init(
      project=PROJECT, name=name, resume='allow', config=config, embed=False
    )

  def log(self, step: int, values: dict[str, float]) -> None:
    self._trackio.log(values, step=step)

  def finish(self) -> None:
    # That of the run alone would be repeated, on stdout, as the process ends.
    self._trackio.finish()


ADAPTERS = {'tensorboard': TensorBoard, 'wandb': Wandb, 'trackio': Trackio}


def check(names: Sequence[str]) -> None:
  """Checks that each tracker can be imported.

  Raises:
    ValueError: a package is missing, or a path names no class.
  """
  for name in names:
    if name not in ADAPTERS:
      imports.function(name, KEY)
      continue
    package = 'tensorboardX' if name == 'tensorboard' else name
    if importlib.util.find_spec(package) is None:
      raise ValueError(
        f'{KEY} must name installed packages: got {name!r}; '
        f"run pip install 'posttrain[{name}]', or leave it out"
      )


class Trackers:
  """The trackers of a run; without a name it does nothing."""

  def __init__(self, names: Sequence[str], stages: Mapping[str, int]):
    """Starts nothing yet.

    Args:
      names: keys of `ADAPTERS`, or import paths 'package.module:Class'.
      stages: name -> number of steps, in order.
    """
    self._names = names
    self._offsets, offset = {}, 0
    for stage, steps in stages.items():
      self._offsets[stage] = offset
      offset += steps + 1
    self._last = -1  # the step that all have
    self._active: dict[str, Any] = {}
    self._failed: set[str] = set()

  def start(self, config: dict[str, Any], workdir: str) -> None:
    """Starts the trackers.

    Args:
      config: the run's options, as in config.json.
      workdir: the run's folder, locked by this process.
    """
    if not self._names:
      return
    path = os.path.join(workdir, FILE)
    if os.path.exists(path):
      stored = disk.read_json_object(path)
    else:
      folder = os.path.basename(os.path.abspath(workdir))
      # Signs that every tracker takes.
      folder = re.sub(r'[^A-Za-z0-9_.-]+', '-', folder)
      stored = {'run': f'{folder}-{uuid.uuid4().hex[:8]}', 'trackers': []}
    begun = stored['trackers']
    rows = writers.read_metrics(os.path.join(workdir, 'metrics.jsonl'))
    for name in self._names:
      with self._tolerant(name):
        tracker = (ADAPTERS.get(name) or imports.function(name, KEY))()
        tracker.start(stored['run'], config, workdir)
        self._active[name] = tracker
        for row in rows if name not in begun else ():
          tracker.log(*self._numbers(row))
    self._last = max((self._numbers(row)[0] for row in rows), default=-1)
    stored['trackers'] = sorted({*begun, *self._active})
    with disk.replacing(path) as f:
      json.dump(stored, f)

  def log(self, row: writers.Row) -> None:
    """Logs a row that was written to metrics.jsonl, unless it repeats one."""
    step, numbers = self._numbers(row)
    if step > self._last:
      self._last = step
      for name, tracker in self._active.items():
        with self._tolerant(name):
          tracker.log(step, numbers)

  def finish(self) -> None:
    """Ends all trackers."""
    for name, tracker in self._active.items():
      with self._tolerant(name):
        tracker.finish()

  def _numbers(self, row: writers.Row) -> tuple[int, dict[str, float]]:
    """Returns the step of a row over all stages, and its numbers."""
    return self._offsets[row['stage']] + row['step'], {
      name: value
      for name, value in row.items()
      if name != 'step' and isinstance(value, int | float)
    }

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
