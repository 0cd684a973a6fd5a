"""The loop of a stage, on one screen, and the run that strings stages up.

    for item in pipeline: update; log; maybe evaluate; maybe save
"""

import contextlib
import os
from typing import Any

import jax

from posttrain import job as jobs
from posttrain import metrics, preemption, schema


def train(job: jobs.Job, stop: preemption.Signal) -> dict[str, Any]:
  """Trains one stage from where it stands to its end.

  Args:
    job: the stage, built and restored.
    stop: asks the loop to save and leave at the next batch boundary.

  Returns:
    The values logged at the last step, evaluation included.

  Raises:
    Preempted: `stop` was requested; everything is saved.
    NonFiniteError: too many gradients in a row were not finite.
  """
  state, clock, record = job.state, job.clock, {}
  if job.step == 0:
    record = job.evaluate(state, 0)
    job.log(0, record)
  for step in range(job.step + 1, job.steps + 1):
    with clock('data'):
      item = next(job.pipeline)
    with clock('update'), job.explain_oom():
      state, measured = job.update(state, item.batch)
      measured = jax.device_get(measured)
    record = {**item.metrics, **measured, 'compiles': job.update.compiles}
    if job.evaluates_at(step):
      record |= job.evaluate(state, step)
    job.log(step, record)
    job.check_finite(step, measured, item)
    if job.saves_at(step) or stop.requested:
      with clock('save'):
        job.save(step, state, item.state)
    if stop.requested:
      raise preemption.Preempted(f'stage {job.name}, step {step}')
  return record


def run(cfg: schema.Run, workdir: str) -> dict[str, Any]:
  """Runs the stages in order; resumes what `workdir` holds already.

  Returns:
    The final evaluation: `stage`, `step` and every `eval/*` value.
  """
  position = 0
  with preemption.on_sigterm() as stop:
    for name in cfg.stages:
      with contextlib.closing(
          jobs.make(cfg, name, workdir, position)
      ) as job:
        if job.step < job.steps:
          train(job, stop)
        position = job.position()
  *_, last = metrics.read(os.path.join(workdir, 'metrics.jsonl'))
  return {
      key: value
      for key, value in last.items()
      if key in ('stage', 'step') or key.startswith('eval/')
  }

