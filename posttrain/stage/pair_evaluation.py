"""Rewards of a stage's held-out pairs, under the weights of any folder.

1. The pairs: those that the run of the checkpoint held out.
2. With a preference loss: each answer's logprob under the loss's reference.
3. For each folder: the reward of each answer, see `evaluation.pair_rewards`.
"""

import contextlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain import schema, scoring, sharding, types
from posttrain.checkpoints import weight_folders
from posttrain.data import preferences
from posttrain.evaluation import answers as answers_lib
from posttrain.evaluation import pair_rewards
from posttrain.models import transformer
from posttrain.pipeline import pairs as pair_pipeline
from posttrain.rollout import references as refs
from posttrain.rollout.grading import models as reward_models
from posttrain.stage import components as components_lib
from posttrain.stage import models as stage_models
from posttrain.util import preemption


def held_out(
  components: components_lib.Components, folder: str
) -> list[types.Pair]:
  """Returns the held-out pairs of a stage that have two answers.

  With `eval.best` on pairs, the half that is reported.

  Args:
    components: the stage's components.
    folder: a folder from `weight_folders.find`; a step of the run that made the
      pairs, where no file has them.

  Raises:
    ValueError: there is none.
  """
  data, name = components.data, components.name
  assert isinstance(data, pair_pipeline.PairData), data
  splits = data.splits
  if splits is None:
    paths = [
      os.path.join(_workdir(folder), 'pairs', f'{name}{x}.jsonl')
      for x in ('', '_eval')
    ]
    if not os.path.isfile(paths[0]):
      raise ValueError(
        f'stage {name!r} must have pairs to measure: got none in {paths[0]}, '
        'which its run writes; or name a file, with '
        f'config.{name}.pairs=\'{{"type": "file", "path": ...}}\''
      )
    splits = data.split(*map(preferences.read, filter(os.path.isfile, paths)))
  best = _host(components, folder).get('config', {}).get(name, {}).get('eval')
  selects = str((best or {}).get('best')).startswith('eval/pairs/')
  reported, _ = splits.evaluated(selects)
  pairs = [
    pair
    for pair in reported.pairs
    if pair.chosen is not None and pair.rejected is not None
  ]
  if not pairs:
    raise ValueError(
      f'stage {name!r} must hold out pairs of two answers: got none; raise '
      f'config.{name}.pairs.eval_fraction, or name a config.{name}.pairs.'
      'eval_path'
    )
  return pairs


class Policies:
  """Implicit rewards of the held-out pairs, of one policy after another."""

  def __init__(self, components: components_lib.Components, folder: str):
    """Scores the pairs under the reference, which is not kept.

    Args:
      components: the components of a stage of kind 'preference'.
      folder: folder of the first policy's weights: the reference is that of its
        run, if this stage wrote it.

    Raises:
      ValueError: there are no pairs, or no reference.
    """
    self._components = components
    self._pairs = held_out(components, folder)
    self._samples = _samples(self._pairs)
    self._loss: Any = components.stage.loss.preference
    self._ref_logprobs = np.zeros(len(self._samples))
    reference = getattr(self._loss, 'reference', None)
    self._models = _models(components, folder, reference)
    if reference is not None:
      self._ref_logprobs = self._logprobs(reference)

  def __call__(self, params: Any) -> list[answers_lib.Answer]:
    """Returns the pairs with their measures.

    Args:
      params: the policy's parameters.
    """
    rewards = pair_rewards.implicit(
      self._loss,
      self._samples,
      self._logprobs('policy', params),
      self._ref_logprobs,
    )
    return pair_rewards.answers(self._pairs, rewards, self._components.renderer)

  def _logprobs(
    self, model: schema.Reference, params: Any = None
  ) -> np.ndarray:
    """Returns the log probability of each answer, f64, nats.

    One program scores policies and reference, so that the reference has
    rewards of exactly 0.
    """
    with contextlib.closing(self._models.references()) as references:
      references.set_policy({'policy': params})
      scores = references(model, self._samples)
    return np.array(
      [
        np.sum(own[sample.mask], dtype=np.float64)
        for own, sample in zip(scores, self._samples, strict=True)
      ]
    )


class RewardModels:
  """Rewards of the held-out pairs, of one reward model after another."""

  def __init__(self, components: components_lib.Components, folder: str):
    """Reads the pairs.

    Args:
      components: the components of a stage of kind 'ranking'.
      folder: folder of the first model's weights.

    Raises:
      ValueError: there are no pairs.
    """
    self._components = components
    self._pairs = held_out(components, folder)

  def check(self, folder: str) -> None:
    """Refuses a folder without a reward model of these tokens."""
    reward_models.check(
      folder, self._components.model, self._components.renderer
    )

  def __call__(self, folder: str) -> list[answers_lib.Answer]:
    """Returns the pairs with their measures, under the weights of a folder."""
    components = self._components
    model = reward_models.load(
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
    rewards = np.array(model.rewards(_samples(self._pairs)))
    return pair_rewards.answers(self._pairs, rewards, components.renderer)


def _samples(pairs: Sequence[types.Pair]) -> list[types.Sample]:
  """Returns the chosen and the rejected answer of each pair."""
  return [
    answer
    for pair in pairs
    for answer in (pair.chosen, pair.rejected)
    if answer is not None
  ]


def _workdir(folder: str) -> str:
  """Returns the run's folder of a step, else the current one."""
  if not weight_folders.is_run(folder):
    return os.getcwd()
  return str(pathlib.Path(folder).parents[2])


def _host(components: components_lib.Components, folder: str) -> dict[str, Any]:
  """Returns the host dict of a step of this stage, {} of another folder."""
  if not weight_folders.is_run(folder):
    return {}
  host = weight_folders.read_host(folder)
  return host if host['stage'] == components.name else {}


def _models(
  components: components_lib.Components,
  folder: str,
  reference: schema.Reference | None,
) -> stage_models.Models:
  """Returns the models of a stage, of which only the reference is loaded."""
  workdir = _workdir(folder)
  names = {'init': components.stage.init}
  if isinstance(reference, str) and reference != 'init':
    names[reference] = reference
  folders = {k: refs.resolve(x, workdir) for k, x in names.items()}
  if host := _host(components, folder):
    # Those that the stage began with.
    folders |= {**(host.get('references') or {}), 'init': host['start']}
  load = stage_models.loader(
    components.cfg,
    components.model,
    components.renderer,
    components.mesh,
    workdir,
    folders,
    sharding.placed(
      transformer.shapes(components.model),
      transformer.SHARDING_RULES,
      components.mesh,
    ),
  )
  return stage_models.Models(components, load, None, preemption.Signal())
