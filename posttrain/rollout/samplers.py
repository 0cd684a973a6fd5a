"""Samplers: groups of rollouts of an environment's tasks.

Each environment has one. It decides where rollouts come from, and whether the
policy sampled them (`on_policy`): then they have logprobs and a version.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from posttrain import schema, types
from posttrain.chat import rendering
from posttrain.envs import base
from posttrain.rollout import episodes, side_by_side
from posttrain.util import errors


class Draw(NamedTuple):
  """A drawn task, its sampler, and the uids of its rollouts."""

  task: types.Task
  sampler: 'DatasetSampler | ModelSampler'
  uids: Sequence[int]


def sample(
  draws: Sequence[Draw],
  players: Mapping[schema.Reference, episodes.Driver],
  ended: Callable[[Draw, list[types.Rollout]], object] = lambda *_: None,
) -> list[list[types.Rollout]]:
  """Returns a group of rollouts per draw; the models play concurrently.

  Args:
    draws: tasks in any order; uids are unique.
    players: the driver of each model that a sampler uses.
    ended: called with a draw and its group as soon as the group's last rollout
      has ended, while others still play.
  """
  by_model = collections.defaultdict(list)
  rollouts, groups = {}, {}
  index = {uid: i for i, draw in enumerate(draws) for uid in draw.uids}

  def end(rollout: types.Rollout) -> None:
    i = index[rollout.uid]
    if i not in groups:
      rollouts[rollout.uid] = draws[i].sampler.finish(rollout)
      # By uid and not by position: a driver may return them in any order.
      if all(uid in rollouts for uid in draws[i].uids):
        groups[i] = [rollouts[uid] for uid in draws[i].uids]
        ended(draws[i], groups[i])

  for draw in draws:
    for uid in draw.uids:
      if draw.sampler.model is None:
        end(draw.sampler.rollout(draw.task, uid))
      else:
        by_model[draw.sampler.model].append((draw.sampler, draw.task, uid))
  played = episodes.run_all(
    [
      (
        players[model],
        [sampler.spec(task, uid) for sampler, task, uid in entries],
      )
      for model, entries in by_model.items()
    ],
    end,
  )
  for rollout in itertools.chain.from_iterable(played):
    end(rollout)  # of another process
  return [groups[i] for i in range(len(draws))]


@dataclasses.dataclass
class _Group:
  """A draw that has begun, and its rollouts that have ended."""

  draw: Draw
  since: int  # the round that it began in
  rollouts: dict[int, types.Rollout] = dataclasses.field(default_factory=dict)

  @property
  def is_whole(self) -> bool:
    """Whether all rollouts have ended."""
    return len(self.rollouts) == len(self.draw.uids)


class Flight:
  """Groups in flight: their episodes may take several rounds, one per batch.

  1. A round begins with the groups of earlier ones, and draws further ones
     while slots are free, up to twice as many groups as a batch has.
  2. It is over as soon as a batch of groups is whole, and all groups that began
     `max_hold` rounds before. The other episodes are held at their next
     boundaries, see `episodes.Round`.
  3. The batch is the first whole groups, in the order of their draws. Whole
     ones beyond it are in the next batch.

  So a group is in a batch at most `max_hold` rounds after it began. All this
  depends on the order and number of tokens, never on time.
  """

  def __init__(
    self,
    driver: episodes.Driver,
    cfg: schema.Rollout,
    batch_groups: int,
    group_size: int,
  ):
    """Starts without groups.

    Args:
      driver: plays the episodes of the policy.
      cfg: the options of `in_flight`.
      batch_groups: the number of groups in a batch.
      group_size: the most rollouts of a group.
    """
    self._driver, self._cfg, self._count = driver, cfg, batch_groups
    self._group_size, self.round = group_size, 0
    self.groups: dict[int, _Group] = {}  # by their first uid, as drawn

  def next(
    self,
    draw: Callable[[], Draw],
    ended: Callable[[Draw, list[types.Rollout]], object],
  ) -> list[tuple[Draw, list[types.Rollout]]]:
    """Plays a round; returns the groups of a batch.

    Args:
      draw: draws the next group.
      ended: called with a group as soon as its last rollout has ended.
    """
    self.round += 1
    of_uid = {uid: x for x in self.groups.values() for uid in x.draw.uids}

    def end(rollout: types.Rollout) -> None:
      group = of_uid[rollout.uid]
      finished = group.draw.sampler.finish(rollout)
      group.rollouts[rollout.uid] = finished
      if group.is_whole:
        ended(group.draw, self._rollouts(group))

    def begin(group: _Group) -> list[episodes.EpisodeSpec]:
      task, sampler, uids = group.draw.task, group.draw.sampler, group.draw.uids
      of_uid.update(dict.fromkeys(uids, group))
      if isinstance(sampler, ModelSampler):
        return [sampler.spec(task, uid) for uid in uids]
      for uid in uids:
        end(sampler.rollout(task, uid))
      return []

    def more(running: int) -> list[episodes.EpisodeSpec]:
      specs: list[episodes.EpisodeSpec] = []
      while (
        not specs
        and not self._is_over()
        and len(self.groups) < 2 * self._count
        and (not running or running + self._group_size <= self._cfg.slot_count)
      ):
        specs = begin(self.add(draw(), self.round))
      return specs

    # Those of a resumed run begin anew.
    begun = {*self._driver.held}
    specs = [
      spec
      for group in list(self.groups.values())
      if not (group.rollouts or begun.intersection(group.draw.uids))
      for spec in begin(group)
    ]
    round = episodes.Round(
      self._is_over, more, self._cfg.hold_tokens, self._cfg.keep_cache
    )
    (played,) = side_by_side.run([self._driver.play(specs, end, round)])
    played.result()
    whole = [key for key, group in self.groups.items() if group.is_whole]
    batch = [self.groups.pop(key) for key in whole[: self._count]]
    return [(group.draw, self._rollouts(group)) for group in batch]

  def add(self, draw: Draw, since: int) -> _Group:
    """Adds a draw, which begins in the next round; returns its group."""
    group = _Group(draw, since)
    self.groups[draw.uids[0]] = group
    return group

  def held(self) -> collections.Counter[str]:
    """Returns the number of held episodes of each environment."""
    held = self._driver.held
    return collections.Counter(
      group.draw.task.env
      for group in self.groups.values()
      for uid in group.draw.uids
      if uid in held
    )

  def _is_over(self) -> bool:
    whole = sum(group.is_whole for group in self.groups.values())
    last = self.round - self._cfg.max_hold
    return whole >= self._count and all(
      group.is_whole for group in self.groups.values() if group.since <= last
    )

  def _rollouts(self, group: _Group) -> list[types.Rollout]:
    return [group.rollouts[uid] for uid in group.draw.uids]


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
