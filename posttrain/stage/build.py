"""Builds a stage: from options to a `Job`, restored to where it stood.

1. `parts`: what can be made without compiling anything.
2. `prepare`: the pairs of a stage on pairs, with what the reference says.
3. The state, restored or initial, and the job around it.
"""

import dataclasses
import os
from typing import Any

import jax

from posttrain import compilation, schema, tree
from posttrain.chat import renderer as chat
from posttrain.checkpoints import store, weights
from posttrain.config import load as config
from posttrain.metrics import writers
from posttrain.models import lora, transformer
from posttrain.pipeline import pairs as pair_pipeline
from posttrain.rollout import references as refs
from posttrain.stage import components, job
from posttrain.stage import models as stage_models
from posttrain.stage import pairs as stage_pairs
from posttrain.training import objectives, optim, token_export
from posttrain.training import state as train_state
from posttrain.training import step as train_step
from posttrain.util import preemption, timers


def make(
  cfg: schema.Run,
  name: str,
  workdir: str,
  position: int,
  stop: preemption.Signal,
) -> job.Job:
  """Builds a stage and restores its newest checkpoint, if it has one.

  Args:
    cfg: the whole run's options.
    name: of the stage.
    workdir: where the run lives.
    position: end of metrics.jsonl for a stage that has no checkpoint.
    stop: ends waits for servers.
  """
  clock, stage = timers.Timers(), cfg.stages[name]
  compiling = compilation.CompileCounter().open()
  with clock('setup'):
    built = components.make(cfg, name)
    optimizer = optim.make(stage.optim, stage.steps * stage.updates_per_rollout)
    like, whole = train_state.shapes(stage, built.model, optimizer, built.mesh)
    folder = os.path.join(workdir, 'checkpoints', name)
    checkpointer = store.Checkpointer(folder, cfg.checkpoint)
    state, host = checkpointer.restore(like) or (None, {})
    about = _about(cfg, name, built, workdir, host)
    loader = stage_models.loader(cfg, built, workdir, about, whole)
    base = None
    if stage.lora.rank:
      base = lora.Base(loader.init(), lora.scale(stage.lora))
      about['base'] = weights.base_sums(base.params)
      if host:
        weights.check_base(weights.find(folder), base.params)
    stage_pairs.prepare(
      cfg, name, built, loader, base, workdir, stop, fresh=not host
    )
    if host:
      built.pipeline.set_state(host['pipeline'])
    else:
      key = jax.random.key(cfg.seed)
      key = jax.random.fold_in(key, list(cfg.stages).index(name))
      state = train_state.fresh(stage, optimizer, like, base, loader.init, key)
    tree.checksums(state)  # here, so that the first save compiles nothing
    objective = objectives.make(
      stage.kind, built.model, tuple(built.pipeline.envs), stage.loss
    )
    update = train_step.make_train_step(
      objective,
      optimizer,
      mesh=built.mesh,
      rules=transformer.SHARDING_RULES,
      average=stage.optim.average,
      updates=stage.updates_per_rollout,
      base=base,
    )
    decoder, references, evaluator = stage_models.connect(
      cfg, stage, built, loader, base, stop
    )
  step = host.get('step', 0)
  return job.Job(
    name=name,
    cfg=stage,
    workdir=workdir,
    step=step,
    state=state,
    base=base,
    pipeline=built.pipeline,
    objective=objective,
    update=update,
    measure=_measure(objective, built, base, update),
    engine=decoder,
    references=references,
    evaluator=evaluator,
    checkpointer=checkpointer,
    save_every=cfg.checkpoint.every,
    exporter=_exporter(cfg, name, workdir, built),
    writer=_writer(cfg, workdir, host.get('metrics_position', position)),
    progress=writers.Progress(name, stage.steps, step, cfg.metrics.progress),
    clock=clock,
    compiling=compiling,
    about=about,
  )


def end_of(cfg: schema.Run, name: str, workdir: str) -> int | None:
  """Where in metrics.jsonl a finished stage ends; None if it is unfinished.

  Raises:
    ValueError: it was trained for more steps than the config now says.
  """
  folder = os.path.join(workdir, 'checkpoints', name)
  if not _has_steps(folder):
    return None
  host = store.read_host(folder)
  steps = cfg.stages[name].steps
  if host['step'] > steps:
    raise ValueError(
      f'config.{name}.steps must be at least the {host["step"]} steps that '
      f'are trained already: got {steps}; use another --workdir'
    )
  return host['metrics_position'] if host['step'] == steps else None


def check_order(cfg: schema.Run, name: str, workdir: str) -> None:
  """Refuses to train a stage that a later one has already built upon.

  Raises:
    ValueError: with the folder to move away.
  """
  names = list(cfg.stages)
  for later in names[names.index(name) + 1 :]:
    folder = os.path.join(workdir, 'checkpoints', later)
    if _has_steps(folder):
      raise ValueError(
        f'stage {name!r} must end before stage {later!r} begins: it has '
        f'steps left to train, but {folder} holds steps; move that folder '
        'away to train both again'
      )


def _has_steps(folder: str) -> bool:
  return os.path.isdir(folder) and any(
    name.isdigit() for name in os.listdir(folder)
  )


def _about(cfg, name, built: components.Parts, workdir, host) -> dict[str, Any]:
  """What every checkpoint of the stage says of itself; `host` did already."""
  if host:
    chat.check_fingerprint(
      built.renderer.fingerprint,
      host['tokenizer'],
      'config.tokenizer',
      'the checkpoint to go on from',
    )
  start, pinned = host.get('start'), host.get('references')
  if start is None:
    start = refs.resolve(cfg.stages[name].init, workdir)
  if pinned is None:
    pinned = {
      x: refs.resolve(x, workdir)
      for x in (*built.pipeline.references, *built.pipeline.reward_models)
      if isinstance(x, str)
    }
  return {
    'stage': name,
    'model': dataclasses.asdict(built.model),
    'tokenizer': built.renderer.fingerprint,
    'config': config.to_dict(cfg),
    'start': start,
    'references': pinned,
  }


def _writer(cfg, workdir, position: int) -> writers.Writer:
  folder = os.path.join(workdir, 'tensorboard')
  return writers.Writer(
    os.path.join(workdir, 'metrics.jsonl'),
    position,
    folder if cfg.metrics.tensorboard else None,
  )


def _exporter(
  cfg, name, workdir, built: components.Parts
) -> token_export.Exporter:
  return token_export.Exporter(
    cfg.metrics.export_tokens if built.pipeline.envs else None,
    workdir,
    name,
    built.model,
    tuple(built.pipeline.envs),
    built.mesh,
  )


def _measure(
  objective, built: components.Parts, base, update: train_step.TrainStep
):
  """Measures held-out pairs, where there are such."""
  choices = built.pipeline
  if not isinstance(choices, pair_pipeline.PairPipeline) or not (
    choices.held_out.choices
  ):
    return None
  batch = choices.pack(choices.held_out)
  placed, measure = None, train_step.make_measure(objective, base)

  def held_out(params) -> dict[str, float]:
    nonlocal placed
    placed = update.place(batch) if placed is None else placed
    found = jax.device_get(measure(params, placed))
    return {
      f'eval/pairs/{key}': float(value)
      for key, value in found.items()
      if key not in objective.unmeasured(batch, found)
    }

  return held_out
