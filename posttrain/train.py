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


def train(stage: job.Job, stop: preemption.Signal) -> None:
  """Trains one stage from its restored step to its end.

  Args:
    stage: the job, built and restored.
    stop: requests that the loop saves and ends at the next batch boundary.

  Raises:
    Preempted: `stop` was requested; everything that was trained is saved.
    NonFiniteError: too many gradients in a row were not finite.
    TooManyErrors: environments or rewards failed for too many rollouts of a
      step, or for all of a stage.
    TooManyThreads, EnvError, EndpointError: see `Job.next_item`.
  """
  state, clock = stage.learner.state, stage.logbook.clock
  if not stage.is_saved:
    stage.start(state)
    if stage.ends_at(0):
      stage.end(0)
      return
  stop.check(f'stage {stage.name}, step {stage.step}', stage.is_saved)
  stop.begin_steps()
  for step in range(stage.step + 1, stage.steps + 1):
    stage.begin(step)
    with clock('rollout'):
      stage.hand_over(state, step - 1)
      item = stage.next_item(step, state, stop)
    stage.export_tokens(step, state, item)
    with clock('update'):
      state, metrics = stage.learner.update(state, item.batch)
      stage.prefetch(step)
      metrics = jax.device_get(metrics)
    record = stage.record(item, metrics)
    if stage.evaluates_at(step):
      record |= stage.evaluate(state, step)
    stage.logbook.write(step, record)
    path = stage.logbook.bad_batch_path(step)
    stage.learner.check_finite(step, metrics, item.batch, path)
    stage.save_or_stop(step, state, item.state, stop)
    if stage.ends_at(step):
      stage.end(step)
      break


def run(
  stages: dict[str, models.Components],
  workdir: str,
  stop: preemption.Signal,
  profile: range | None,
  report: logbook.Report | None,
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
  for components in stages.values():
    build.try_servers(components, workdir, stop)
  for name in list(stages):
    components = stages.pop(name)
    end = resume.end_of(components.cfg, name, workdir)
    if end is not None:
      position, steps = end, components.stage.steps
      logbook.traced(name, profile, steps, steps)
      continue
    stop.check(f'the start of stage {name}')
    with (
      job.explain_oom(components.plan),
      contextlib.closing(
        build.make(components, workdir, position, stop, profile, shared)
      ) as stage,
    ):
      train(stage, stop)
      position = processes.on(0, stage.logbook.writer.position)
    del (
      components,
      stage,
    )  # with their models, before the next stage builds its own
  last = processes.on(0, lambda: writers.last(path))
  return {
    key: value
    for key, value in last.items()
    if key in ('stage', 'step') or key.startswith('eval/')
  }
