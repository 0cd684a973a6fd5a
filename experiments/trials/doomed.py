"""A run with a fault in a given phase, aimed by its name.

    python -m experiments.trials.doomed OPTIONS ARGUMENT...

OPTIONS is a JSON object, see `Watch`; the arguments are those of
`posttrain.main`, whose code has no part in this. The phases are compile,
rollout, update, save and eval.
"""

import collections
import errno
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import jax
from jax._src import compiler

from posttrain import main
from posttrain.checkpoints import store
from posttrain.decode import engine
from posttrain.evaluation import evaluator
from posttrain.rollout import driver
from posttrain.training import step as train_step


class Watch:
  """Counts entries into phases; injects a fault into one of them."""

  def __init__(
    self, report='/dev/null', phase='', entry=1, delay=0.0, fault='SIGKILL'
  ):
    """Plans the fault.

    Args:
      report: path of a JSON file: at the end, the number of entries into each
        phase; at a signal, a list with the phase that was running.
      phase: the phase with the fault; '' = none.
      entry: the entry into it before the fault, from 1.
      delay: seconds between that entry and a signal.
      fault: the name of a signal; 'hang', which sleeps for ever; or the name of
        an errno, such as 'ENOSPC', which is raised.
    """
    self.entries = collections.Counter()
    self._report = report
    self._planned, self._delay = (phase, entry), delay
    self._fault = fault
    self._inside = []

  def wrap(
    self, phase: str, owner: Any, name: str, counts=True, nested=False
  ) -> None:
    """Makes `owner.name` a phase; within another it is a part of that.

    Args:
      phase: the phase's name.
      owner: a class or module.
      name: its function.
      counts: whether an entry into it can have the fault.
      nested: whether it is a phase of its own within another, too.
    """
    wrapped = getattr(owner, name)

    def watched(*args, **kwargs):
      self._inside.append(phase)
      if counts and (nested or self._inside[0] == phase):
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
    if (phase, self.entries[phase]) != self._planned:
      return
    if self._fault == 'hang':
      time.sleep(10_000)
    elif self._fault.startswith('SIG'):
      threading.Timer(self._delay, self._send).start()
    else:
      number = getattr(errno, self._fault)
      raise OSError(number, os.strerror(number), f'/{phase}')

  def _send(self) -> None:
    self.write_report(self._inside[:1])
    os.kill(os.getpid(), getattr(signal, self._fault))


def run(options: str, *argv: str) -> int:
  """Runs `posttrain.main` under a watch; returns its exit code."""
  watch = Watch(**json.loads(options))
  watch.wrap('eval', evaluator.Evaluator, 'measure')
  watch.wrap('rollout', driver, 'run_all', counts=False)
  watch.wrap('rollout', engine.Engine, 'poll')  # once per chunk and stop
  watch.wrap('update', train_step.TrainStep, '__call__')
  watch.wrap('save', store.Checkpointer, 'save')
  watch.wrap('compile', compiler, 'compile_or_get_cached', nested=True)
  code = main.main(argv)
  watch.write_report(watch.entries)
  return code


if __name__ == '__main__':
  sys.exit(run(*sys.argv[1:]))
