"""A stage with the weights of a checkpoint: components, and a player.

Shared by the commands that sample from a checkpoint and train nothing.
"""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from posttrain import compilation, config, schema, sharding
from posttrain.chat import rendering
from posttrain.checkpoints import weights
from posttrain.config import checks, trust
from posttrain.evaluation import measures as measures_lib
from posttrain.models import transformer
from posttrain.pipeline import base
from posttrain.stage import components as components_lib
from posttrain.stage import models as stage_models
from posttrain.stage import preflight
from posttrain.util import memory


def stage_of(
  folder: str,
  path: str | None = None,
  stage: str | None = None,
  overrides: Sequence[tuple[str, str]] = (),
  trust_config: bool = False,
  **changes: Any,
) -> tuple[schema.Run, str]:
  """Returns the run's options, and the name of the stage to play.

  Args:
    folder: folder of the weights, from `weights.find`; a run's
      checkpoint holds the options that it was trained with.
    path: a recipe that replaces those options, see `config.load`.
    stage: the stage's name; None = the checkpoint's, or the recipe's last.
    overrides: (dotted key, value as on the command line), in their order.
    trust_config: whether a checkpoint or a config.json may name any function
      and server, see `config.trust`.
    **changes: options of the stage's evaluation, after all others.

  Raises:
    ValueError: the options are wrong, or there is no such stage.
  """
  where = None  # the place of options that the user did not write
  trained: dict[str, schema.Stage] = {}
  if path is not None:
    node = config.load(path)
    if config.is_json(path):
      where = path
  elif (checkpoint := weights.read(folder)).kind != 'run':
    raise ValueError(
      f'--config=FILE must be given: {folder} has no options of tasks, but a '
      'recipe has, as --config=sft:DIR,data.jsonl'
    )
  else:
    host = checkpoint.host
    where, stage = folder, stage or host['stage']
    # Adds the defaults of options that are newer than the checkpoint.
    built = config.build(config.from_dict(host['config'], folder))
    if built.compilation_cache is not None:
      # Compiled programs are run: their folder is this user's.
      cache = schema.Run.compilation_cache
      built = dataclasses.replace(built, compilation_cache=cache)
    # Overrides may replace the environments that a selection is of.
    trained = built.stages
    stages = {
      name: dataclasses.replace(x, eval=_reporting(x.eval))
      for name, x in trained.items()
    }
    built = dataclasses.replace(built, stages=stages)
    node = config.from_dict(config.to_dict(built))
  for key, value in overrides:
    config.override(node, key, value)
  run = config.build(node)
  if where is not None:
    trust.check(run, where, overrides, trust_config, trackers=False)
  checks.check(run)
  stage = stage or list(run.stages)[-1]
  if stage not in run.stages:
    raise ValueError(
      f'--stage must be one of {tuple(run.stages)}: got {stage!r}'
    )
  if stage in trained:
    _warn_of_selection(trained[stage], run.stages[stage], stage)
  return _with_eval(run, stage, **changes), stage


def _with_eval(run: schema.Run, name: str, **changes: Any) -> schema.Run:
  """Returns a run with other options of a stage's evaluation."""
  stage = run.stages[name]
  evaluation = dataclasses.replace(stage.eval, **changes)
  stage = dataclasses.replace(stage, eval=evaluation)
  return dataclasses.replace(run, stages={**run.stages, name: stage})


def _warn_of_selection(
  trained: schema.Stage, played: schema.Stage, name: str
) -> None:
  """Warns of tasks that `eval.best` was measured on and that are played now."""
  if trained.eval.selects is None:
    return
  env, reported = trained.eval.selects[1], trained.eval.prompts
  same = env in played.envs and played.envs[env].env == trained.envs[env].env
  if same and played.eval.prompts > reported:
    last = min(played.eval.prompts, reported + trained.eval.best_prompts)
    warnings.warn(
      f'config.{name}.eval.prompts should be at most {reported}: got '
      f'{played.eval.prompts}; the weights of stage {name!r} were chosen by '
      f'tasks {reported + 1} to {last} of environment {env!r}',
      stacklevel=2,
    )


class Player:
  """Plays episodes of a stage's environments with weights from folders."""

  def __init__(self, components: components_lib.Components):
    """Builds an engine without weights, see `load`."""
    self.components = components
    self._engine = stage_models.engine(components)
    self.driver = stage_models.driver(components, self._engine)
    self._versions = itertools.count()
    self.params: Any = None  # of the whole model
    self._like = sharding.placed(
      transformer.shapes(components.model),
      transformer.SHARDING_RULES,
      components.mesh,
    )

  def measures(self) -> measures_lib.Measures:
    """Returns the measures of the stage's tasks beside their grade."""
    return stage_models.measures(self.components, self._engine)

  def check(self, folder: str) -> None:
    """Refuses weights of another model or other tokens; reads none.

    Args:
      folder: a folder from `weights.find`.
    """
    weights.check(folder, self.components.model, self.components.renderer)

  def load(self, folder: str) -> None:
    """Plays with the weights of a folder, averaged where a run has averages."""
    self.set_params(weights.load(folder, self._like, average=True))

  def set_params(self, params: Any) -> None:
    """Plays with the given parameters of the whole model."""
    self._engine.set_params(params, next(self._versions))
    self.params = params


def player(
  run: schema.Run,
  name: str,
  folder: str,
  min_capacity: Callable[[rendering.Renderer, base.StageData], int]
  | None = None,
) -> Player:
  """Builds the player of a stage.

  Args:
    run: the options, from `stage_of`.
    name: the stage's name.
    folder: a folder from `weights.find`, whose weights must fit.
    min_capacity: returns the tokens that a sequence may have at least.

  Raises:
    ValueError: options, data and weights do not fit each other.
  """
  parts = components(for_playing(run, name), name, min_capacity)
  weights.check(folder, parts.model, parts.renderer)
  return Player(parts)


def components(
  run: schema.Run,
  name: str,
  min_capacity: Callable[[rendering.Renderer, base.StageData], int]
  | None = None,
) -> components_lib.Components:
  """Builds the components of a stage in a process that trains nothing.

  Args:
    run: the options, from `stage_of`.
    name: the stage's name.
    min_capacity: returns the tokens that a sequence may have at least.
  """
  memory.keep_freed_memory()
  compilation.enable_compilation_cache(run.compilation_cache)
  return preflight.make(run, name, min_capacity=min_capacity)


def for_playing(run: schema.Run, name: str) -> schema.Run:
  """Returns a run whose stage has no file of pairs, and does not select.

  Playing needs no pairs, and reports one measurement.
  """
  stage = run.stages[name]
  if isinstance(stage.pairs, schema.PairFile):
    stage = dataclasses.replace(stage, pairs=schema.MadePairs())
  stage = dataclasses.replace(stage, eval=_reporting(stage.eval))
  return dataclasses.replace(run, stages={**run.stages, name: stage})


def _reporting(cfg: schema.Eval) -> schema.Eval:
  """Returns the options of an evaluation that selects nothing."""
  names = ('best', 'best_prompts', 'patience')
  defaults = {name: getattr(schema.Eval, name) for name in names}
  return dataclasses.replace(cfg, **defaults)
