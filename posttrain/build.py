"""Builds a stage: from options to a `Job`, restored to where it stood.

1. `parts`: what can be made without compiling anything.
2. `preflight`: the parts of every stage, and a look at its data.
3. `make`: the state, restored or initial, and the job around it.
"""

import dataclasses
import os

import jax

from posttrain import (
    arrays,
    checkpoint,
    config,
    evaluation,
    instrument,
    job,
    metrics,
    objectives,
    optim,
    plan,
    schema,
    scoring,
    sharding,
    train_step,
)
from posttrain import pipeline as pipelines
from posttrain.chat import renderer as chat
from posttrain.decode import engine as engines
from posttrain.models import transformer
from posttrain.rollout import driver as drivers
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
    ValueError: mesh, batch, vocabulary, environments or data do not fit.
  """
  stage = cfg.stages[name]
  renderer = chat.load(cfg.tokenizer)
  size = renderer.tokenizer.vocab_size
  model = stage.model or cfg.model
  if model.vocab_size is not None and model.vocab_size < size:
    raise ValueError(
        f"config.model.vocab_size must hold the tokenizer's {size} tokens: "
        f'got {model.vocab_size}'
    )
  model = dataclasses.replace(model, vocab_size=model.vocab_size or size)
  mesh = sharding.make_mesh(cfg.mesh)
  pipeline = pipelines.Pipeline(
      stage, renderer, cfg.seed, list(cfg.stages).index(name)
  )
  sharding.check_batch(mesh, pipeline.shape[1], f'config.{name}.batch')
  evaluator = evaluation.Evaluator(
      {name: run.env for name, run in pipeline.envs.items()}, renderer,
      stage.eval, cfg.seed,
  )  # fmt: skip
  capacity = evaluator.max_length
  if pipeline.live:
    capacity = max(capacity, stage.batch.row_tokens)
  table = plan.make(name, stage, model, dict(mesh.shape), capacity)
  return Parts(renderer, model, mesh, pipeline, evaluator, capacity, table)


def preflight(cfg: schema.Run) -> dict[str, plan.Plan]:
  """Builds every stage's parts, looks at its data; returns the plans.

  Raises:
    ValueError: whatever can be seen to be wrong without compiling anything.
  """
  plans = {}
  for name, stage in cfg.stages.items():
    built = parts(cfg, name)
    built.pipeline.check()
    if stage.init != 'random' and not stage.init.startswith('stage:'):
      _check_init(stage.init, built.renderer)
    plans[name] = built.plan
  return plans


def make(cfg: schema.Run, name: str, workdir: str, position: int) -> job.Job:
  """Builds a stage and restores its newest checkpoint, if it has one.

  Args:
    cfg: the whole run's options.
    name: of the stage.
    workdir: where the run lives.
    position: end of metrics.jsonl for a stage that has no checkpoint.
  """
  clock, stage = instrument.Timers(), cfg.stages[name]
  compiling = instrument.CompileCounter().open()
  with clock('setup'):
    built = parts(cfg, name)
    optimizer = optim.make(
        stage.optim, stage.steps * stage.updates_per_rollout
    )
    checkpointer = checkpoint.Checkpointer(
        os.path.join(workdir, 'checkpoints', name), cfg.checkpoint
    )
    state, host = _restore(stage, built, optimizer, checkpointer)
    start = host.get('start') or _start(stage.init, workdir)
    if not host:
      state = _initial(cfg, stage, built, optimizer, workdir, start)
    engine, references = _connect(cfg, stage, built, optimizer, workdir, start)
  if host:
    _check_same_tokens(host, built.renderer)
    built.pipeline.set_state(host['pipeline'])
    position = host['metrics_position']
  step = host.get('step', 0)
  folder = os.path.join(workdir, 'tensorboard')
  return job.Job(
      name=name, cfg=stage, workdir=workdir, step=step, state=state,
      pipeline=built.pipeline,
      update=train_step.make_train_step(
          objectives.KINDS[stage.kind](
              built.model, tuple(built.pipeline.envs), stage.loss
          ),
          optimizer, mesh=built.mesh, rules=transformer.SHARDING_RULES,
          average=stage.optim.average, updates=stage.updates_per_rollout,
      ),
      engine=engine, references=references, evaluator=built.evaluator,
      checkpointer=checkpointer, save_every=cfg.checkpoint.every,
      writer=metrics.Writer(
          os.path.join(workdir, 'metrics.jsonl'), position,
          folder if cfg.metrics.tensorboard else None,
      ),
      progress=metrics.Progress(name, stage.steps, step, cfg.metrics.progress),
      clock=clock, compiling=compiling,
      about={
          'stage': name,
          'model': dataclasses.asdict(built.model),
          'tokenizer': built.renderer.fingerprint,
          'config': config.to_dict(cfg),
          'start': start,
      },
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


def _connect(cfg, stage, built: Parts, optimizer, workdir, start: str):
  """Makes the engine and the references, and introduces them."""
  rollout, rows = stage.rollout, built.pipeline.shape[1]
  engine = engines.Engine(
      built.model, slots=rollout.slots, capacity=built.capacity,
      chunk=rollout.chunk, prefill_rows=rollout.prefill_rows,
      prefill_tokens=rollout.prefill_tokens, seed=cfg.seed, mesh=built.mesh,
  )  # fmt: skip
  like = _like(stage, built, optimizer).params
  references = refs.References(
      scoring.Scorer(built.model, rows, stage.batch.row_tokens, built.mesh),
      refs.Loader(
          lambda: _initial(cfg, stage, built, optimizer, workdir, start).params,
          workdir, like, built.renderer.fingerprint,
      ),
  )  # fmt: skip
  built.pipeline.connect(
      drivers.Driver(engine, built.renderer, stage.batch.row_tokens),
      references,
  )
  built.evaluator.connect(
      drivers.Driver(engine, built.renderer, built.capacity)
  )
  return engine, references


def _restore(stage, built: Parts, optimizer, checkpointer):
  """The newest checkpoint's (state, host), or (None, {}).

  Every array is read straight into its sharding.
  """
  like = _like(stage, built, optimizer)
  return checkpointer.restore(like) or (None, {})


def _start(init: str, workdir: str) -> str:
  """Resolves `init` to what it means now: 'random', or a step's folder.

  Checkpoints keep it, so that a resumed stage finds its initial parameters
  again, whatever was trained since where they came from.
  """
  if init == 'random':
    return init
  kind, _, target = init.partition(':')
  path = init
  if kind == 'stage':
    path = os.path.join(workdir, 'checkpoints', target)
  found, root = str(checkpoint.find(path)), os.path.realpath(workdir)
  inside = os.path.commonpath([found, root]) == root
  return os.path.relpath(found, root) if inside else found


def _initial(cfg, stage, built: Parts, optimizer, workdir, start: str):
  """The state before the first step: random, or another run's weights."""
  like = _like(stage, built, optimizer)
  places = jax.tree.map(lambda x: x.sharding, like)
  average = stage.optim.average is not None

  def fresh(params):
    return train_step.init_state(params, optimizer, average=average)

  if start == 'random':
    key = jax.random.key(cfg.seed)
    init = jax.jit(
        lambda: fresh(transformer.init(key, built.model)),
        out_shardings=places,
    )
    return init()
  path = os.path.join(workdir, start)
  _check_init(path, built.renderer)
  params = checkpoint.restore_params(path, like.params)
  return jax.jit(fresh, out_shardings=places)(params)


def _like(stage, built: Parts, optimizer) -> arrays.TrainState:
  """Shapes, dtypes and shardings of the stage's state."""
  like = jax.eval_shape(
      lambda: train_step.init_state(
          transformer.init(jax.random.key(0), built.model), optimizer,
          average=stage.optim.average is not None,
      )
  )  # fmt: skip
  places = sharding.shardings(like, transformer.SHARDING_RULES, built.mesh)
  return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      like, places,
  )  # fmt: skip


def _check_init(path: str, renderer: chat.Renderer) -> None:
  """Refuses weights that were trained on other tokens."""
  _check_same_tokens(checkpoint.read_host(path), renderer, f' of {path}')


def _check_same_tokens(host, renderer: chat.Renderer, where='') -> None:
  if host['tokenizer'] != renderer.fingerprint:
    raise ValueError(
        f'config.tokenizer must be what the checkpoint{where} was trained '
        'with, template included: its fingerprint is '
        f'{renderer.fingerprint[:12]}, expected {host["tokenizer"][:12]}'
    )
