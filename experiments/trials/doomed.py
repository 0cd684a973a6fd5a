"""A run with a fault in a given phase.

    python -m experiments.trials.doomed OPTIONS ARGUMENT...

OPTIONS is a JSON object of the arguments of `Fault`; the others are those of
`posttrain.main`, whose code has no part in this. `PHASES` has the phases.
"""

import collections
import errno
import json
import os
import signal
import sys
import threading
import time

import jax

from posttrain import main
from posttrain.checkpoints import store
from posttrain.decode import engines
from posttrain.evaluation import evaluator
from posttrain.training import step

PHASES = {  # phase -> the function that an entry into it calls
  'rollout': (engines.Engine, 'poll'),  # once per chunk
  'update': (step.TrainStep, '__call__'),
  'save': (store.Checkpointer, 'save'),
  'eval': (evaluator.Evaluator, 'measure'),
}


class Fault:
  """Counts entries into phases; injects a fault into one of them."""

  def __init__(
    self, report='/dev/null', phase='', entry=1, delay=0.0, fault='SIGKILL'
  ):
    """Plans the fault.

    Args:
      report: path of a JSON file that gets the number of entries into each
        phase at the end.
      phase: the phase with the fault; '' = none.
      entry: the entry into it before the fault, from 1.
      delay: seconds between that entry and a signal.
      fault: the name of a signal; 'hang', which sleeps for ever; or the name of
        an errno, such as 'ENOSPC', which is raised.
    """
    self.entries = collections.Counter()
    self.report, self._fault = report, fault
    self._planned, self._delay = (phase, entry), delay
    self._inside: list[str] = []

  def wrap(self, phase: str, owner: type, name: str) -> None:
    """Makes `owner.name` a phase; within another it is a part of that."""
    wrapped = getattr(owner, name)

    def watched(*args, **kwargs):
      self._inside.append(phase)
      if self._inside[0] == phase:
        self._enter(phase)
      try:
        # Dispatched device work belongs to the phase, too.
        return jax.block_until_ready(wrapped(*args, **kwargs))
      finally:
        self._inside.pop()

    setattr(owner, name, watched)

  def _enter(self, phase: str) -> None:
    self.entries[phase] += 1
    if (phase, self.entries[phase]) != self._planned:
      return
    if self._fault == 'hang':
      time.sleep(10_000)
    elif self._fault.startswith('SIG'):
      number = getattr(signal, self._fault)
      threading.Timer(self._delay, os.kill, (os.getpid(), number)).start()
    else:
      number = getattr(errno, self._fault)
      raise OSError(number, os.strerror(number), f'/{phase}')


def run(options: str, *argv: str) -> int:
  """Runs `posttrain.main` with a fault; returns its exit code."""
  fault = Fault(**json.loads(options))
  for phase, (owner, name) in PHASES.items():
    fault.wrap(phase, owner, name)
  code = main.main(argv)
  with open(fault.report, 'w') as file:
    json.dump(fault.entries, file)
  return code


if __name__ == '__main__':
  sys.exit(run(*sys.argv[1:]))
