"""A run that is watched, and can be told to die; `kill_resume` starts it.

    python -m experiments.doomed OPTIONS ARGUMENT...

OPTIONS is a JSON object, see `Watch`; the arguments are `posttrain.main`'s,
which knows nothing of this.
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
    """Plans the death.

    Args:
      report: the file for whoever started this: at the end how often each
        phase was entered; at a death a list with the phase it happened in.
      phase: to die in; '' = live.
      entry: the one that is the last, from 1.
      delay: seconds between it and the SIGKILL.
    """
    self.entries = collections.Counter()
    self._report = report
    self._doom, self._delay = (phase, entry), delay
    self._inside = []

  def wrap(self, phase: str, owner: type, name: str, counts=True) -> None:
    """Makes `owner.name` a phase, or within another a part of that one."""
    wrapped = getattr(owner, name)

    def watched(*args, **kwargs):
      self._inside.append(phase)
      if counts and self._inside[0] == phase:
        self._enter(phase)
      try:
        # What was only dispatched belongs to the phase, too.
        return jax.block_until_ready(wrapped(*args, **kwargs))
      finally:
        self._inside.pop()

    setattr(owner, name, watched)

  def tell(self, value) -> None:
    """Writes the report."""
    with open(self._report, 'w') as f:
      json.dump(value, f)

  def _enter(self, phase: str) -> None:
    self.entries[phase] += 1
    if (phase, self.entries[phase]) == self._doom:
      threading.Timer(self._delay, self._die).start()

  def _die(self) -> None:
    self.tell(self._inside[:1])
    os.kill(os.getpid(), signal.SIGKILL)


def run(options: str, *argv: str) -> int:
  """Returns the exit code of `posttrain.main`."""
  watch = Watch(**json.loads(options))
  watch.wrap('eval', evaluator.Evaluator, '__call__')
  watch.wrap('rollout', driver.Driver, 'play', counts=False)
  watch.wrap('rollout', engine.Engine, 'poll')  # once per chunk and stop
  watch.wrap('update', train_step.TrainStep, '__call__')
  watch.wrap('save', store.Checkpointer, 'save')
  code = main.main(argv)
  watch.tell(watch.entries)
  return code


if __name__ == '__main__':
  sys.exit(run(*sys.argv[1:]))
