"""Traces of some of a stage's steps, by jax.profiler.

WORKDIR/profiles/STAGE is a log directory of TensorBoard (plugin `xprof`); the
`*.trace.json.gz` in it opens in Perfetto and chrome://tracing. A trace has the
programs on the devices, jax's calls on the host, and one block per step.
"""

import contextlib
import logging
import os

import jax

FOLDER = 'profiles'


class Profiler:
  """Traces some steps of a stage; writes the trace after the last of them.

  Python's own calls are not traced: there are too many of them in a rollout.
  """

  def __init__(self, folder: str, name: str, steps: range):
    """Makes a profiler that has not begun.

    Args:
      folder: the folder of the trace.
      name: the stage's name, which is that of its steps in the trace.
      steps: the steps to trace; an empty range = none.
    """
    self._folder, self._name, self._steps = folder, name, steps
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


def make(workdir: str, name: str, steps: range) -> Profiler:
  """Returns the profiler of some steps of a stage."""
  return Profiler(os.path.join(workdir, FOLDER, name), name, steps)


def remaining(name: str, steps: range | None, done: int, total: int) -> range:
  """Returns the steps that can still be traced; warns of the others.

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
    reasons = {
      f'is finished after step {total}': done == total,
      f'continues after step {done}': steps[0] <= done < total,
      f'ends at step {total}': steps[-1] > total > done,
    }
    traced = f'steps {left[0]} to {left[-1]} are' if left else 'no step is'
    logging.getLogger('absl').warning(
      '--profile=%d:%d: stage %s %s, so %s traced',
      steps[0],
      steps[-1],
      name,
      ' and '.join(reason for reason, holds in reasons.items() if holds),
      traced,
    )
  return left
