"""Samplers: an environment's tasks in, groups of rollouts out.

One per environment. It owns where rollouts come from, and whether the policy
made them (`on_policy`): they then have logprobs and a version.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from posttrain import schema, types
from posttrain.chat import renderer as chat
from posttrain.envs import base
from posttrain.rollout import driver as drivers


@dataclasses.dataclass(frozen=True)
class Draw:
  """A task that was drawn, and who makes which rollouts of it."""

  task: types.Task
  sampler: 'DatasetSampler | ModelSampler'
  uids: Sequence[int]


def sample(
  draws: Sequence[Draw], players: Mapping[schema.Reference, drivers.Driver]
) -> list[list[types.Rollout]]:
  """Returns a group of rollouts per draw; all of a model's are played at once.

  Args:
    draws: in any order; uids are unique.
    players: by the model that a sampler plays with.
  """
  plays = collections.defaultdict(list)
  rollouts = {}
  for draw in draws:
    for uid in draw.uids:
      if draw.sampler.model is None:
        rollouts[uid] = draw.sampler.rollout(draw.task, uid)
      else:
        plays[draw.sampler.model].append((draw.sampler, draw.task, uid))
  for model, asked in plays.items():
    played = players[model].play([who.play(*what) for who, *what in asked])
    samplers = {uid: who for who, _, uid in asked}
    rollouts |= {r.uid: samplers[r.uid].finish(r) for r in played}
  # By id and not by place, whatever order they came back in.
  return [[rollouts[uid] for uid in draw.uids] for draw in draws]


class ModelSampler:
  """Plays episodes with the policy that is trained, or with a frozen model."""

  def __init__(
    self,
    cfg: schema.Policy | schema.Frozen,
    env: base.Env,
    renderer: chat.Renderer,
    max_tokens: int,
  ):
    """Args: max_tokens: of an episode, prompt included."""
    self._cfg, self._env = cfg, env
    self._renderer = renderer
    self._max_tokens = max_tokens
    self.on_policy = isinstance(cfg, schema.Policy)
    self.model = 'policy' if self.on_policy else cfg.model

  def play(self, task: types.Task, uid: int) -> drivers.Play:
    """Returns the episode to play."""
    cfg = self._cfg
    return drivers.Play(
      uid,
      self._env,
      task,
      cfg.temperature,
      cfg.max_tokens,
      cfg.max_episode_tokens,
      cfg.keep_exchanges,
    )

  def finish(self, rollout: types.Rollout) -> types.Rollout:
    """Returns a played rollout as it trains.

    Of a frozen model, as if it were a data set: its logprobs are not the
    policy's, and what it says is learned at temperature 1.

    Raises:
      ValueError: a frozen model said a token that the policy has no row for.
    """
    if self.on_policy:
      return rollout
    for sample in rollout.samples:
      if sample.ids.max() >= self._renderer.rows:
        raise ValueError(
          f'{self.model} must say tokens that the policy has rows for: got '
          f'{sample.ids.max()} in row {sample.row!r} of environment '
          f'{sample.env!r}, expected less than {self._renderer.rows}; it has '
          'more rows than the tokenizer has texts, and sampled one of them'
        )
    samples = tuple(
      dataclasses.replace(
        sample,
        sampler_logprobs=np.zeros_like(sample.sampler_logprobs),
        temperatures=np.ones_like(sample.temperatures),
        versions=np.full_like(sample.versions, -1),
      )
      for sample in rollout.samples
    )
    return dataclasses.replace(rollout, samples=samples)

  def check(self, task: types.Task) -> None:
    """Refuses a prompt that leaves no room for an answer; names the row."""
    where = f'row {task.id} of environment {task.env}'
    try:
      prompt = self._renderer.render(task.prompt, add_generation_prompt=True)
    except ValueError as error:
      raise ValueError(f'{where}: {error}') from None
    if len(prompt) >= self._max_tokens:
      raise ValueError(
        f'{where} must have a prompt below batch.row_tokens='
        f'{self._max_tokens}: got {len(prompt)} tokens; raise row_tokens, or '
        'shorten the prompt'
      )


class DatasetSampler:
  """Replays the demonstration that a task carries, as if it were sampled.

  The rollout's mask is on the demonstration's assistant turns (content and
  closing token), whoever wrote them; those of the prompt are given, not
  trained. Its tokens have no sampler logprob and no version. A chat template
  that rewrites earlier turns makes several samples of it, each turn trained in
  one of them.
  """

  on_policy, model = False, None

  def __init__(
    self,
    cfg: schema.Dataset,
    env: base.Env,
    renderer: chat.Renderer,
    max_tokens: int,
  ):
    """Args: env: not read; max_tokens: of a sample, prompt included."""
    del env
    self._cfg = cfg
    self._renderer = renderer
    self._max_tokens = max_tokens

  def rollout(self, task: types.Task, uid: int) -> types.Rollout:
    """Returns the one rollout of the task.

    Raises:
      ValueError: no demonstration, no trained label, or too many tokens;
        names the row.
    """
    where = f'row {task.id} of environment {task.env}'
    if task.demonstration is None:
      raise ValueError(
        f'{where} must carry a demonstration: a dataset sampler has nothing '
        'else to replay'
      )
    messages = (*task.prompt, *task.demonstration)
    try:
      parts = self._renderer.demonstrate(messages, len(task.prompt))
    except ValueError as error:
      raise ValueError(f'{where}: {error}') from None
    self._check(parts, where)
    samples = [_sample(task, part, self._max_tokens) for part in parts]
    whole = all(len(part) <= self._max_tokens for part in parts)
    return types.Rollout(
      uid,
      task,
      messages,
      tuple(s for s in samples if s.mask.any()),
      types.Score(None),
      'eos' if whole else 'max_tokens',
    )

  def check(self, task: types.Task) -> None:
    """Refuses a task that cannot train; see `rollout`."""
    self.rollout(task, uid=0)

  def _check(self, parts: Sequence[chat.Rendered], where: str) -> None:
    """Refuses what would train on nothing, or on a cut answer unasked.

    A cut keeps the first `max_tokens` tokens of a part, so that a trained label
    is left exactly if the first one is among them.
    """
    if not any(part.sampled.any() for part in parts):
      raise ValueError(
        f'{where} must have a trained label: no token of the demonstration is '
        "an assistant's; check its messages"
      )
    first = min(int(np.argmax(part.sampled)) for part in parts)
    if first >= self._max_tokens:
      raise ValueError(
        f'{where} must have a prompt below batch.row_tokens='
        f'{self._max_tokens}: got {first} tokens; raise row_tokens, or '
        'shorten the prompt'
      )
    longest = max(len(part) for part in parts)
    if longest > self._max_tokens and self._cfg.too_long == 'error':
      raise ValueError(
        f'{where} must fit into batch.row_tokens={self._max_tokens}: got '
        f"{longest} tokens; raise row_tokens, or set the sampler's too_long "
        "to 'truncate'"
      )


TYPES = {
  'dataset': DatasetSampler,
  'policy': ModelSampler,
  'frozen': ModelSampler,
}


def make(
  cfg: schema.Sampler, env: base.Env, renderer: chat.Renderer, max_tokens: int
) -> DatasetSampler | ModelSampler:
  """Builds the sampler that a schema node describes.

  Args:
    cfg: the sampler's options.
    env: the environment whose tasks it samples.
    renderer: turns messages into tokens.
    max_tokens: longest sample, or episode, in tokens, prompt included.
  """
  return TYPES[cfg.type](cfg, env, renderer, max_tokens)


def _sample(
  task: types.Task, rendered: chat.Rendered, max_tokens: int
) -> types.Sample:
  n = min(len(rendered), max_tokens)
  return types.Sample(
    env=task.env,
    row=task.id,
    ids=rendered.ids[:n],
    mask=rendered.sampled[:n],
    roles=rendered.roles[:n],
    is_content=rendered.is_content[:n],
    sampler_logprobs=np.zeros(n, np.float32),
    temperatures=np.ones(n, np.float32),
    versions=np.full(n, -1, np.int32),
    message_ids=rendered.messages[:n],
    task=task,
  )
