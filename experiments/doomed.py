"""A run that kills itself in a given phase; `kill_resume` starts it.

    python -m experiments.doomed OPTIONS ARGUMENT...

OPTIONS is a JSON object, see `Watch`; the arguments are those of
`posttrain.main`, whose code has no part in this.
"""

import collections
import json
import os
import signal
import sys
import threading

import jax

from posttrain import main
from posttrain.checkpoints import store
from posttrain.decode import engine
from posttrain.evaluation import evaluator
from posttrain.rollout import driver
from posttrain.training import step as train_step


class Watch:
  """Counts entries into phases; kills its process in one of them."""

  def __init__(self, report: str, phase='', entry=0, delay=0.0):
    """Plans the kill.

    Args:
      report: path of a JSON file: at the end, the number of entries into each
        phase; at a kill, a list with the phase that was running.
      phase: the phase to be killed in; '' = none.
      entry: the entry into it before the kill, from 1.
      delay: seconds between that entry and the SIGKILL.
    """
    self.entries = collections.Counter()
    self._report = report
    self._planned, self._delay = (phase, entry), delay
    self._inside = []

  def wrap(self, phase: str, owner: type, name: str, counts=True) -> None:
    """Makes `owner.name` a phase; within another phase it is a part of it."""
    wrapped = getattr(owner, name)

    def watched(*args, **kwargs):
      self._inside.append(phase)
      if counts and self._inside[0] == phase:
        self._enter(phase)
      try:
        # Dispatched device work belongs to the phase, too.
        return jax.block_until_ready(wrapped(*args, **kwargs))
      finally:
        self._inside.pop()

    setattr(owner, name, watched)

  def write_report(self, value) -> None:
    """Writes the report."""
    with open(self._report, 'w') as f:
      json.dump(value, f)

  def _enter(self, phase: str) -> None:
    self.entries[phase] += 1
    if (phase, self.entries[phase]) == self._planned:
      threading.Timer(self._delay, self._kill).start()

  def _kill(self) -> None:
    self.write_report(self._inside[:1])
    os.kill(os.getpid(), signal.SIGKILL)


def run(options: str, *argv: str) -> int:
  """Runs `posttrain.main` under a watch; returns its exit code."""
  watch = Watch(**json.loads(options))
  watch.wrap('eval', evaluator.Evaluator, '__call__')
  watch.wrap('rollout', driver.Driver, 'run', counts=False)
  watch.wrap('rollout', engine.Engine, 'poll')  # once per chunk and stop
  watch.wrap('update', train_step.TrainStep, '__call__')
  watch.wrap('save', store.Checkpointer, 'save')
  code = main.main(argv)
  watch.write_report(watch.entries)
  return code


if __name__ == '__main__':
  sys.exit(run(*sys.argv[1:]))
