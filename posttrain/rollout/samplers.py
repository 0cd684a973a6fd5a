"""Samplers: rollouts of an environment's tasks.

Each environment has one. It decides where rollouts come from, and whether the
policy sampled them (`on_policy`): then they have logprobs and a version.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from posttrain import schema, types
from posttrain.chat import rendering
from posttrain.envs import base
from posttrain.rollout import episodes
from posttrain.util import errors


class Measured(NamedTuple):
  """The tokens of a task."""

  needed: int  # those that must fit into a row
  sequences: Sequence[rendering.Rendered]


class ModelSampler(NamedTuple):
  """Samples episodes from the trained policy, or from a frozen model."""

  cfg: schema.Policy | schema.Frozen
  env: base.Env
  renderer: rendering.Renderer
  max_tokens: int  # of an episode, its prompt included

  @property
  def model(self) -> schema.Reference:
    """The model that plays."""
    return getattr(self.cfg, 'model', 'policy')

  @property
  def on_policy(self) -> bool:
    """Whether the policy samples."""
    return isinstance(self.cfg, schema.Policy)

  def spec(self, task: types.Task, uid: int) -> episodes.EpisodeSpec:
    """Returns the episode to run for a task."""
    cfg = self.cfg
    return episodes.EpisodeSpec(
      uid,
      self.env,
      task,
      cfg.temperature,
      cfg.max_tokens,
      cfg.max_episode_tokens,
      cfg.keep_exchanges,
    )

  def finish(self, rollout: types.Rollout) -> types.Rollout:
    """Returns a rollout in the form that trains.

    The samples of a frozen model lose their logprobs, which are not the
    policy's, and have temperature 1, like those of a dataset.

    Raises:
      ValueError: a frozen model sampled a token that the policy's vocabulary
        does not have.
    """
    if self.on_policy:
      return rollout
    rows = self.renderer.embedding_rows
    highest = max((int(x.ids.max()) for x in rollout.samples), default=0)
    if highest >= rows:
      raise ValueError(
        f'{self.model} must sample tokens of the policy, below {rows}: got '
        f'{highest} in {_where(rollout.task)}'
      )
    samples = tuple(
      dataclasses.replace(sample, **types.not_sampled(len(sample)))
      for sample in rollout.samples
    )
    return dataclasses.replace(rollout, samples=samples)

  def measure(self, task: types.Task) -> Measured:
    """Returns the prompt, which must leave a token for the completion.

    Raises:
      ValueError: the prompt cannot be rendered.
    """
    try:
      renderer = self.renderer.of(task)
      prompt = renderer.render(task.prompt, add_generation_prompt=True)
    except ValueError as error:
      raise ValueError(f'{_where(task)}: {error}') from None
    return Measured(len(prompt) + 1, (prompt,))


class DatasetSampler(NamedTuple):
  """Replays the demonstration of a task as if it were sampled.

  The rollout's mask covers the demonstration's assistant turns (content and
  closing token); assistant turns of the prompt are not trained. Its tokens have
  no sampler logprob and no version. If the chat template rewrites earlier
  turns, there are several samples, and each turn is trained in one of them.
  """

  cfg: schema.Dataset
  env: base.Env
  renderer: rendering.Renderer
  max_tokens: int  # of a sample, its prompt included

  on_policy, model = False, None

  def finish(self, rollout: types.Rollout) -> types.Rollout:
    """Returns the rollout as it is."""
    return rollout

  def rollout(self, task: types.Task, uid: int) -> types.Rollout:
    """Returns the task's demonstration as a rollout.

    Raises:
      ValueError: no demonstration, no trained label, or too many tokens; the
        message names the row.
    """
    size, (needed, sequences) = self.max_tokens, self.measure(task)
    if needed > size:
      raise ValueError(
        f'{_where(task)} must fit into batch.row_tokens={size}: got {needed} '
        'tokens'
      )
    first, *others = task.demonstration
    samples = [
      types.Sample(
        env=task.env,
        row=task.id,
        ids=sequence.ids[:size],
        mask=sequence.sampled[:size],
        roles=sequence.roles[:size],
        is_content=sequence.is_content[:size],
        message_ids=sequence.messages[:size],
        task=task,
        **types.not_sampled(min(len(sequence), size)),
      )
      for sequence in sequences
    ]
    return types.Rollout(
      uid,
      task,
      (*rendering.add_turn(task.prompt, first), *others),
      tuple(s for s in samples if s.mask.any()),
      types.Score(None),
      'eos' if max(map(len, sequences)) <= size else 'max_tokens',
    )

  def measure(self, task: types.Task) -> Measured:
    """Returns the demonstration as sequences that each have a label.

    Raises:
      ValueError: no demonstration, or no trained label; names the row.
    """
    where = _where(task)
    if task.demonstration is None:
      hint = errors.nearest('completion', task.info) or (
        "; SFT replays demonstrations: add a column 'completion', or rename "
        f'one, as --config.STAGE.envs.{task.env}.env.columns='
        """'{"answer": "completion"}'; or train on prompts alone by rewards, """
        'with the recipe grpo, or on pairs, with dpo'
      )
      must = "have a demonstration, such as a column 'completion'"
      raise ValueError(f'{where} must {must}: got none{hint}')
    try:
      sequences = self.renderer.of(task).demonstrate(
        (*task.prompt, *task.demonstration), len(task.prompt)
      )
    except ValueError as error:
      raise ValueError(f'{where}: {error}') from None
    sequences = [x for x in sequences if x.sampled.any()]
    if not sequences:
      raise ValueError(
        f'{where} must have a trained label: got no assistant token in the '
        'demonstration'
      )
    if self.cfg.too_long != 'truncate':
      return Measured(max(map(len, sequences)), sequences)
    # Truncation keeps the first tokens of a sequence: a trained label remains
    # exactly if the first one is among them.
    first = min(int(np.argmax(x.sampled)) for x in sequences)
    return Measured(first + 1, sequences)


# By `type` of the schema node.
TYPES = {
  'dataset': DatasetSampler,
  'policy': ModelSampler,
  'frozen': ModelSampler,
}


def _where(task: types.Task) -> str:
  return f'row {task.id} of environment {task.env}'
