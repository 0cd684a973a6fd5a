"""Rewards of a stage's held-out pairs, under the weights in any folder.

1. `held_out`: the pairs that the run of the checkpoint held out.
2. With a preference loss: each answer's logprob under the loss's reference.
3. For each folder: the reward of each answer, see `evaluation.pair_rewards`.
"""

import contextlib
import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

from posttrain import schema, scoring, sharding
from posttrain.checkpoints import weights
from posttrain.data import preferences
from posttrain.evaluation import pair_rewards
from posttrain.models import transformer
from posttrain.pipeline import pairs as pair_pipeline
from posttrain.rollout import frozen_models
from posttrain.stage import components as components_lib
from posttrain.stage import loading, preflight
from posttrain.stage import models as stage_models
from posttrain.stage import pairs as stage_pairs
from posttrain.util import preemption


def held_out(
  run: schema.Run, components: components_lib.Components, folder: str
) -> preferences.TokenizedPairs:
  """Returns the held-out pairs of a stage that have two answers.

  Of a run whose `eval.best` is measured on pairs, the half that is reported.

  Args:
    run: the run's options, with the stage's file of pairs.
    components: the stage's components.
    folder: a folder from `weights.find`; a step of the run that made the
      pairs, where no file is named.

  Raises:
    ValueError: there are none, or their file cannot be used.
  """
  name, renderer = components.name, components.renderer
  cfg = run.stages[name].pairs
  stage = dataclasses.replace(components.stage, pairs=cfg)
  data = preflight.make_data(run, name, stage, renderer)
  assert isinstance(data, pair_pipeline.PairData), data
  splits = data.splits
  if splits is None:
    assert isinstance(cfg, schema.MadePairs), cfg
    files = stage_pairs.made_files(cfg, _workdir(folder), name)
    for path in files.values():
      if not os.path.isfile(path):
        raise ValueError(
          f'stage {name!r} must have made its pairs: got no {path}; or name a '
          f'file, with --config.{name}.pairs=\'{{"type": "file", "path": '
          "...}'"
        )
    splits = data.split(*map(preferences.read, files.values()))
  reported, _ = splits.evaluated(selects_pairs(run.stages[name], name, folder))
  pairs = tuple(
    pair
    for pair in reported.pairs
    if pair.chosen is not None and pair.rejected is not None
  )
  if not pairs:
    raise ValueError(
      f'stage {name!r} must hold out pairs of two answers: got 0'
    )
  return preferences.TokenizedPairs(pairs)


def selects_pairs(stage: schema.Stage, name: str, folder: str) -> bool:
  """Returns whether held-out pairs choose the weights of a stage.

  Args:
    stage: its options, which count unless `folder` is a step of a run with it.
    name: its name.
    folder: a folder from `weights.find`.
  """
  best = stage.eval.best
  checkpoint = weights.read(folder)
  if checkpoint.kind == 'run':
    stored = checkpoint.host['config'].get(name, {})
    best = stored.get('eval', {}).get('best', best)
  return bool(best) and schema.Eval(best=best).selects_pairs


class Policies:
  """Implicit rewards of held-out pairs, under one policy after another."""

  def __init__(
    self, run: schema.Run, components: components_lib.Components, folder: str
  ):
    """Scores the pairs under the reference, which is then released.

    Args:
      run: the run's options, with the stage's file of pairs.
      components: the components of a stage of kind 'preference'.
      folder: folder of the first policy's weights: the reference is that of its
        run, if this stage wrote it.

    Raises:
      ValueError: there are no pairs, or no reference.
      EndpointError: the reference is behind a server that does not answer.
    """
    self._components, self._folder = components, folder
    self._pairs = held_out(run, components, folder)
    self._loss: Any = components.stage.loss.preference
    reference = getattr(self._loss, 'reference', None)
    self._ref_logprobs = np.zeros(len(self._pairs.samples))
    if reference is not None:
      self._ref_logprobs = self._logprobs(reference)

  def __call__(self, params: Any) -> pair_rewards.PairRewards:
    """Returns the rewards of all pairs.

    Args:
      params: the policy's parameters.
    """
    rewards = pair_rewards.implicit(
      self._loss,
      self._pairs.samples,
      self._logprobs('policy', params),
      self._ref_logprobs,
    )
    renderer = self._components.renderer
    return pair_rewards.PairRewards.of(self._pairs.pairs, rewards, renderer)

  def _logprobs(
    self, model: schema.Reference, params: Any = None
  ) -> np.ndarray:
    """Returns the log probability of each answer, f64, nats.

    One program scores policies and reference, so that the reference has
    rewards of exactly 0.
    """
    models = _models(self._components, self._folder, model)
    samples = self._pairs.samples
    with contextlib.closing(models.references()) as references:
      references.set_policy({'policy': params})
      scores = references(model, samples)
    return np.array(stage_pairs.answer_logprobs(scores, samples))


class RewardModels:
  """Rewards of held-out pairs, under one reward model after another."""

  def __init__(
    self, run: schema.Run, components: components_lib.Components, folder: str
  ):
    """Reads the pairs.

    Args:
      run: the run's options, with the stage's file of pairs.
      components: the components of a stage of kind 'ranking'.
      folder: folder of the first model's weights.

    Raises:
      ValueError: it has no reward model of these tokens, or there are no pairs.
    """
    self._components = components
    self.check(folder)
    self._pairs = held_out(run, components, folder)

  def check(self, folder: str) -> None:
    """Refuses a folder without a reward model of these tokens."""
    loading.check_reward_model(
      folder, self._components.model, self._components.renderer
    )

  def __call__(self, folder: str) -> pair_rewards.PairRewards:
    """Returns the rewards of all pairs, under the weights in a folder."""
    components = self._components
    model = loading.reward_model(
      folder,
      folder,
      components.model,
      lambda model: scoring.Scorer(
        model,
        components.stage.batch.rows,
        components.capacity,
        components.mesh,
        reads='rewards',
      ),
      components.mesh,
    )
    rewards = np.array(model.rewards(self._pairs.samples))
    return pair_rewards.PairRewards.of(
      self._pairs.pairs, rewards, components.renderer
    )


def _workdir(folder: str) -> str:
  """Returns the run's folder of a step, else the current one."""
  if weights.read(folder).kind != 'run':
    return os.getcwd()
  return str(pathlib.Path(folder).parents[2])


def _models(
  components: components_lib.Components, folder: str, model: schema.Reference
) -> stage_models.Models:
  """Returns the models of a stage, of which `model` alone can be loaded.

  A reference of a stage that wrote `folder` is the one that the stage began
  with.
  """
  workdir, folders = _workdir(folder), {}
  if isinstance(model, str) and not frozen_models.tracks_policy(model):
    pinned = {}
    host = weights.read(folder).host
    if host.get('stage') == components.name:
      pinned = {**(host.get('references') or {}), 'init': host['start']}
    name = components.stage.init if model == 'init' else model
    folders[model] = pinned.get(model) or loading.resolve(name, workdir)
  like = sharding.placed(
    transformer.shapes(components.model),
    transformer.SHARDING_RULES,
    components.mesh,
  )
  load = loading.Loader(
    components.cfg.seed,
    workdir,
    folders,
    like,
    components.model,
    components.renderer,
    components.mesh,
  )
  return stage_models.Models(components, load, None, preemption.Signal())
