"""What a stage is made of, before anything is compiled or restored.

1. `make`: renderer, model, mesh, environments, pipeline, eval tasks, plan.
2. `preflight`: the parts of every stage, and a look at its data.
"""

import contextlib
import dataclasses
import logging

import jax

from posttrain import envs, schema, sharding
from posttrain.chat import renderer as chat
from posttrain.checkpoints import weights
from posttrain.evaluation import evaluator as evaluation
from posttrain.models import transformer
from posttrain.pipeline import pairs as pair_pipeline
from posttrain.pipeline import tokens as token_pipeline
from posttrain.rollout import references as refs
from posttrain.rollout.endpoint import client
from posttrain.rollout.grading import models as reward_models
from posttrain.stage import plan
from posttrain.training import state as train_state


@dataclasses.dataclass(frozen=True)
class Parts:
  """What a stage is made of before anything is compiled or restored."""

  renderer: chat.Renderer
  model: schema.Model  # with its vocabulary
  mesh: jax.sharding.Mesh
  envs: dict[str, envs.base.Env]
  pipeline: token_pipeline.Pipeline | pair_pipeline.PairPipeline
  eval_tasks: evaluation.EvalTasks
  capacity: int  # tokens of the longest episode, trained on or not
  plan: plan.Plan


def make(cfg: schema.Run, name: str, room: int = 0) -> Parts:
  """Builds the parts of a stage.

  Args:
    cfg: the whole run's options.
    name: of the stage.
    room: tokens that an episode may have, whatever the stage needs itself.

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
  pipeline, asked = _pipeline(cfg, name, renderer)
  sharding.check_batch(mesh, pipeline.shape[1], f'config.{name}.batch')
  eval_tasks = evaluation.EvalTasks(
    {} if stage.kind == 'ranking' else asked,  # a reward model cannot play
    renderer,
    stage.eval,
    cfg.seed,
    stage.rollout.max_errors,
  )
  capacity = max(eval_tasks.max_length, room)
  turns = max((env.max_turns for env in asked.values()), default=1)
  # What an environment adds between turns is unknown.
  if stage.kind != 'tokens' or (
    pipeline.uses_policy or pipeline.players or turns > 1
  ):
    capacity = max(capacity, stage.batch.row_tokens)
  _check_slots(mesh, stage.rollout.slots, f'config.{name}.rollout.slots')
  room = plan.slot_tokens(capacity, jax.default_backend())
  try:
    table = plan.make(
      name,
      stage,
      model,
      dict(mesh.shape),
      room,
      _held(stage, pipeline, model),
      train_state.ema_and_snapshots(stage),
      len([x for x in pipeline.players if isinstance(x, str)]),
    )
  except schema.FieldError as error:
    raise ValueError(
      f'config.{name}.lora.{error.field} {error.detail}'
    ) from None
  return Parts(
    renderer, model, mesh, asked, pipeline, eval_tasks, capacity, table
  )


def _pipeline(cfg: schema.Run, name: str, renderer: chat.Renderer):
  """What a stage's batches come from, and its environments."""
  stage, index = cfg.stages[name], list(cfg.stages).index(name)
  if stage.kind == 'tokens':
    made = token_pipeline.Pipeline(stage, renderer, cfg.seed, index)
    return made, {name: run.env for name, run in made.envs.items()}
  try:
    made = pair_pipeline.PairPipeline(stage, renderer, cfg.seed, index)
  except ValueError as error:
    raise ValueError(f'config.{name}.pairs cannot be used: {error}') from error
  return made, {k: envs.make(k, entry.env) for k, entry in stage.envs.items()}


def _held(stage, pipeline, model: schema.Model) -> int:
  """Parameters of the models that are held beside the policy."""
  names = {'init'} if stage.eval.kl else set()
  if stage.kind == 'tokens':  # on pairs it is asked once, and not held
    names |= {*pipeline.references, *pipeline.reward_models}
  if stage.lora.rank:
    names -= {'init'}  # it is the frozen weights
  total = 0
  for name in names:
    if isinstance(name, schema.Endpoint) or refs.tracks_policy(name):
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
    built = make(cfg, name)
    built.pipeline.check()
    _check_paths(name, stage, built)
    plans[name] = built.plan
  return plans


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
  for model, key in built.pipeline.reward_models.items():
    named.append((model, key, 'a reward model', reward_models.check))
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
  with contextlib.closing(client.Endpoint(once, key)) as made:
    try:
      made.check(renderer)
    except client.EndpointError as error:
      if error.status is not None:
        raise ValueError(str(error)) from error
      logging.getLogger('absl').warning('not there yet: %s', error)
