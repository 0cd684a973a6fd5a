"""The loop of a stage, on one screen, and the run that strings stages up.

for item in pipeline: update; log; maybe evaluate; maybe save
"""

import contextlib
import os
from typing import Any

import jax

from posttrain import schema
from posttrain.metrics import writers
from posttrain.stage import build, plan
from posttrain.stage import job as jobs
from posttrain.util import preemption


def train(job: jobs.Job, stop: preemption.Signal) -> None:
  """Trains one stage from where it stands to its end.

  Args:
    job: the stage, built and restored.
    stop: asks the loop to save and leave at the next batch boundary.

  Raises:
    Preempted: `stop` was requested; everything is saved.
    NonFiniteError: too many gradients in a row were not finite.
    TooManyErrors: of environments, in one step.
    TooManyFaults: of a reward function, in a row.
    EndpointError: a model behind a server is away; everything is saved.
  """
  state, clock = job.state, job.clock
  if job.step == 0:
    job.log(0, job.evaluate(state, 0))
  stop.check(f'stage {job.name}, step {job.step}')
  for step in range(job.step + 1, job.steps + 1):
    with clock('rollout'):
      job.hand_over(state, step - 1)
      item = job.next_item(step, state, stop)
    job.export_tokens(step, state, item)
    with clock('update'):
      state, measured = job.update(state, item.batch)
      job.look_ahead(step)
      measured = jax.device_get(measured)
    record = job.record(item, measured)
    if job.evaluates_at(step):
      record |= job.evaluate(state, step)
    job.log(step, record)
    job.check_finite(step, measured, item)
    if job.saves_at(step) or stop.requested:
      with clock('save'):
        job.save(step, state, item.state)
    stop.check(f'stage {job.name}, step {step}')


def run(
  cfg: schema.Run,
  workdir: str,
  plans: dict[str, plan.Plan],
  stop: preemption.Signal,
) -> dict[str, Any]:
  """Runs the stages in order; resumes what `workdir` holds already.

  Args:
    cfg: the options.
    workdir: of this run, claimed by `main.claim`.
    plans: what `parts.preflight` found.
    stop: asks to save and leave.

  Returns:
    The final evaluation: `stage`, `step` and every `eval/*` value.
  """
  position = 0
  for name in cfg.stages:
    end = build.end_of(cfg, name, workdir)
    if end is not None:
      position = end
      continue
    build.check_order(cfg, name, workdir)
    with (
      jobs.explain_oom(plans[name]),
      contextlib.closing(build.make(cfg, name, workdir, position, stop)) as job,
    ):
      train(job, stop)
      position = job.writer.position()
    del job  # with its models, before the next stage makes its own
  *_, last = writers.read(os.path.join(workdir, 'metrics.jsonl'))
  return {
    key: value
    for key, value in last.items()
    if key in ('stage', 'step') or key.startswith('eval/')
  }
