"""A stage, built: everything its loop needs, restored to where it stood."""

import dataclasses
import json
import os
from typing import Any

import jax
import numpy as np

from posttrain import (
    arrays,
    checkpoint,
    config,
    evaluation,
    instrument,
    metrics,
    objectives,
    optim,
    plan,
    schema,
    sharding,
    train_step,
)
from posttrain import pipeline as pipelines
from posttrain.chat import renderer as chat
from posttrain.models import transformer


class NonFiniteError(RuntimeError):
  """Too many gradients in a row were NaN or infinite."""


@dataclasses.dataclass
class Job:
  """What `train.train` drives. `step` is where it starts from."""

  name: str
  cfg: schema.Stage
  workdir: str
  plan: plan.Plan
  step: int
  state: arrays.TrainState
  pipeline: pipelines.Pipeline
  update: train_step.TrainStep
  evaluator: evaluation.Evaluator
  checkpointer: checkpoint.Checkpointer
  save_every: int
  writer: metrics.Writer
  progress: metrics.Progress
  clock: instrument.Timers
  compiling: instrument.CompileCounter
  about: dict[str, Any]  # what makes a checkpoint self-describing

  @property
  def steps(self) -> int:
    return self.cfg.steps

  def evaluates_at(self, step: int) -> bool:
    every = self.cfg.eval.every
    return step == self.steps or bool(every) and step % every == 0

  def saves_at(self, step: int) -> bool:
    return step == self.steps or step % self.save_every == 0

  def evaluate(self, state: arrays.TrainState, step: int) -> dict[str, float]:
    """Greedy answers under the averaged weights where there are such."""
    params = state.params if state.average is None else state.average
    with self.clock('eval'), self.explain_oom():
      values, answers = self.evaluator(params)
    path = os.path.join(
        self.workdir, 'rollouts', f'{self.name}_eval_{step:06d}.jsonl'
    )
    with open(path, 'w') as f:
      for answer in answers:
        f.write(json.dumps(dataclasses.asdict(answer)) + '\n')
    return values

  def log(self, step: int, values: dict[str, Any]) -> None:
    times = {f'time/{k}': v for k, v in self.clock.take().items()}
    times['time/compile'] = self.compiling.take()
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
            or key.startswith('eval/pass_rate')
        },
    )

  def check_finite(self, step: int, measured, item: pipelines.Item) -> None:
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
        'optim.max_skipped'
    )

  def save(self, step: int, state: arrays.TrainState, pipeline) -> None:
    self.checkpointer.save(
        step, state,
        {
            **self.about,
            'step': step,
            'pipeline': pipeline,
            'metrics_position': self.writer.position(),
        },
    )  # fmt: skip

  def position(self) -> int:
    return self.writer.position()

  def explain_oom(self):
    return instrument.explain_oom(
        dataclasses.asdict(self.plan),
        [
            f'{self.name}.batch.micro_batch_tokens',
            f'{self.name}.eval.batch',
            "model.remat (set it to 'block')",
            'mesh.fsdp (raise it)',
        ],
    )

  def close(self) -> None:
    """Waits for a checkpoint under way; closes the files."""
    self.checkpointer.close()
    self.writer.close()
    self.progress.close()
    self.compiling.close()


def resolve_model(
    cfg: schema.Run, stage: schema.Stage, size: int
) -> schema.Model:
  """The stage's model with its vocabulary; `size` is the tokenizer's.

  Raises:
    ValueError: the vocabulary is smaller than the tokenizer's.
  """
  model = stage.model or cfg.model
  if model.vocab_size is not None and model.vocab_size < size:
    raise ValueError(
        f"config.model.vocab_size must hold the tokenizer's {size} tokens: "
        f'got {model.vocab_size}'
    )
  return dataclasses.replace(model, vocab_size=model.vocab_size or size)


def make(cfg: schema.Run, name: str, workdir: str, position: int) -> Job:
  """Builds a stage and restores its newest checkpoint, if it has one.

  Args:
    cfg: the whole run's options.
    name: of the stage.
    workdir: where the run lives.
    position: end of metrics.jsonl for a stage that has no checkpoint.
  """
  stage = cfg.stages[name]
  renderer = chat.load(cfg.tokenizer)
  tokenizer = renderer.tokenizer
  model = resolve_model(cfg, stage, tokenizer.vocab_size)
  mesh = sharding.make_mesh(cfg.mesh)
  pipeline = pipelines.Pipeline(stage, renderer, cfg.seed)
  sharding.check_batch(mesh, pipeline.shape[1], f'config.{name}.batch')
  optimizer = optim.make(stage.optim, stage.steps)
  checkpointer = checkpoint.Checkpointer(
      os.path.join(workdir, 'checkpoints', name), cfg.checkpoint
  )
  state, host = _state(
      cfg, stage, model, mesh, optimizer, checkpointer, workdir,
      tokenizer.fingerprint,
  )  # fmt: skip
  if host:
    pipeline.set_state(host['pipeline'])
    position = host['metrics_position']
  step = host.get('step', 0)
  return Job(
      name=name,
      cfg=stage,
      workdir=workdir,
      plan=plan.make(name, stage, model, cfg.mesh, jax.device_count()),
      step=step,
      state=state,
      pipeline=pipeline,
      update=train_step.make_train_step(
          objectives.KINDS[stage.kind](model, tuple(pipeline.envs)),
          optimizer, mesh=mesh, rules=transformer.SHARDING_RULES,
          average=stage.optim.average,
      ),
      evaluator=evaluation.Evaluator(
          {k: run.env for k, run in pipeline.envs.items()}, renderer, model,
          stage.eval, cfg.seed,
      ),
      checkpointer=checkpointer,
      save_every=cfg.checkpoint.every,
      writer=metrics.Writer(
          os.path.join(workdir, 'metrics.jsonl'), position,
          os.path.join(workdir, 'tensorboard')
          if cfg.metrics.tensorboard else None,
      ),
      progress=metrics.Progress(
          name, stage.steps, step, cfg.metrics.progress
      ),
      clock=instrument.Timers(),
      compiling=instrument.CompileCounter().open(),
      about={
          'stage': name,
          'model': dataclasses.asdict(model),
          'tokenizer': tokenizer.fingerprint,
          'config': config.to_dict(cfg),
      },
  )  # fmt: skip


def _state(
    cfg, stage, model, mesh, optimizer, checkpointer, workdir, fingerprint
):
  """The newest checkpoint's (state, host), or the stage's initial (state, {}).

  Every array is made or read straight into its sharding.
  """
  average = stage.optim.average is not None

  def fresh(params):
    return train_step.init_state(params, optimizer, average=average)

  def random():
    return fresh(transformer.init(jax.random.key(cfg.seed), model))

  like = jax.eval_shape(random)
  places = sharding.shardings(like, transformer.SHARDING_RULES, mesh)
  like = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      like, places,
  )  # fmt: skip
  restored = checkpointer.restore(like)
  if restored:
    return restored
  if stage.init == 'random':
    return jax.jit(random, out_shardings=places)(), {}
  kind, _, target = stage.init.partition(':')
  path = (
      os.path.join(workdir, 'checkpoints', target)
      if kind == 'stage' else stage.init
  )  # fmt: skip
  made_with = checkpoint.read_host(path)['tokenizer']
  if made_with != fingerprint:
    raise ValueError(
        f'config.tokenizer must be the one that {path} was trained with: '
        f'got {fingerprint[:12]}, expected {made_with[:12]}'
    )
  params = checkpoint.restore_params(path, like.params)
  return jax.jit(fresh, out_shardings=places)(params), {}
