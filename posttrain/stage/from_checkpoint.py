"""What commands share that ask a checkpoint: which stage, and its engine."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from posttrain import compilation, schema, sharding
from posttrain.checkpoints import store, weights
from posttrain.config import checks
from posttrain.config import load as config
from posttrain.decode import engine as engines
from posttrain.models import transformer
from posttrain.stage import components
from posttrain.stage import models as stage_models
from posttrain.util import memory


def stage_of(
  folder: str,
  path: str | None = None,
  stage: str | None = None,
  overrides: Sequence[tuple[str, str]] = (),
) -> tuple[schema.Run, str]:
  """Returns the options, and the name of the stage whose tasks are asked.

  Args:
    folder: of `weights.find`; a run's has the options it was trained by.
    path: of a recipe that is taken instead, see `config.load`.
    stage: its name; None = that of the folder, or the recipe's last.
    overrides: (dotted key, value as on the command line), in their order.

  Raises:
    ValueError: the options are wrong, or there is no such stage.
  """
  if path is not None:
    node = config.load(path)
  elif not weights.is_run(folder):
    raise ValueError(
      f'--config=FILE must be given: {folder} says nothing of tasks'
    )
  else:
    host = store.read_host(folder)
    node, stage = config.from_dict(host['config']), stage or host['stage']
    # With the keys that the program had not yet when the run was started.
    node = config.from_dict(config.to_dict(config.build(node)))
  for key, value in overrides:
    config.override(node, key, value)
  run = config.build(node)
  checks.check(run)
  stage = stage or list(run.stages)[-1]
  if stage not in run.stages:
    raise ValueError(
      f'--stage must be one of {tuple(run.stages)}: got {stage!r}'
    )
  return run, stage


def engine(
  run: schema.Run, name: str, folder: str, room: int = 0
) -> tuple[components.Parts, engines.Engine, Callable[[str], None]]:
  """Returns a stage's parts, an engine without weights, and who loads them.

  The last takes a folder; the weights are averages where a run kept such, as
  evaluation measures.

  Args:
    run: of `stage_of`.
    name: of the stage.
    folder: of `weights.find`, whose weights shall fit.
    room: tokens that an episode may have, whatever the stage needs itself.

  Raises:
    ValueError: something does not fit.
  """
  memory.keep_freed_memory()
  compilation.enable_compilation_cache(run.compilation_cache)
  built = components.make(without_pairs(run, name), name, room)
  weights.check(folder, built.model, built.renderer)
  like = sharding.placed(
    transformer.shapes(built.model), transformer.SHARDING_RULES, built.mesh
  )
  made = stage_models.engine(run, run.stages[name], built)

  versions = itertools.count()

  def load(folder: str) -> None:
    params = weights.load(folder, like, average=True)
    made.set_params(params, next(versions))

  return built, made, load


def without_pairs(run: schema.Run, name: str) -> schema.Run:
  """Returns a run whose stage reads no file of pairs: who asks needs none."""
  stage = run.stages[name]
  if not isinstance(stage.pairs, schema.PairFile):
    return run
  stage = dataclasses.replace(stage, pairs=schema.MadePairs())
  return dataclasses.replace(run, stages={**run.stages, name: stage})
