"""A stage with the weights of a checkpoint, in a command that trains nothing.

1. `stage_of`: the options, of the checkpoint or of a recipe.
2. `components` and `player`: the stage, and an engine that plays its tasks.
3. `Policies` and `RewardModels`: rewards of the pairs that the stage held out,
   under the weights in any folder. With a preference loss the rewards are
   implicit ones, against the logprobs of the loss's reference.

Each pair is an `Answer`, so that two models are compared pair by pair:

    accuracy   1 if the chosen answer has the higher reward, 0 if it has the
               lower one, 0.5 where both are equal
    margin     reward of the chosen answer minus that of the rejected one

Training logs their means as `eval/pairs/rewards/accuracies` and
`eval/pairs/rewards/margins`, see `pair_objectives`.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain import compilation, config, schema, sharding, types
from posttrain.chat import rendering
from posttrain.checkpoints import weights
from posttrain.config import checks
from posttrain.data import preferences
from posttrain.evaluation import answers, measures
from posttrain.losses import preference
from posttrain.models import transformer
from posttrain.pipeline import pair_data
from posttrain.rollout import frozen_models
from posttrain.stage import models, pairs, preflight
from posttrain.util import memory, preemption

PAIRS = 'pairs'  # stands for an environment in the names of the values


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
      and server, see `config.checks`.
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
    for name in trained:
      built = _reporting(built, name)
    node = config.from_dict(config.to_dict(built))
  config.override_all(node, overrides)
  run = config.build(node)
  if where is not None:
    untracked = dataclasses.replace(run, metrics=schema.Metrics())
    checks.check_trust(untracked, where, overrides, trust_config)
  checks.check(run)
  stage = stage or list(run.stages)[-1]
  if stage not in run.stages:
    raise ValueError(
      f'--stage must be one of {tuple(run.stages)}: got {stage!r}'
    )
  # Warns of tasks that `eval.best` was measured on and that are played now.
  played = run.stages[stage]
  if stage in trained and (selects := trained[stage].eval.selects) is not None:
    env, by = selects[1], trained[stage].eval
    first = by.skip + by.prompts
    same = env in played.envs and (
      played.envs[env].env == trained[stage].envs[env].env
    )
    if same and played.eval.reports(first, by.best_prompts):
      warnings.warn(
        f'config.{stage}.eval.prompts should be at most '
        f'{first - played.eval.skip}: got {played.eval.prompts}; the weights '
        f'of stage {stage!r} were chosen by tasks of environment {env!r} after '
        'those',
        stacklevel=2,
      )
  return _with_eval(run, stage, **changes), stage


class Player:
  """Plays episodes of a stage's environments with weights from folders."""

  def __init__(self, components: models.Components):
    """Builds an engine without weights, see `load`."""
    self.components = components
    self._engine = models.make_engine(components)
    self.driver = models.make_driver(components, self._engine)
    self._versions = itertools.count()
    self.params: Any = None  # of the whole model
    self._like = sharding.placed(
      transformer.shapes(components.model),
      transformer.SHARDING_RULES,
      components.mesh,
    )

  def measures(self) -> measures.Measures:
    """Returns the measures of the stage's tasks beside their grade."""
    return models.make_measures(self.components, self._engine)

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
  min_capacity: preflight.MinCapacity | None = None,
) -> Player:
  """Builds the player of a stage.

  Args:
    run: the options, from `stage_of`.
    name: the stage's name.
    folder: a folder from `weights.find`, whose weights must fit.
    min_capacity: further tokens that a slot must hold.

  Raises:
    ValueError: options, data and weights do not fit each other.
  """
  built = Player(components(run, name, min_capacity))
  built.check(folder)
  return built


def components(
  run: schema.Run, name: str, min_capacity: preflight.MinCapacity | None = None
) -> models.Components:
  """Builds the components of a stage in a process that trains nothing.

  Args:
    run: the options, from `stage_of`.
    name: the stage's name.
    min_capacity: further tokens that a slot must hold.
  """
  memory.keep_freed_memory()
  compilation.enable_compilation_cache(run.compilation_cache)
  resolved = preflight.resolve(for_playing(run, name))
  return preflight.make(resolved, name, min_capacity)


def for_playing(run: schema.Run, name: str) -> schema.Run:
  """Returns a run whose stage has no file of pairs, and does not select.

  Playing needs no pairs, and reports one measurement; all devices decode,
  split over `tensor` as a sampler's own were.
  """
  own, mesh = run.mesh.sampler, run.mesh
  if own is not None:
    mesh = schema.Mesh(tensor=own.tensor)
  run = _reporting(dataclasses.replace(run, mesh=mesh), name)
  if isinstance(run.stages[name].pairs, schema.PairFile):
    run = _with(run, name, pairs=schema.MadePairs())
  return run


def _reporting(run: schema.Run, name: str) -> schema.Run:
  """Returns a run whose stage is evaluated, and selects nothing by it."""
  return _with_eval(
    run,
    name,
    best=None,
    best_prompts=schema.Eval.best_prompts,
    patience=None,
    stop_at=None,
    max_sampled_tokens=2**40,  # as many prompts as it says
  )


def _with_eval(run: schema.Run, name: str, **changes: Any) -> schema.Run:
  """Returns a run with other options of a stage's evaluation."""
  evaluation = dataclasses.replace(run.stages[name].eval, **changes)
  return _with(run, name, eval=evaluation)


def _with(run: schema.Run, name: str, **changes: Any) -> schema.Run:
  """Returns a run with other options of a stage."""
  stage = dataclasses.replace(run.stages[name], **changes)
  return dataclasses.replace(run, stages={**run.stages, name: stage})


class Policies:
  """Implicit rewards of held-out pairs, under one policy after another."""

  def __init__(self, run: schema.Run, own: models.Components, folder: str):
    """Scores the pairs under the reference, which is then released.

    Args:
      run: the run's options, with the stage's file of pairs.
      own: the components of a stage of kind 'preference'.
      folder: folder of the first policy's weights. A reference of a stage that
        wrote it is the one that the stage began with.

    Raises:
      ValueError: there are no pairs, or no reference.
      EndpointError: the reference is behind a server that does not answer.
    """
    self._pairs, self._loss = held_out(run, own, folder), own.stage.loss
    reference = getattr(self._loss.preference, 'reference', None)
    workdir, folders = _workdir(folder), {}
    if isinstance(reference, str) and not frozen_models.tracks_policy(
      reference
    ):
      host, pinned = weights.read(folder).host, {}
      if host.get('stage') == own.name:
        pinned = {**(host.get('references') or {}), 'init': host['start']}
      name = own.stage.init if reference == 'init' else reference
      path = pinned.get(reference) or preflight.resolve_folder(name, workdir)
      folders = {reference: path}
    like = sharding.placed(
      transformer.shapes(own.model), transformer.SHARDING_RULES, own.mesh
    )
    self._models = _models(own, workdir, folders, like)
    self._ref_logprobs = np.zeros(len(self._pairs.samples))
    if reference is not None:
      self._ref_logprobs = self._logprobs(reference)

  def __call__(self, params: Any) -> list[answers.Answer]:
    """Returns the pairs with their rewards.

    Args:
      params: the policy's parameters.
    """
    loss = self._loss.preference
    rewards = loss.beta * preference.per_answer(
      loss.type,
      self._logprobs('policy', params) - self._ref_logprobs,
      [max(int(x.mask.sum()), 1) for x in self._pairs.samples],
    )
    renderer = self._models.components.renderer
    return pair_answers(self._pairs.pairs, rewards, renderer)

  def _logprobs(
    self, model: schema.Reference, params: Any = None
  ) -> np.ndarray:
    """Returns the log probability of each answer, f64, nats.

    One program scores policies and reference, so that the reference has
    rewards of exactly 0.
    """
    samples = self._pairs.samples
    with contextlib.closing(self._models.make_references()) as scorer:
      scorer.set_policy({'policy': params})
      scores = scorer(model, samples)
    return np.array(pairs.answer_logprobs(scores, samples))


class RewardModels:
  """Rewards of held-out pairs, under one reward model after another."""

  def __init__(self, run: schema.Run, own: models.Components, folder: str):
    """Reads the pairs.

    Args:
      run: the run's options, with the stage's file of pairs.
      own: the components of a stage of kind 'ranking'.
      folder: folder of the first model's weights.

    Raises:
      ValueError: it has no reward model of these tokens, or there are no pairs.
    """
    self._own = own
    self.check(folder)
    self._pairs = held_out(run, own, folder)

  def check(self, folder: str) -> None:
    """Refuses a folder without a reward model of these tokens."""
    preflight.check_reward_model(folder, self._own.model, self._own.renderer)

  def __call__(self, folder: str) -> list[answers.Answer]:
    """Returns the pairs with their rewards, under the weights in a folder."""
    own = _models(self._own, '', {folder: folder})
    model = own.load.reward_model(folder, own.make_scorer)
    rewards = np.array(model.rewards(self._pairs.samples))
    return pair_answers(self._pairs.pairs, rewards, self._own.renderer)


def _models(
  own: models.Components,
  workdir: str,
  folders: dict[str, str],
  like: Any = None,
) -> models.Models:
  """Returns the models of a stage that does not train, see `Loader`."""
  load = preflight.Loader(
    own.cfg.seed, workdir, folders, like, own.model, own.renderer, own.mesh
  )
  return models.Models(own, load, None, preemption.Signal())


def held_out(
  run: schema.Run, own: models.Components, folder: str
) -> preferences.TokenizedPairs:
  """Returns the held-out pairs of a stage that have two answers.

  Of a run whose `eval.best` is measured on pairs, the half that is reported.

  Args:
    run: the run's options, with the stage's file of pairs.
    own: the stage's components.
    folder: a folder from `weights.find`; a step of the run that made the
      pairs, where no file is named.

  Raises:
    ValueError: there are none, or their file cannot be used.
  """
  name, cfg = own.name, run.stages[own.name].pairs
  stage = dataclasses.replace(own.stage, pairs=cfg)
  data = preflight.make_data(*own.spec.seed, name, stage, own.renderer)
  assert isinstance(data, pair_data.PairData), data
  splits = data.splits
  if splits is None:
    assert isinstance(cfg, schema.MadePairs), cfg
    paths = pairs.made_files(cfg, _workdir(folder), name).values()
    for path in paths:
      if not os.path.isfile(path):
        raise ValueError(
          f'stage {name!r} must have made its pairs: got no {path}; or name a '
          f'file, with --config.{name}.pairs'
        )
    splits = data.split(*map(preferences.read, paths))
  # The options of the run that wrote the folder count, where one did.
  best = run.stages[name].eval.best
  checkpoint = weights.read(folder)
  if checkpoint.kind == 'run':
    stored = checkpoint.host['config'].get(name, {})
    best = stored.get('eval', {}).get('best', best)
  selects = bool(best) and schema.Eval(best=best).selects_pairs
  reported, _ = splits.evaluated(selects)
  both = tuple(
    pair
    for pair in reported.pairs
    if pair.chosen is not None and pair.rejected is not None
  )
  if not both:
    raise ValueError(
      f'stage {name!r} must hold out pairs of two answers: got 0'
    )
  return preferences.TokenizedPairs(both)


def _workdir(folder: str) -> str:
  """Returns the run's folder of a step, else the current one."""
  if weights.read(folder).kind != 'run':
    return os.getcwd()
  return str(pathlib.Path(folder).parents[2])


def pair_answers(
  pairs: Sequence[types.Pair], rewards: np.ndarray, renderer: rendering.Renderer
) -> list[answers.Answer]:
  """Returns the pairs as answers, each the chosen one, with both measures.

  Args:
    pairs: pairs of two answers.
    rewards: f64[2 N], of the chosen and the rejected answer of each pair.
    renderer: decodes the answers.

  Raises:
    ValueError: a reward is not finite.
  """
  finite = np.isfinite(rewards)
  if not finite.all():
    raise ValueError(
      f'rewards of held-out pairs must be finite: got {rewards[~finite][0]}, '
      f'for {int((~finite).sum())} of {len(rewards)} answers'
    )
  result, decode = [], renderer.tokenizer.decode
  margins = (rewards[::2] - rewards[1::2]).tolist()
  for index, (pair, margin) in enumerate(zip(pairs, margins, strict=True)):
    sample = pair.chosen
    assert sample is not None, 'a pair of two answers'
    start = int(np.argmax(sample.mask))
    prompt = decode(sample.ids[:start].tolist())
    answer = answers.Answer(
      env=PAIRS,
      id=str(index),
      prompt=prompt,
      text=decode(sample.ids[start:].tolist()),
      tokens=int(sample.mask.sum()),
      question=prompt,
      measures={'accuracy': (np.sign(margin) + 1) / 2, 'margin': margin},
    )
    result.append(answer)
  return result


def pair_metrics(pairs: Sequence[answers.Answer]) -> dict[str, float]:
  """Returns {'eval/<measure>/pairs': mean}, with 95 % intervals over pairs."""
  values = {}
  for name in ('accuracy', 'margin') if pairs else ():
    each: list[float | None] = [answer.measures[name] for answer in pairs]
    summary = measures.summary(name, (each, [1.0] * len(each)))
    values |= {f'eval/{k}/{PAIRS}': value for k, value in summary.items()}
  return values
