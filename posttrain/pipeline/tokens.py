"""Tasks -> groups -> streams -> batch, as one iterator with a state.

    source -> sampler -> algorithm -> packing

1. For each of `prompts_per_step` groups an environment is chosen and a task
   drawn from its source; with `max_draws` further ones in place of groups whose
   advantages are all 0.
   A stored group may take the place of one, see `replay`.
2. The samplers make the rollouts; episodes of all environments are played at
   once. As soon as the last rollout of a group has ended, judges and references
   on servers begin with the group. Failed rollouts, and those that cannot be
   graded, are dropped from their groups and counted.
3. Each environment's algorithm writes streams on its groups; the references of
   all environments score at once.
4. The samples of all environments are packed into one batch.
"""

import collections
import contextlib
import dataclasses
import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain import algorithms, processes, schema, types
from posttrain.algorithms import streams
from posttrain.chat import rendering
from posttrain.data import curricula, packing
from posttrain.envs import base
from posttrain.metrics import statistics
from posttrain.pipeline import batches, environments, replay
from posttrain.rollout import (
  calls,
  env_calls,
  episodes,
  frozen_models,
  grading,
  groups,
  samplers,
  side_by_side,
)
from posttrain.util import watchdog

UIDS_PER_STAGE = 2**40  # a rollout's uid is unique over the whole run


class TokenData(batches.StageData):
  """The environments of a stage, see `batches.StageData`."""

  def __init__(
    self,
    stage: schema.Stage,
    envs: Mapping[str, base.Env],
    renderer: rendering.Renderer,
    seed: int,
    index: int = 0,
  ):
    """Makes the environments' sources, samplers and algorithms.

    Args:
      stage: the stage's options.
      envs: its environments by name.
      renderer: renders the environments' messages.
      seed: the run's seed.
      index: index of the stage within the run.

    Raises:
      ValueError: an environment cannot train as its options say.
      EnvError: an environment's source fails.
    """
    self.stage, self.seed, self.index = stage, seed, index
    self.tokenizer = renderer.tokenizer
    self.environments: dict[str, environments.Environment] = {}
    for name, entry in stage.envs.items():
      # Another order for every stage and environment, from one seed.
      order = np.random.SeedSequence([seed, index, zlib.crc32(name.encode())])
      number = int(order.generate_state(1)[0])
      source = env_calls.Source(
        envs[name], 'train', number, stage.rollout.env_timeout
      )
      if entry.curriculum is not None:
        key = f'envs.{name}.curriculum'
        source = curricula.Curriculum(source, entry.curriculum, number, key)
      self.environments[name] = environments.Environment(
        name,
        entry,
        envs[name],
        source,
        samplers.TYPES[entry.sampler.type](
          entry.sampler, envs[name], renderer, stage.batch.row_tokens
        ),
        algorithms.make(entry.algorithm),
      )
    all_own = self.environments.values()
    self.shape, self.envs, self.env_names = shape(stage), envs, tuple(envs)
    self.task_counts = {x.name: len(x.source) for x in all_own}
    self.hashes = {
      f'envs.{x.name}.env': x.source.get_state().get('fingerprint')
      or str(len(x.source))
      for x in all_own
    }
    self.group_sizes = {k: x.group_size for k, x in stage.envs.items()}
    self.references = {k: v for x in all_own for k, v in x.references.items()}
    self.reward_models = {
      k: v for x in all_own for k, v in x.reward_models.items()
    }
    self.held_models = {*self.references, *self.reward_models}
    self.players = {x.sampler.model for x in all_own} - {None, 'policy'}
    self.uses_policy = any(x.sampler.on_policy for x in all_own) or any(
      map(frozen_models.tracks_policy, self.references)
    )
    models = {*self.references, *self.players}
    self.repeats = all(env.repeats for env in envs.values()) and not any(
      isinstance(x, schema.Endpoint) for x in models
    )
    # The messages of an environment between turns are unknown beforehand.
    turns = max(env.max_turns for env in envs.values())
    plays = self.uses_policy or self.players or turns > 1
    self.min_capacity = stage.batch.row_tokens if plays else 0

  def check(self) -> None:
    self.checked = {
      name: environment.check()
      for name, environment in self.environments.items()
      if environment.entry.ratio
    }

  def get_state(self) -> dict[str, Any]:
    """Returns the JSON-able state of all sources and algorithms."""
    return {
      'envs': {
        name: {
          'source': environment.source.get_state(),
          'algorithm': environment.algorithm.get_state(),
        }
        for name, environment in self.environments.items()
      }
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues from a state of `get_state`."""
    for name, environment in self.environments.items():
      environment.source.set_state(state['envs'][name]['source'])
      environment.algorithm.set_state(state['envs'][name]['algorithm'])


class TokenPipeline(batches.Pipeline):
  """Batches of samples with streams, see `batches.Pipeline`."""

  def __init__(
    self,
    data: TokenData,
    players: Mapping[schema.Reference, episodes.Driver] | None = None,
    scorer: algorithms.base.Scorer | None = None,
    judge: Callable[[schema.Reference], grading.Judge] | None = None,
    reward_model: Callable[[str], grading.Model] | None = None,
    workers: env_calls.Workers | None = None,
    clock: watchdog.Timers | None = None,
  ):
    """Starts at the first task of every source.

    Args:
      data: the environments.
      players: model -> driver that plays episodes with it; 'policy' is the
        model that trains.
      scorer: scores under the algorithms' references, see `References.start`.
      judge: returns the judge of a reference.
      reward_model: returns the reward model of a name.
      workers: worker processes of reward functions; None = threads.
      clock: measures 'scoring'; None = a new one.

    Raises:
      ValueError: a judge or reward model does not fit.
      EndpointError: a judge's server is away.
    """
    self._data, self._environments = data, data.environments
    self._stage, self._seed = data.stage, data.seed
    self._uid = data.index * UIDS_PER_STAGE
    self._players, self._scorer = players or {}, scorer
    self._workers, self._clock = workers, clock or watchdog.Timers()
    self._rewards = {
      name: environment.rewards(judge, reward_model, workers)
      for name, environment in data.environments.items()
    }
    self._pack = Packer(data.stage, data.tokenizer.pad_id)
    self._flight: groups.GroupsInFlight | None = None
    if self._stage.rollout.in_flight and data.uses_policy:
      if processes.count() > 1:
        raise ValueError(
          'rollout.in_flight must be False with several processes: got True'
        )
      self._flight = groups.GroupsInFlight(self._players['policy'], data.stage)
    self._replays = {
      name: replay.Replay(cfg, self._seed, data.stage.batch.prompts_per_step)
      for name, environment in data.environments.items()
      if (cfg := environment.entry.replay) is not None
    }
    self.replays = bool(self._replays)
    ratios = np.array([x.entry.ratio for x in data.environments.values()])
    self._ratios = np.cumsum(ratios) / ratios.sum()
    self.uses_policy, self.repeats = data.uses_policy, data.repeats
    self.can_prefetch = not (data.uses_policy or data.references)
    self.learns_by_trial = tuple(
      name
      for name, environment in data.environments.items()
      if environment.learns_by_trial
    )
    self.tally = batches.Tally(self.learns_by_trial)

  def __next__(self) -> batches.Item:
    rounds, errors, begun = self._play_step()
    stamped, metrics, played = {}, {}, {}
    for name, parts in rounds.items():
      environment, graded = self._environments[name], environments.join(parts)
      kept = environment.kept(graded.usable, len(parts[0].usable))
      stamped[name] = environment.samples(kept)
      played[name] = batches.Played(
        graded.groups, kept, stamped[name], self._data.tokenizer
      )
      metrics |= environment.metrics(graded, stamped[name])
      metrics |= environment.update_source(graded.usable)
      if self._stage.batch.max_draws is not None:
        metrics[f'rollout/draws/{name}'] = len(graded.groups)
    scored = self._score(stamped, begun)
    metrics |= self._replay(scored, played)
    distilled = {
      name
      for name in scored
      if self._environments[name].algorithm.component == 'ref_kl'
    }
    apart = streams.apart(scored, distilled)
    samples = [sample for samples in apart.values() for sample in samples]
    batch = self._pack(samples)
    metrics |= {'batch/samples': len(samples), **batches.metrics(batch)}
    for component in types.COMPONENTS:
      count = getattr(batch, f'{component}_count')
      metrics[f'batch/{component}_tokens'] = int(count)
    if self._players:
      metrics['rollout/hung'] = sum(processes.gather(calls.hung()))
    if self._workers is not None:
      losses = processes.gather(self._workers.losses)
      metrics['rollout/worker_restarts'] = sum(losses)
    if self._flight is not None:
      runs = self._players['policy'].held.values()
      held = collections.Counter(run.spec.task.env for run in runs)
      metrics |= {f'rollout/held/{x}': held[x] for x in self._environments}
    self.tally.add_step(bool(np.any(batch.advantages)))
    state = self.get_state()
    for name, own in state['envs'].items():
      metrics |= batches.epochs(name, own['source'])
    return batches.Item(batch, metrics, state, errors, played)

  def _score(
    self,
    stamped: dict[str, list[types.Sample]],
    begun: Mapping[str, list[streams.StartedScores]],
  ) -> dict[str, list[types.Sample]]:
    """Returns the samples with reference logprobs, in the same order.

    Args:
      stamped: environment -> its samples.
      begun: environment -> the groups that a server scores already.
    """
    names = [
      k for k, samples in stamped.items() if streams.ref_kl_members(samples)
    ]
    if names:
      tasks = [
        streams.scoring(
          self._environments[name].algorithm,
          stamped[name],
          self._scorer,
          begun[name],
        )
        for name in names
      ]
      with self._clock('scoring'):
        scored = [result.result() for result in side_by_side.run(tasks)]
      stamped = {**stamped, **dict(zip(names, scored, strict=True))}
    return stamped

  def _replay(
    self,
    scored: dict[str, list[types.Sample]],
    played: dict[str, batches.Played],
  ) -> dict[str, float]:
    """Adds the samples of stored groups, and stores those of the step.

    Args:
      scored: environment -> its samples, to which others are added.
      played: environment -> its groups, to which the samples are added.

    Returns:
      Metrics.
    """
    metrics = {}
    for name, store in self._replays.items():
      empty = batches.Played((), (), (), self._data.tokenizer)
      step, own = played.get(name, empty), scored.get(name, [])
      each = iter(own)
      samples, counts = store.finish(
        [
          [next(each) for rollout in group for _ in rollout.samples]
          for group in step.trained
        ]
      )
      scored[name] = [*own, *samples]
      played[name] = step._replace(samples=[*step.samples, *samples])
      metrics |= {f'replay/{k}/{name}': x for k, x in counts.items()}
    return metrics

  def _play_step(
    self,
  ) -> tuple[
    dict[str, list[environments.Graded]],
    tuple[str, ...],
    dict[str, list[streams.StartedScores]],
  ]:
    """Plays the tasks of a step, and further ones for groups without credit.

    Returns:
      (environment -> its groups by round, errors of episodes and rewards,
      environment -> the groups that a server scores already)

    Raises:
      TooManyErrors: too many rollouts failed, of all rounds together.
    """
    # A round plays all wanted tasks. The first has `prompts_per_step` of any
    # environment; a further one has a task for each group without credit, of
    # the same environment, as long as `max_draws` leaves some.
    batch = self._stage.batch
    rounds, played, faults = collections.defaultdict(list), [], ()
    # The environment of each task to draw; None = any, by their ratios.
    to_draw: list[str | None] = [None] * batch.prompts_per_step
    left = max(batch.max_draws or 0, batch.prompts_per_step)
    further: collections.Counter[str | None] = collections.Counter()
    scored = collections.defaultdict(list)
    while to_draw:
      # Draw the tasks and play their rollouts, of all environments at once.
      left -= len(to_draw)
      drawn, begun = (collections.defaultdict(list) for _ in range(2))
      for group in self._sample(to_draw):
        name, (rewarded, scores) = group.task.env, group.grades
        drawn[name].append(group.rollouts)
        begun[name].append(rewarded)
        scored[name] += scores
      # Call the other rewards, of all environments side by side.
      tasks = [
        self._environments[name].grade(new, begun[name], self._rewards[name])
        for name, new in drawn.items()
      ]
      idle = []
      for name, result in zip(drawn, side_by_side.run(tasks), strict=True):
        graded = result.result()
        faults += graded.errors
        rollouts = [rollout for group in graded.groups for rollout in group]
        played += rollouts
        failures = [r.error for r in rollouts if r.stop_reason == 'error']
        failures += graded.errors
        usable = sum(map(len, graded.usable))
        self.tally.add_env(name, len(rollouts), usable, failures)
        rounds[name].append(graded)
        # Groups without credit ask for further tasks.
        if left:
          lacks_credit = self._environments[name].lacks_credit
          idle += [name for group in graded.usable if lacks_credit(group)]
      to_draw = _in_turns(idle, further)[:left]
      further.update(to_draw)
    errors = statistics.failures(
      played,
      self._stage.rollout.max_error_share,
      faults,
      has_rewards=self.tally.has_rewards or not self.learns_by_trial,
    )
    return rounds, errors, scored

  def _sample(self, to_draw: Sequence[str | None]) -> list[groups.Group]:
    """Draws tasks and plays their rollouts, of all environments at once.

    Args:
      to_draw: the environment of each, as of `_draw`. Of groups in flight only
        their number counts.
    """
    if self._flight is not None:
      return self._flight.next(self._draw_in_flight)
    drawn = processes.together(
      lambda: [group for x in to_draw if (group := self._draw(x))]
    )
    groups.sample(drawn, self._players)
    return drawn

  def _grade(
    self, task: types.Task, rollouts: list[types.Rollout]
  ) -> tuple[grading.GroupCalls, list[streams.StartedScores]]:
    """Begins to grade and score a group whose last rollout has ended."""
    scores = []
    if self._stage.batch.max_draws is None:  # else it may not be kept
      algorithm = self._environments[task.env].algorithm
      scores = streams.begin(algorithm, rollouts, self._scorer)
    return self._rewards[task.env].begin(rollouts), scores

  def _draw_in_flight(self) -> groups.Group:
    """Draws a group; keeps the state of the sources before."""
    sources = {k: x.source.get_state() for k, x in self._environments.items()}
    group = self._draw()
    assert group is not None, 'no replay in flight, see `config.checks`'
    return dataclasses.replace(group, sources=sources)

  def _draw(self, name: str | None = None) -> groups.Group | None:
    """Draws one of an environment's tasks, and the group's uids.

    Args:
      name: the environment; None = one is drawn as well.

    Returns:
      The group; None if a stored one takes its place.
    """
    is_first = name is None
    if name is None:
      # By their ratios, from (seed, next uid) alone.
      names, place = list(self._environments), 0
      if len(names) > 1:
        draw = np.random.default_rng([self._seed, self._uid]).random()
        place = int(np.searchsorted(self._ratios, draw, side='right'))
      name = names[place]
    environment = self._environments[name]
    uids = range(self._uid, self._uid + environment.entry.group_size)
    self._uid = uids.stop
    if is_first and name in self._replays:
      if self._replays[name].pick(uids.start):
        return None
    return groups.Group(
      environment.draw(), environment.sampler, uids, self._grade
    )

  def get_state(self) -> dict[str, Any]:
    """Returns JSON-able state that, with the seed, determines what follows.

    With groups in flight it is that before the draw of the oldest one, from
    which they are drawn again.
    """
    state = {
      'uid': self._uid,
      'tally': self.tally.get_state(),
      **self._data.get_state(),
      'widths': self._pack.widths.get_state(),
      'replays': {k: x.get_state() for k, x in self._replays.items()},
    }
    if self._flight is not None:
      held = self._flight.groups
      state['flight'] = {
        'round': self._flight.round,
        'since': {str(group.uids[0]): group.since for group in held},
        'next': self._uid,
      }
      if held:
        state['uid'] = held[0].uids[0]
        for name, source in held[0].sources.items():
          state['envs'][name]['source'] = source
    return state

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues from a state of `get_state`."""
    self._uid = state['uid']
    self.tally.set_state(state.get('tally', {}))
    self._data.set_state(state)
    self._pack.widths.set_state(state.get('widths', [0.0]))
    for name, store in self._replays.items():
      store.set_state(state['replays'][name])
    if self._flight is not None and (flight := state.get('flight')):
      self._flight.round = flight['round']
      self._flight.groups.clear()
      while self._uid < flight['next']:
        group = self._draw_in_flight()
        since = flight['since'].get(str(group.uids[0]))
        if since is not None:  # else it has trained
          group.since = since
          self._flight.groups.append(group)
      if count := len(self._flight.groups):
        logging.getLogger('absl').warning(
          'held episodes begin again: those of %d groups', count
        )

  def paused(self) -> contextlib.AbstractContextManager[None]:
    """Leaves the engine to others meanwhile; held episodes keep their cache."""
    if self._flight is None:
      return contextlib.nullcontext()
    return self._players['policy'].paused()

  def close(self) -> None:
    """Ends the episodes that are held."""
    for driver in self._players.values():
      driver.close()


def _in_turns(
  names: Sequence[str], before: Mapping[str | None, int]
) -> list[str | None]:
  """Returns names in turns, first those with the fewest draws before.

  So a hard environment does not use up the draws of the others.
  """
  counts = collections.Counter(before)

  def draws(name: str) -> int:  # called once for each, in order
    counts[name] += 1
    return counts[name]

  return sorted(names, key=draws)


def shape(stage: schema.Stage) -> tuple[int, int, int]:
  """Returns [micro_batches, rows, row_tokens] of a batch.

  It has space for a sample of `batch.row_tokens` per rollout.
  """
  batch = stage.batch
  group_size = max(entry.group_size for entry in stage.envs.values())
  rollouts = batch.prompts_per_step * group_size
  micro_batches = math.ceil(rollouts / batch.bins)
  return micro_batches, batch.packed_rows, batch.packed_tokens


class Packer:
  """Packs all samples of a step, in one fixed shape wherever they fit.

  Rollouts with several samples may need more micro-batches; the larger shape
  then stays, because the train step compiles anew for another one.
  """

  def __init__(self, stage: schema.Stage, pad_id: int):
    self._micro_batches, rows, _ = shape(stage)
    has_critic = stage.critic.kind != 'none'
    self._layout = packing.Layout(
      rows=rows,
      longest=stage.batch.row_tokens,
      envs=tuple(stage.envs),
      pad_id=pad_id,
      trees=bool(stage.batch.trees),
      # A critic's advantage depends on what follows in its own sample.
      trained=stage.loss.rl.is_per_token and not has_critic,
      critic=has_critic,
    )
    self.widths = batches.widths(stage, self._micro_batches)

  def __call__(self, samples: Sequence[types.Sample]) -> types.Batch:
    """Returns the batch of all samples."""
    row_tokens: Any = self.widths  # asked once, so that its state is the step's
    while True:
      batch, leftover = packing.pack(
        samples, self._layout, self._micro_batches, row_tokens
      )
      if not leftover:
        return batch
      rows = self._micro_batches * self._layout.rows
      assert len(samples) > rows, 'each must fit into a row'
      self._micro_batches *= 2
      row_tokens = batch.ids.shape[-1]
