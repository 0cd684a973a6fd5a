"""Makes the models of a stage, and introduces them to who asks them.

engine       decodes by the policy's weights, for training and evaluation
references   score under the policy, now, earlier or at first, and others
players      one engine more per frozen model that samples
judges       one more per model that is asked for its opinion
rewards      of reward models
"""

import functools
import os
from typing import Any

import jax

from posttrain import schema, scoring
from posttrain.decode import engine as engines
from posttrain.evaluation import evaluator as evaluation
from posttrain.models import transformer
from posttrain.pipeline import tokens as token_pipeline
from posttrain.rollout import driver as drivers
from posttrain.rollout import references as refs
from posttrain.rollout.endpoint import client
from posttrain.rollout.endpoint import engine as endpoint_engine
from posttrain.rollout.grading import models as reward_models
from posttrain.rollout.grading import rewards
from posttrain.util import preemption


def engine(cfg: schema.Run, stage: schema.Stage, built) -> engines.Engine:
  """Makes a stage's engine, without weights; `built` are its parts."""
  return _engine(cfg, stage, built, built.model)


def _engine(cfg, stage, built, model: schema.Model) -> engines.Engine:
  rollout = stage.rollout
  return engines.Engine(
    model,
    slots=rollout.slots,
    capacity=built.plan.slot_tokens,
    chunk=rollout.chunk,
    prefill_rows=rollout.prefill_rows,
    prefill_tokens=rollout.prefill_tokens,
    seed=cfg.seed,
    mesh=built.mesh,
  )


def loader(
  cfg: schema.Run, built, workdir: str, about: dict[str, Any], like: Any
) -> refs.Loader:
  """Makes initial weights and references; `like`: shapes and shardings."""
  return refs.Loader(
    jax.jit(
      lambda: transformer.init(jax.random.key(cfg.seed), built.model),
      out_shardings=jax.tree.map(lambda x: x.sharding, like),
    ),
    workdir,
    {**about['references'], 'init': about['start']},
    like,
    built.model,
    built.renderer,
    built.mesh,
  )


def connect(
  cfg: schema.Run,
  stage: schema.Stage,
  built,
  load: refs.Loader,
  base: Any,
  stop: preemption.Signal,
) -> tuple[engines.Engine, refs.References, evaluation.Evaluator]:
  """Makes the engine, the references and the evaluator.

  Args:
    cfg: the whole run's options.
    stage: this one's.
    built: its parts.
    load: of `loader`.
    base: the frozen weights, with LoRA.
    stop: ends waits for servers.

  Raises:
    ValueError: a reference is not what it was, or speaks other tokens.
    EndpointError: a server is not there.
    Preempted: `stop` ended the wait for it.
  """
  made = engine(cfg, stage, built)
  models = references(built, load, base, stop)
  plays = isinstance(built.pipeline, token_pipeline.Pipeline)
  asked = built.pipeline.references if plays else {}  # of pairs: they were
  for model, key in asked.items():
    if isinstance(model, schema.Endpoint):  # missed now, if it is not there
      try:
        models.endpoint(model, key)
      except client.EndpointError:
        stop.check(f'{key}, before its stage')
        raise
  row_tokens = stage.batch.row_tokens
  players = {
    model: drivers.Driver(
      _player(cfg, stage, built, models, model),
      built.renderer,
      row_tokens,
      stage.rollout,
    )
    for model in built.pipeline.players
  }
  players['policy'] = drivers.Driver(
    made, built.renderer, row_tokens, stage.rollout
  )
  judge = functools.partial(_judge, cfg, stage, built, models)
  if plays:
    reward_model = functools.partial(_reward_model, built, load)
    built.pipeline.connect(
      players, models, functools.cache(judge), functools.cache(reward_model)
    )
  evaluator = evaluation.Evaluator(
    built.eval_tasks,
    drivers.Driver(made, built.renderer, built.capacity, stage.rollout),
    models,
  )
  return made, models, evaluator


def references(
  built, load: refs.Loader, base: Any, stop: preemption.Signal
) -> refs.References:
  """Makes the references of a stage, which hold no model yet.

  Args: as of `connect`.
  """
  rows = built.pipeline.shape[1]
  made = refs.References(
    built.model,
    built.renderer,
    lambda model, width: scoring.Scorer(model, rows, width, built.mesh),
    capacity=built.capacity,
    load=load,
    held=None if base is None else {'init': base.params},
  )
  stop.wakes(made.close)
  return made


def _player(cfg, stage, built, references: refs.References, model):
  """An engine that plays by a frozen model."""
  if isinstance(model, schema.Endpoint):
    names = [
      name
      for name, run in built.pipeline.envs.items()
      if run.sampler.model == model
    ]
    who = f'environment {", ".join(names)}'
    return endpoint_engine.Engine(references.endpoint(model), who, cfg.seed)
  frozen = references.model(model)
  made = _engine(cfg, stage, built, frozen.cfg)
  made.set_params(frozen.params, -1)
  return made


def _reward_model(
  built, load: refs.Loader, name: str
) -> reward_models.RewardModel:
  """A reward model, on the devices as long as the stage lasts."""
  rows = built.pipeline.shape[1]
  return reward_models.load(
    name,
    os.path.join(load.workdir, load.folders[name]),
    built.model,
    lambda model: scoring.Scorer(
      model, rows, built.capacity, built.mesh, reward=True
    ),
    built.mesh,
  )


def _judge(
  cfg, stage, built, references: refs.References, model: schema.Reference
) -> rewards.Judge:
  """An engine of its own: who is asked may be asked while others decode."""
  if isinstance(model, schema.Endpoint):
    who = built.pipeline.references[model]  # the key that names it
    return functools.partial(references.endpoint(model).chat, who=who)
  frozen = references.model(model)
  # Of any length: what is asked of a judge is longer than what trains.
  made = engines.Engine(frozen.cfg, slots=stage.rollout.slots, seed=cfg.seed)
  made.set_params(frozen.params, -1)
  return rewards.LocalJudge(made, built.renderer)
