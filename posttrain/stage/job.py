"""What the loop of a stage drives: one stage, with all it needs at hand."""

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from posttrain import compilation, schema
from posttrain.checkpoints import store
from posttrain.decode import engine as engines
from posttrain.evaluation import evaluator as evaluation
from posttrain.metrics import estimates, writers
from posttrain.metrics import rollouts as rollout_metrics
from posttrain.models import lora
from posttrain.pipeline import pairs as pair_pipeline
from posttrain.pipeline import tokens as token_pipeline
from posttrain.rollout import references as refs
from posttrain.rollout.endpoint import client
from posttrain.rollout.grading import rewards
from posttrain.stage import plan
from posttrain.training import arrays, token_export
from posttrain.training import step as train_step
from posttrain.util import memory, preemption, timers

WARM = 0.1  # pass rate from which trial and error finds what to reinforce


class NonFiniteError(RuntimeError):
  """Too many gradients in a row were NaN or infinite."""


@dataclasses.dataclass
class Job:
  """What `train.train` drives. `step` is where it starts from."""

  name: str
  cfg: schema.Stage
  workdir: str
  step: int
  state: arrays.TrainState
  base: lora.Base | None  # what the state's parameters correct, if they do
  pipeline: token_pipeline.Pipeline | pair_pipeline.PairPipeline
  objective: Any  # of `objectives`
  update: train_step.TrainStep
  measure: Callable[[Any], dict[str, float]] | None  # held-out pairs
  engine: engines.Engine
  references: refs.References
  evaluator: evaluation.Evaluator
  checkpointer: store.Checkpointer
  save_every: int
  exporter: token_export.Exporter
  writer: writers.Writer
  progress: writers.Progress
  clock: timers.Timers
  compiling: compilation.CompileCounter
  about: dict[str, Any]  # what makes a checkpoint self-describing
  ahead: token_pipeline.Item | None = (
    None  # the next step's, if it is made already
  )

  @property
  def steps(self) -> int:
    return self.cfg.steps

  def policy(self, params: Any) -> Any:
    """The whole model of what trains."""
    return params if self.base is None else self.base.attach(params)

  def evaluates_at(self, step: int) -> bool:
    every = self.cfg.eval.every
    return step == self.steps or bool(every) and step % every == 0

  def saves_at(self, step: int) -> bool:
    return step == self.steps or step % self.save_every == 0

  def hand_over(self, state: arrays.TrainState, step: int) -> None:
    """Lets the next batch be sampled and scored by these weights."""
    if self.pipeline.uses_policy:
      policy = self.policy(state.params)
      late = {
        k: self.policy(v) for k, v in (state.ema_and_snapshots or {}).items()
      }
      self.engine.set_params(policy, step)
      self.references.set_policy({'policy': policy, **late})

  def next_item(
    self, step: int, state: arrays.TrainState, stop: preemption.Signal
  ) -> token_pipeline.Item:
    """The step's batch; what environments and rewards failed at is written.

    Raises:
      TooManyErrors: of environments; written down as well.
      TooManyFaults: of a reward function; the same.
      EndpointError: a server did not answer; the step before is saved.
      Preempted: the same, since `stop` ended the wait for it.
    """
    before = self.pipeline.get_state()
    try:
      item, self.ahead = self.ahead or next(self.pipeline), None
    except (rollout_metrics.TooManyErrors, rewards.TooManyFaults) as error:
      self._write_errors(step, error.errors)
      raise
    except client.EndpointError:
      if step - 1 > self.step and not self.saves_at(step - 1):
        self.save(step - 1, state, before)
      stop.check(f'stage {self.name}, step {step - 1}')
      raise
    self._write_errors(step, item.errors)
    if not item.batch.num_micro_batches:
      logging.getLogger('absl').warning(
        'step %d of stage %s trains on nothing: no token has a weight; where '
        'all rewards of a group are equal, prune_zero_advantage drops it',
        step,
        self.name,
      )
    return item

  def look_ahead(self, step: int) -> None:
    """Makes the next batch while the device works; not if models make it.

    What fails is tried again when the batch is due, behind this step's save.
    """
    pipeline = self.pipeline
    if step == self.steps or not pipeline.can_prefetch:
      return
    before = pipeline.get_state()
    try:
      self.ahead = next(pipeline)
    except Exception:
      pipeline.set_state(before)

  def _write_errors(self, step: int, errors: Sequence[str]) -> None:
    """A file per step, so that one that is done again replaces its own."""
    path = os.path.join(
      self.workdir, 'rollouts', f'{self.name}_errors_{step:06d}.jsonl'
    )
    if not errors:
      with contextlib.suppress(FileNotFoundError):
        os.remove(path)
      return
    with open(path, 'w') as f:
      for error in errors:
        f.write(json.dumps({'error': error}) + '\n')

  def export_tokens(
    self, step: int, state: arrays.TrainState, item: token_pipeline.Item
  ) -> None:
    """Writes what the step trains on, where it is due; before its update."""
    if self.exporter.due(step):
      with self.clock('export'):
        self.exporter(step, self.policy(state.params), item.batch)

  def evaluate(self, state: arrays.TrainState, step: int) -> dict[str, float]:
    """Answers under the averaged weights where there are such."""
    params = state.params if state.average is None else state.average
    with self.clock('eval'):
      values, answers, suite = {}, [], []
      if self.evaluator.tasks.any:
        self.engine.set_params(self.policy(params), step)
        values, answers = self.evaluator()
        suite = self.evaluator.answer_suite()
      if self.measure is not None:
        values |= self.measure(params)
    self._write_answers('eval', step, answers)
    if suite:
      self._write_answers('suite', step, suite)
    if step == 0:
      self.warn_if_cold(values)
    return values

  def _write_answers(self, what: str, step: int, answers) -> None:
    path = os.path.join(
      self.workdir, 'rollouts', f'{self.name}_{what}_{step:06d}.jsonl'
    )
    with open(path, 'w') as f:
      for answer in answers:
        f.write(writers.dumps(dataclasses.asdict(answer)) + '\n')

  def warn_if_cold(self, values: dict[str, float]) -> None:
    """Says where trial and error will find next to nothing to reinforce."""
    for name, run in self.pipeline.envs.items():
      rate = values.get(
        f'eval/sampled_pass_rate/{name}', values.get(f'eval/pass_rate/{name}')
      )
      if run.learns_by_trial and rate is not None and rate < WARM:
        logging.getLogger('absl').warning(
          'stage %s begins with a pass rate of %.1f%% on %s, below %.0f%%: '
          'most groups have no right answer to learn from; imitate longer '
          'before it, or ask easier questions',
          self.name,
          100 * rate,
          name,
          100 * WARM,
        )

  def record(self, item: token_pipeline.Item, measured) -> dict[str, Any]:
    """A step's numbers, without those that nothing was measured for."""
    nobody = self.objective.unmeasured(item.batch, measured)
    known = {k: v for k, v in measured.items() if k not in nobody}
    return {**item.metrics, **known, 'compiles': self.update.compiles}

  def log(self, step: int, values: dict[str, Any]) -> None:
    """Writes a row, with the seconds since the last one, and the bar.

    `time/programs` counts what the stage has compiled so far, whoever asked
    for it; `time/compile` lies within the other times.
    """
    times = {f'time/{k}': v for k, v in self.clock.take().items()}
    times['time/compile'] = self.compiling.take()
    times['time/programs'] = self.compiling.count
    if 'batch/tokens' in values:
      speed = values['batch/tokens'] / times['time/update']
      times['time/tokens_per_second'] = speed
    self.writer.write(self.name, step, {**values, **times})
    self.progress.update(
      step,
      {
        key.removeprefix('eval/'): value
        for key, value in values.items()
        if key in ('loss/total', 'batch/tokens')
        or key.startswith(('eval/pass_rate', 'rollout/reward'))
        and not estimates.is_bound(key, values)
      },
    )

  def check_finite(
    self, step: int, measured, item: token_pipeline.Item
  ) -> None:
    """Saves the batch and aborts after `optim.max_skipped` bad gradients.

    Raises:
      NonFiniteError: with the file that holds the last offending batch.
    """
    if measured['optim/skipped_in_row'] < self.cfg.optim.max_skipped:
      return
    path = os.path.join(self.workdir, f'bad_batch_{self.name}_{step}.npz')
    np.savez_compressed(path, **vars(item.batch))
    raise NonFiniteError(
      f'gradients must be finite: {self.cfg.optim.max_skipped} in a row '
      f'were not, the last at step {step} of stage {self.name}; its batch '
      f'is in {path}; lower config.{self.name}.optim.lr, or raise '
      f'config.{self.name}.optim.max_skipped'
    )

  def save(self, step: int, state: arrays.TrainState, pipeline) -> None:
    """Starts to save everything that a resumed run needs."""
    self.checkpointer.save(
      step,
      state,
      {
        **self.about,
        'step': step,
        'pipeline': pipeline,
        'metrics_position': self.writer.position(),
      },
    )

  def close(self) -> None:
    """Waits for a checkpoint under way; closes the files."""
    self.references.close()
    self.checkpointer.close()
    self.writer.close()
    self.progress.close()
    self.compiling.close()


@contextlib.contextmanager
def explain_oom(table: plan.Plan) -> Iterator[None]:
  """Out of device memory ends with the resolved sizes and what to turn."""
  knobs = [
    f'{table.stage}.batch.micro_batch_tokens',
    f'{table.stage}.rollout.slots',
    "model.remat (set it to 'block')",
    'mesh.fsdp (raise it)',
  ]
  with memory.explain_oom(dataclasses.asdict(table), knobs):
    yield
