"""The loop of a stage, on one screen, and the run over all stages.

for item in pipeline: update; log; maybe evaluate; maybe save
"""

import contextlib
import os
from typing import Any

import jax

from posttrain import processes
from posttrain.metrics import writers
from posttrain.stage import build, job, logbook, models, resume
from posttrain.util import preemption


def train(job: job.Job, stop: preemption.Signal) -> None:
  """Trains one stage from its restored step to its end.

  Args:
    job: the stage, built and restored.
    stop: requests that the loop saves and ends at the next batch boundary.

  Raises:
    Preempted: `stop` was requested; everything is saved.
    NonFiniteError: too many gradients in a row were not finite.
    TooManyErrors: environments failed too often in one step.
    TooManyFaults: a reward function failed too often in a row.
    NoReward: no rollout had a reward, because rewards or episodes failed.
    TooManyThreads, EnvError, EndpointError: see `Job.next_item`.
  """
  state, clock = job.learner.state, job.logbook.clock
  if job.step == 0:
    job.start(state)
  stop.check(f'stage {job.name}, step {job.step}')
  stop.begin_steps()
  for step in range(job.step + 1, job.steps + 1):
    job.begin(step)
    with clock('rollout'):
      job.hand_over(state, step - 1)
      item = job.next_item(step, state, stop)
    job.export_tokens(step, state, item)
    with clock('update'):
      state, metrics = job.learner.update(state, item.batch)
      job.prefetch(step)
      metrics = jax.device_get(metrics)
    record = job.record(item, metrics)
    if job.evaluates_at(step):
      record |= job.evaluate(state, step)
    job.log(step, record)
    path = job.logbook.bad_batch_path(step)
    job.learner.check_finite(step, metrics, item.batch, path)
    job.save_or_stop(step, state, item.state, stop)
    if job.ends_at(step):
      job.end(step)
      break


def run(
  stages: dict[str, models.Components],
  workdir: str,
  stop: preemption.Signal,
  profile: range | None = None,
  report: logbook.Report | None = None,
) -> dict[str, Any]:
  """Runs the stages in order; continues an interrupted run of `workdir`.

  Args:
    stages: name -> components, from `preflight.check`; each is dropped
      when its stage ends.
    workdir: the run's folder, claimed by `main.claim`.
    stop: requests to save and end.
    profile: the steps of each stage to trace; None = none.
    report: writes the report of the run while it goes on; None = no report.

  Returns:
    The final evaluation: `stage`, `step` and every `eval/*` value.
  """
  path = os.path.join(workdir, 'metrics.jsonl')
  position, shared = 0, logbook.Shared(writers.Goodput(path), report)
  for name in list(stages):
    stage = stages.pop(name)
    end = resume.end_of(stage.cfg, name, workdir)
    if end is not None:
      position = end
      logbook.traced(name, profile, stage.stage.steps, stage.stage.steps)
      continue
    stop.check(f'the start of stage {name}')
    with (
      job.explain_oom(stage.plan),
      contextlib.closing(
        build.make(stage, workdir, position, stop, profile, shared)
      ) as built,
    ):
      train(built, stop)
      position = processes.on(0, built.logbook.writer.position)
    del built, stage  # with their models, before the next stage builds its own
  last = processes.on(0, lambda: writers.last(path))
  return {
    key: value
    for key, value in last.items()
    if key in ('stage', 'step') or key.startswith('eval/')
  }
