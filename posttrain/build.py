"""Builds a stage: from options to a `Job`, restored to where it stood.

1. `parts`: what can be made without compiling anything.
2. `preflight`: the parts of every stage, and a look at its data.
3. `make`: the state, restored or initial, and the job around it.
"""

import contextlib
import dataclasses
import logging
import os
from typing import Any

import jax

from posttrain import (
    checkpoint,
    config,
    connect,
    evaluation,
    instrument,
    job,
    metrics,
    objectives,
    optim,
    plan,
    preemption,
    schema,
    sharding,
    states,
    token_export,
    train_step,
    tree,
    weights,
)
from posttrain import pipeline as pipelines
from posttrain.chat import renderer as chat
from posttrain.models import lora, transformer
from posttrain.rollout import endpoint
from posttrain.rollout import references as refs


@dataclasses.dataclass(frozen=True)
class Parts:
  """What a stage is made of before anything is compiled or restored."""

  renderer: chat.Renderer
  model: schema.Model  # with its vocabulary
  mesh: jax.sharding.Mesh
  pipeline: pipelines.Pipeline
  evaluator: evaluation.Evaluator
  capacity: int  # tokens of the longest episode, trained on or not
  plan: plan.Plan


def parts(cfg: schema.Run, name: str) -> Parts:
  """Builds the parts of a stage.

  Raises:
    ValueError: mesh, batch, slots, vocabulary, environments or data do not fit.
  """
  stage = cfg.stages[name]
  renderer = chat.load(cfg.tokenizer)
  model = stage.model or cfg.model
  size = model.vocab_size or renderer.tokenizer.vocab_size
  renderer.fit(size)
  model = dataclasses.replace(model, vocab_size=size)
  mesh = sharding.make_mesh(cfg.mesh)
  pipeline = pipelines.Pipeline(
      stage, renderer, cfg.seed, list(cfg.stages).index(name)
  )
  sharding.check_batch(mesh, pipeline.shape[1], f'config.{name}.batch')
  evaluator = evaluation.Evaluator(
      {name: run.env for name, run in pipeline.envs.items()}, renderer,
      stage.eval, cfg.seed, stage.rollout.max_errors,
  )  # fmt: skip
  capacity = evaluator.max_length
  turns = max(run.env.max_turns for run in pipeline.envs.values())
  # What an environment adds between turns is unknown.
  if pipeline.live or pipeline.players or turns > 1:
    capacity = max(capacity, stage.batch.row_tokens)
  _check_slots(mesh, stage.rollout.slots, f'config.{name}.rollout.slots')
  room = plan.slot_tokens(capacity, jax.default_backend())
  try:
    table = plan.make(
        name, stage, model, dict(mesh.shape), room,
        _held(stage, pipeline, model), states.late(stage),
        len([x for x in pipeline.players if isinstance(x, str)]),
    )  # fmt: skip
  except schema.FieldError as error:
    raise ValueError(
        f'config.{name}.lora.{error.field} {error.detail}'
    ) from None
  return Parts(renderer, model, mesh, pipeline, evaluator, capacity, table)


def _held(stage, pipeline: pipelines.Pipeline, model: schema.Model) -> int:
  """Parameters of the models that are held beside the policy."""
  names = {*pipeline.references, *(['init'] if stage.eval.kl else [])}
  if stage.lora.rank:
    names -= {'init'}  # it is the frozen weights
  total = 0
  for name in names:
    if isinstance(name, schema.Endpoint) or refs.is_live(name):
      continue
    theirs = model
    if refs.is_path(name):
      with contextlib.suppress(ValueError):  # preflight says what is wrong
        theirs = weights.model(weights.find(name))
    total += transformer.num_params(theirs)
  return total


def preflight(cfg: schema.Run) -> dict[str, plan.Plan]:
  """Builds every stage's parts, looks at its data; returns the plans.

  Raises:
    ValueError: whatever can be seen to be wrong without compiling anything.
  """
  plans = {}
  for name, stage in cfg.stages.items():
    built = parts(cfg, name)
    built.pipeline.check()
    _check_paths(name, stage, built)
    plans[name] = built.plan
  return plans


def make(
    cfg: schema.Run, name: str, workdir: str, position: int,
    stop: preemption.Signal,
) -> job.Job:  # fmt: skip
  """Builds a stage and restores its newest checkpoint, if it has one.

  Args:
    cfg: the whole run's options.
    name: of the stage.
    workdir: where the run lives.
    position: end of metrics.jsonl for a stage that has no checkpoint.
    stop: ends waits for servers.
  """
  clock, stage = instrument.Timers(), cfg.stages[name]
  compiling = instrument.CompileCounter().open()
  with clock('setup'):
    built = parts(cfg, name)
    optimizer = optim.make(
        stage.optim, stage.steps * stage.updates_per_rollout
    )
    like, whole = states.shapes(stage, built.model, optimizer, built.mesh)
    folder = os.path.join(workdir, 'checkpoints', name)
    checkpointer = checkpoint.Checkpointer(folder, cfg.checkpoint)
    state, host = checkpointer.restore(like) or (None, {})
    about = _about(cfg, name, built, workdir, host)
    loader = connect.loader(cfg, built, workdir, about, whole)
    base = None
    if stage.lora.rank:
      base = lora.Base(loader.init(), lora.scale(stage.lora))
      about['base'] = weights.base_sums(base.params)
      if host:
        weights.check_base(weights.find(folder), base.params)
    if host:
      built.pipeline.set_state(host['pipeline'])
    else:
      key = jax.random.key(cfg.seed)
      key = jax.random.fold_in(key, list(cfg.stages).index(name))
      state = states.fresh(stage, optimizer, like, base, loader.init, key)
    tree.checksums(state)  # here, so that the first save compiles nothing
    update = _update(stage, built, optimizer, base)
    decoder, references = connect.connect(
        cfg, stage, built, loader, base, stop
    )
  step = host.get('step', 0)
  return job.Job(
      name=name, cfg=stage, workdir=workdir, step=step, state=state, base=base,
      pipeline=built.pipeline, update=update, engine=decoder,
      references=references, evaluator=built.evaluator,
      checkpointer=checkpointer, save_every=cfg.checkpoint.every,
      exporter=_exporter(cfg, name, workdir, built),
      writer=_writer(cfg, workdir, host.get('metrics_position', position)),
      progress=metrics.Progress(name, stage.steps, step, cfg.metrics.progress),
      clock=clock, compiling=compiling, about=about,
  )  # fmt: skip


def end_of(cfg: schema.Run, name: str, workdir: str) -> int | None:
  """Where in metrics.jsonl a finished stage ends; None if it is unfinished.

  Raises:
    ValueError: it was trained for more steps than the config now says.
  """
  folder = os.path.join(workdir, 'checkpoints', name)
  if not _has_steps(folder):
    return None
  host = checkpoint.read_host(folder)
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


def _check_slots(mesh: jax.sharding.Mesh, slots: int, key: str) -> None:
  ways = mesh.shape['data'] * mesh.shape['fsdp']
  if slots % ways:
    raise ValueError(
        f'{key} must be a multiple of data x fsdp = {ways}: got {slots}'
    )


def _check_paths(name: str, stage: schema.Stage, built: Parts) -> None:
  """Refuses weights from outside of the run that are of another model."""
  named = [(stage.init, 'init', 'weights of this model', weights.check)]
  for reference, key in built.pipeline.references.items():
    named.append((reference, key, 'a model with these tokens', refs.check))
  for model, key, what, check in named:
    try:
      if isinstance(model, schema.Endpoint):
        _meet(model, built.renderer, f'config.{name}.{key}')
      elif refs.is_path(model):
        check(weights.find(model), built.model, built.renderer)
    except ValueError as error:
      raise ValueError(
          f'config.{name}.{key} must name {what}: got {str(model)!r}; {error}'
      ) from error


def _meet(model: schema.Endpoint, renderer: chat.Renderer, key: str) -> None:
  """Asks a server who it is, once: it may come up later than the run."""
  once = dataclasses.replace(model, tries=1, timeout=min(model.timeout, 10.0))
  with contextlib.closing(endpoint.Endpoint(once, key)) as made:
    try:
      made.check(renderer)
    except endpoint.EndpointError as error:
      if error.status is not None:
        raise ValueError(str(error)) from error
      logging.getLogger('absl').warning('not there yet: %s', error)


def _about(cfg, name, built: Parts, workdir, host) -> dict[str, Any]:
  """What every checkpoint of the stage says of itself; `host` did already."""
  if host:
    chat.check_fingerprint(
        built.renderer.fingerprint, host['tokenizer'], 'config.tokenizer',
        'the checkpoint to go on from',
    )  # fmt: skip
  start, pinned = host.get('start'), host.get('references')
  if start is None:
    start = refs.resolve(cfg.stages[name].init, workdir)
  if pinned is None:
    pinned = {
        x: refs.resolve(x, workdir) for x in built.pipeline.references
        if isinstance(x, str)
    }  # fmt: skip
  return {
      'stage': name,
      'model': dataclasses.asdict(built.model),
      'tokenizer': built.renderer.fingerprint,
      'config': config.to_dict(cfg),
      'start': start,
      'references': pinned,
  }


def _writer(cfg, workdir, position: int) -> metrics.Writer:
  folder = os.path.join(workdir, 'tensorboard')
  return metrics.Writer(
      os.path.join(workdir, 'metrics.jsonl'), position,
      folder if cfg.metrics.tensorboard else None,
  )  # fmt: skip


def _exporter(cfg, name, workdir, built: Parts) -> token_export.Exporter:
  return token_export.Exporter(
      cfg.metrics.export_tokens, workdir, name, built.model,
      tuple(built.pipeline.envs), built.mesh,
  )


def _update(stage: schema.Stage, built: Parts, optimizer, base):
  objective = objectives.KINDS[stage.kind](
      built.model, tuple(built.pipeline.envs), stage.loss
  )
  return train_step.make_train_step(
      objective, optimizer, mesh=built.mesh, rules=transformer.SHARDING_RULES,
      average=stage.optim.average, updates=stage.updates_per_rollout,
      base=base,
  )  # fmt: skip
