"""One stage as the train loop drives it: learner, sampling, logbook, saves."""

import contextlib
import dataclasses
import gc
import logging
import sys
from collections.abc import Mapping
from typing import Any

from posttrain import processes, schema, types
from posttrain.checkpoints import store
from posttrain.decode import engines
from posttrain.evaluation import evaluator
from posttrain.metrics import statistics
from posttrain.models import lora
from posttrain.pipeline import ahead, batches
from posttrain.rollout import calls, env_calls, frozen_models
from posttrain.stage import learner, logbook, models, resume
from posttrain.training import arrays, token_export
from posttrain.util import memory, preemption

# Failures of environments, reward functions and servers, after which the run
# can be resumed.
_FAILURES = (
  statistics.TooManyErrors,
  calls.TooManyThreads,
  env_calls.EnvError,
  calls.EndpointError,
)
_MANY_STEPS = 16  # of a stage, for which skipping old objects pays
MIN_PASS_RATE = 0.1  # below it, trial and error finds little to reinforce


@dataclasses.dataclass(frozen=True)
class Sampling:
  """The part of a job that samples, scores and evaluates.

  `pipeline` is an `ahead.Ahead` where batches depend on the policy.
  """

  models: models.Models
  pipeline: batches.Pipeline
  decoder: engines.Engine
  scorers: frozen_models.References
  evaluation: evaluator.Evaluator
  held_out: learner.HeldOutPairs
  selecting: learner.HeldOutPairs  # `eval.best` is their metric


@dataclasses.dataclass(frozen=True)
class Saves:
  """The part of a job that saves checkpoints."""

  checkpointer: store.Checkpointer
  every: int  # steps
  metadata: dict[str, Any]  # makes every checkpoint self-describing


@dataclasses.dataclass
class Job:
  """One stage, built and restored.

  `step` is the last step that was trained before this start; it stays.
  """

  name: str
  cfg: schema.Stage
  step: int
  learner: learner.Learner
  sampling: Sampling
  exporter: token_export.Exporter
  profiler: logbook.Profiler
  logbook: logbook.Logbook
  saves: Saves
  selection: resume.Selection | None = None  # None = the last weights
  prefetched: batches.Item | None = None  # the next step's item
  is_idle: bool = False  # whether a step had nothing to train on

  @property
  def steps(self) -> int:
    return self.cfg.steps

  @property
  def eval_seconds(self) -> float:
    """How long the last evaluation took; 0 if there was none."""
    row = self.logbook.writer.latest.get(self.name, {})
    stored = row.get('time/eval')  # before this start
    before = stored if isinstance(stored, float) else 0.0
    return self.logbook.clock.last.get('eval', before)

  def evaluates_at(self, step: int) -> bool:
    every = self.cfg.eval.every
    return step == self.steps or bool(every) and step % every == 0

  def ends_at(self, step: int) -> bool:
    """Returns whether the step is the stage's last, once it is evaluated."""
    is_over = self.selection is not None and self.selection.is_over
    return step == self.steps or is_over

  def saves_at(self, step: int) -> bool:
    is_best = self.selection is not None and self.selection.step == step
    return is_best or self.ends_at(step) or step % self.saves.every == 0

  @property
  def is_saved(self) -> bool:
    """Whether a checkpoint has the weights that the loop begins with."""
    selection = self.selection
    return self.step > 0 or (selection is not None and selection.step == 0)

  def start(self, state: arrays.TrainState) -> None:
    """Evaluates the weights that the stage starts from; they may be the best.

    Raises:
      ValueError: `eval.best` is not measured.
      TooManyErrors: too many environments failed.
    """
    self.logbook.write(0, self.evaluate(state, 0))
    if self.selection is not None:
      self.hand_over(state, 0)
      self.save(0, state, self.sampling.pipeline.get_state())

  def begin(self, step: int) -> None:
    """Begins a step: its profile, where due."""
    self.profiler.begin(step)
    if step == self.step + 1:
      self.logbook.shown.say(f'compiles step {step}')
    # The first step has made all programs; a short stage is over too soon.
    # Their objects are so many that a full collection takes 30 to 80 ms, and
    # every step whose rollouts make many objects would start one.
    if step == self.step + 2 and self.steps - step >= _MANY_STEPS:
      gc.freeze()

  def hand_over(self, state: arrays.TrainState, step: int) -> None:
    """Hands the weights to the side that samples, if a batch needs them."""
    pipeline = self.sampling.pipeline
    if isinstance(pipeline, ahead.Ahead):
      lags = pipeline.max_lag > 0
      weights = self.learner.copies if lags else learner.weights_of
      own = self.sampling.models
      handed_over = weights(state)
      if own.components.cfg.mesh.sampler is not None:
        with self.logbook.clock('hand_over'):
          handed_over = own.to_sampler(handed_over)
      pipeline.publish(step, handed_over)

  def next_item(
    self, step: int, state: arrays.TrainState, stop: preemption.Signal
  ) -> batches.Item:
    """Returns the step's item; writes its errors.

    The step before is saved if environments, rewards or servers fail.

    Raises:
      TooManyErrors: too many rollouts failed; their errors are written too.
      TooManyThreads: too many calls were given up.
      EnvError: an environment's source of tasks failed.
      EndpointError: a server did not answer.
      Preempted: the same, because `stop` ended the wait for it.
    """
    pipeline = self.sampling.pipeline
    before = pipeline.get_state()
    try:
      item, self.prefetched = self.prefetched or next(pipeline), None
    except _FAILURES as error:
      if isinstance(error, statistics.TooManyErrors):
        self.logbook.write_errors(step, error.errors)
      if step - 1 > self.step and not self.saves_at(step - 1):
        self.save(step - 1, state, before)
      if isinstance(error, calls.EndpointError):
        stop.check(f'stage {self.name}, step {step - 1}')
      raise
    self.logbook.write_errors(step, item.errors)
    self.logbook.write_rollouts(step, item.played)
    if self.cfg.rollout.sleep:
      self.sampling.decoder.sleep()
    if not item.batch.num_micro_batches and not self.is_idle:
      self.is_idle = True
      logging.getLogger('absl').warning(
        'step %d of stage %s trains on nothing: no token has a weight, as '
        'where the rewards of a group are equal, or mask_truncated leaves out '
        'its rollouts: got the means %s; if they are high, the tasks are '
        'solved, so take harder ones; if they are low, see whether the reward '
        'finds what it looks for; later steps are not listed',
        step,
        self.name,
        {k: x for k, x in item.metrics.items() if k.startswith('reward')},
      )
    return item

  def prefetch(self, step: int) -> None:
    """Builds the next batch while the device runs the update.

    Does nothing if building it needs a model, or with several processes, whose
    values would travel beside the update's. A batch that fails is built again
    when it is due, after this step's save.
    """
    pipeline = self.sampling.pipeline
    alone = processes.count() == 1
    if step == self.steps or not (alone and pipeline.can_prefetch):
      return
    before = pipeline.get_state()
    try:
      self.prefetched = next(pipeline)
    except Exception:
      pipeline.set_state(before)

  def export_tokens(
    self, step: int, state: arrays.TrainState, item: batches.Item
  ) -> None:
    """Writes the step's tokens where due, before its update."""
    if self.exporter.due(step):
      assert isinstance(item.batch, types.Batch), 'pairs have no token streams'
      with self.logbook.clock('export'):
        policy = lora.whole(state.params, self.learner.base)
        self.exporter(step, policy, item.batch)

  def evaluate(self, state: arrays.TrainState, step: int) -> dict[str, float]:
    """Evaluates the averaged weights where the state has them.

    Raises:
      TooManyErrors: too many environments failed; written as well.
    """
    params = state.params if state.average is None else state.average
    sampling, cfg = self.sampling, self.cfg.eval
    # The first one leaves out what can wait.
    brief = step == 0 and cfg.max_sampled_tokens is not None
    evaluation = sampling.evaluation
    tokens = evaluation.most_tokens(brief)
    if step == 0 or cfg.max_sampled_tokens is not None:
      bound = (
        f', with at most {tokens:,} sampled tokens; '
        f'config.{self.name}.eval.max_sampled_tokens bounds them'
        if tokens
        else ''
      )
      self.logbook.shown.say(
        f'evaluates {f"step {step}" if step else "the start"}{bound}'
      )
    with self.logbook.clock('eval'), sampling.pipeline.paused():
      metrics, answers, suite = {}, [], []
      if evaluation.tasks.any:
        own = sampling.models
        weights = learner.weights_of(state)
        if state.average is not None:
          weights['average'] = state.average
        policies = own.policies(own.to_sampler(weights))
        sampling.scorers.set_policy(policies)
        policy = policies.get('average', policies['policy'])
        sampling.decoder.set_params(policy, step, decodes=tokens > 0)
        try:
          results = evaluation.measure(brief)
        except statistics.TooManyErrors as error:
          self.logbook.write_errors(step, error.errors, 'eval_errors')
          raise
        self.logbook.write_errors(step, results.errors, 'eval_errors')
        metrics, answers, suite, _ = results
      metrics |= sampling.held_out(params)
      if self.selection is not None:
        further = sampling.selecting(params)
        metrics |= self.selection.add(step, metrics | further)
    self.logbook.write_answers('eval', step, answers)
    if suite:
      self.logbook.write_answers('suite', step, suite)
    if step == 0:
      self.warn_if_cold(metrics)
    return metrics

  def warn_if_cold(self, metrics: Mapping[str, float]) -> None:
    """Warns where rollouts will rarely have a reward to reinforce."""
    for name in self.sampling.pipeline.learns_by_trial:
      rate = metrics.get(
        f'eval/sampled_pass_rate/{name}', metrics.get(f'eval/pass_rate/{name}')
      )
      if rate is not None and rate < MIN_PASS_RATE:
        logging.getLogger('absl').warning(
          'stage %s begins with a pass rate of %.1f%% on %s, below %.0f%%: '
          'most groups have no right answer to learn from; train longer '
          'on demonstrations first, or use easier questions',
          self.name,
          100 * rate,
          name,
          100 * MIN_PASS_RATE,
        )

  def record(
    self, item: batches.Item, metrics: Mapping[str, float]
  ) -> dict[str, Any]:
    """Returns a step's metrics, without those that nothing contributed to."""
    measured = self.learner.measured(item.batch, metrics)
    compiles = self.learner.update.compiles
    return {**item.metrics, **measured, 'compiles': compiles}

  def save_or_stop(
    self,
    step: int,
    state: arrays.TrainState,
    pipeline_state: dict[str, Any],
    stop: preemption.Signal,
  ) -> None:
    """Saves where due; saves and ends the run where `stop` says so.

    Raises:
      Preempted: everything is saved.
    """
    requested = stop.after_step(
      self.saves.checkpointer.seconds,
      spent=self.eval_seconds if self.evaluates_at(step) else 0.0,
      ahead=self.eval_seconds if self.evaluates_at(step + 1) else 0.0,
    )
    stops = requested and not self.ends_at(step)
    if stops or self.saves_at(step):
      with self.logbook.clock('save'):
        self.save(step, state, pipeline_state)
    if stops:
      raise preemption.Preempted(
        f'stage {self.name}, step {step}, which is saved'
      )

  def save(
    self, step: int, state: arrays.TrainState, pipeline_state: dict[str, Any]
  ) -> None:
    """Starts to save everything that a resumed run needs."""
    selected, pipeline = {}, self.sampling.pipeline
    if isinstance(pipeline, ahead.Ahead) and pipeline.max_lag:
      past = self.sampling.models.to_learner(pipeline.past(step))
      state = dataclasses.replace(state, past=past)
      selected['ahead'] = pipeline.stored()
    if self.selection is not None:
      selected |= {
        'best': self.selection.state(),
        'finished': self.selection.is_over,
      }
    self.saves.checkpointer.save(
      step,
      state,
      {
        **self.saves.metadata,
        **selected,
        'step': step,
        'pipeline': pipeline_state,
        'metrics_position': self.logbook.writer.position(),
      },
    )

  def end(self, step: int) -> None:
    """Ends the stage at a step: prints the best one, if evaluations ended it.

    Also checks that the stage had rewards, and logs hints about them.

    Raises:
      TooManyErrors: it had none, because rewards or episodes failed.
    """
    best = self.selection
    if best is not None and best.is_over and processes.is_first():
      print(
        f'stage {self.name} ends at step {step}: step {best.step} has the best '
        f'evaluation, {best.cfg.best}={best.value}',
        file=sys.stderr,
      )
    tally = self.sampling.pipeline.tally
    if tally is not None:
      tally.check(self.name)
      tally.warn(self.name)

  def close(self) -> None:
    """Waits for a checkpoint that is being written; closes all files."""
    gc.unfreeze()
    self.saves.checkpointer.close()
    self.sampling.scorers.close()
    self.sampling.pipeline.close()
    self.logbook.close()
    self.profiler.close()


def explain_oom(plan: Any) -> contextlib.AbstractContextManager[None]:
  """Adds the phase and the keys that help to out-of-memory errors."""
  key = f'config.{plan.stage}'
  lengths = {'rollout': 'batch.row_tokens', 'eval': 'eval.max_tokens'}

  def advice(phase: str) -> tuple[str, ...]:
    if phase in lengths and plan.slots:
      return (
        f'lower {key}.rollout.slots',
        f'lower {key}.{lengths[phase]}',
        'raise config.mesh.tensor',
      )
    return (
      f'lower {key}.batch.micro_batch_tokens',
      "set config.model.remat='block'",
      'raise config.mesh.fsdp',
    )

  return memory.explain_oom(f'stage {plan.stage}', advice)
