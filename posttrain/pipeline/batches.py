"""The interfaces behind every stage's batches, and what is counted of them.

    data, known before any model exists  ->  pipeline, the iterator of items

1. `StageData` and `Pipeline`: `tokens` and `pair_data` implement both.
2. `Item`: the batch of one step, with the rollouts behind it. `rows` yields
   them to be read, a row per rollout: `env`, `task`, `group` (its number in the
   step), `prompt` and `completion` (messages), `rendered` (the prompt as the
   model read it: the text of its tokens, with tools and template), `answer`,
   `reward`, `rewards` (the value of each summand), `correct`, `advantage` (the
   mean over its completion tokens; null if it does not train), `stop_reason`,
   `tokens` (sampled ones), `version` (the step whose weights sampled its first
   token), `turn_rewards`, `error`.
3. `Tally`: counts of the rewards of a whole stage, and what its end says about
   them. Part of the pipeline's state, so that a resumed stage counts on.
"""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from posttrain import schema, types
from posttrain.chat import tokenizers
from posttrain.data import packing, row_files
from posttrain.envs import base
from posttrain.metrics import statistics
from posttrain.util import errors

Batch = types.Batch | types.PairBatch
# Tokens of each sample; ids of the first ones, and whether each is trained.
Checked = tuple[Sequence[int], Sequence[tuple[np.ndarray, np.ndarray]]]
MAX_GROUPS = 64  # of an environment and step, that `rows` yields
_SHOWN = 400  # characters of a part of a sample


class Played(NamedTuple):
  """The groups of an environment in a step."""

  groups: Sequence[Sequence[types.Rollout]]  # all
  trained: Sequence[Sequence[types.Rollout]]  # those whose samples follow
  # With streams, in order; then those of replayed groups.
  samples: Sequence[types.Sample]
  tokenizer: tokenizers.Tokenizer


@dataclasses.dataclass(frozen=True)
class Item:
  """The batch of one step, and the pipeline's state after it."""

  batch: Batch
  metrics: dict[str, float]
  state: dict[str, Any]
  # One per dropped episode, and one per failed call of a reward function.
  errors: tuple[str, ...] = ()
  # Environment -> its rollouts.
  played: Mapping[str, Played] = dataclasses.field(default_factory=dict)

  def stored(self) -> dict[str, Any]:
    """Returns a batch of tokens as JSON-able data, without `played`."""
    return {**vars(self), 'batch': stored_arrays(self.batch), 'played': {}}


def load_item(stored: Mapping[str, Any]) -> Item:
  """Returns the item of `Item.stored`, without its rollouts."""
  batch = types.Batch(**load_arrays(stored['batch']))
  errors = tuple(stored['errors'])
  return Item(**{**stored, 'batch': batch, 'errors': errors})


def stored_arrays(fields: Any) -> dict[str, Any]:
  """Returns the fields of a batch or sample that are not None, JSON-able."""
  return {
    name: (str(x.dtype), x.tolist()) if isinstance(x, np.ndarray) else x
    for name, x in vars(fields).items()
    if x is not None
  }


def load_arrays(stored: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of `stored_arrays`."""
  return {
    name: x if isinstance(x, str) else np.array(x[1], x[0])
    for name, x in stored.items()
  }


def rows(played: Mapping[str, Played]) -> Iterator[dict[str, Any]]:
  """Yields the rows of the first `MAX_GROUPS` groups of each environment."""
  for env, step in played.items():
    # The mean advantage of each rollout that trains, by its uid.
    samples, advantages = iter(step.samples), {}
    for rollout in (rollout for group in step.trained for rollout in group):
      own = [next(samples) for _ in rollout.samples]
      values = [x.advantages[x.mask] for x in own if x.advantages is not None]
      if values and sum(map(len, values)):
        advantages[rollout.uid] = float(np.concatenate(values).mean())
    for number, group in enumerate(step.groups[:MAX_GROUPS]):
      for rollout in group:
        score, prompt = rollout.score, []
        if rollout.samples:  # the tokens before the first sampled one
          first = rollout.samples[0]
          prompt = first.ids[: int(first.mask.argmax())].tolist()
        versions = [x.versions[x.mask] for x in rollout.samples if x.mask.any()]
        yield {
          'env': env,
          'task': rollout.task.id,
          'group': number,
          'prompt': list(rollout.prompt),
          'completion': list(rollout.completion_messages),
          'rendered': tokenizers.show(step.tokenizer, prompt),
          'answer': rollout.task.answer,
          'reward': score.reward,
          'rewards': dict(score.summands),
          'correct': score.correct,
          'stop_reason': rollout.stop_reason,
          'tokens': sum(len(x) for x in versions),
          'version': int(versions[0][0]) if versions else None,
          'turn_rewards': [float(turn.reward) for turn in rollout.turns],
          'error': rollout.error,
          'advantage': advantages.get(rollout.uid),
        }


def staleness(played: Mapping[str, Played], version: int) -> dict[str, float]:
  """Returns by how many steps the sampled tokens are older than a version.

  Tokens of data sets and frozen models have no version, and do not count.

  Args:
    played: the rollouts of a step.
    version: the version that trains on them.
  """
  metrics = {}
  for env, step in played.items():
    ages = [version - x.versions[x.versions >= 0] for x in step.samples]
    if ages and (age := np.concatenate(ages)).size:
      metrics[f'staleness/mean/{env}'] = float(age.mean())
      metrics[f'staleness/max/{env}'] = float(age.max())
  return metrics


@dataclasses.dataclass
class Counts:
  """Counts of one environment that trains on rewards."""

  rollouts: int = 0
  rewarded: int = 0  # rollouts with a reward
  failures: int = 0  # failed episodes, and failed calls of reward functions
  last: str = ''  # the last failure


class Tally:
  """The counts of all environments of a stage that train on rewards."""

  def __init__(self, names: Collection[str]):
    """Starts at 0; `names`: the environments that are counted."""
    self._envs = {name: Counts() for name in names}
    self._steps = self._tied_steps = 0

  def add_env(
    self, name: str, rollouts: int, rewarded: int, failures: Sequence[str]
  ) -> None:
    """Counts a step of one environment; does nothing if it is not counted.

    Args:
      name: the environment.
      rollouts: the number of its rollouts.
      rewarded: the number of those with a reward.
      failures: its failed episodes and failed calls.
    """
    if name not in self._envs:
      return
    counts = self._envs[name]
    counts.rollouts += rollouts
    counts.rewarded += rewarded
    counts.failures += len(failures)
    if failures:
      counts.last = errors.text(failures[-1], 500)

  def add_step(self, has_advantages: bool) -> None:
    """Counts a step; `has_advantages`: whether one of its tokens has one."""
    self._steps += 1
    self._tied_steps += not has_advantages

  @property
  def has_rewards(self) -> bool:
    """Whether a rollout of the stage had a reward."""
    return any(x.rewarded for x in self._envs.values())

  def get_state(self) -> dict[str, Any]:
    """Returns the counts, JSON-able."""
    return {
      'steps': self._steps,
      'tied_steps': self._tied_steps,
      'envs': {k: dataclasses.asdict(x) for k, x in self._envs.items()},
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues from a state of `get_state`; {} = from 0."""
    self._steps = state.get('steps', 0)
    self._tied_steps = state.get('tied_steps', 0)
    self._envs = {
      name: Counts(**state.get('envs', {}).get(name, {})) for name in self._envs
    }

  def check(self, stage: str) -> None:
    """Checks that a finished stage had rewards.

    Raises:
      TooManyErrors: it had none, because rewards or episodes failed.
    """
    broken = [x for x in self._envs.values() if x.failures]
    if broken and not self.has_rewards:
      raise statistics.TooManyErrors(
        f'stage {stage!r} must get rewards: got none in {self._steps} steps, '
        f'after {sum(x.failures for x in broken)} failures of episodes or '
        f'reward functions, the last: {broken[-1].last}',
        (),
        errors.NO_REWARD,
      )

  def warn(self, stage: str) -> None:
    """Logs what a finished stage could not learn from."""
    log = logging.getLogger('absl').warning
    for name, counts in self._envs.items():
      if counts.rollouts and not counts.rewarded:
        log(
          'environment %s of stage %s had no reward in the whole stage: %s',
          name,
          stage,
          f'{counts.failures} failures of episodes or reward functions, the '
          f'last: {counts.last}'
          if counts.failures
          else 'all its rollouts were graded None, which is not scorable',
        )
    if self._envs and self._steps and self._steps == self._tied_steps:
      log(
        'no step of stage %s had an advantage, so nothing was learned from '
        'rewards: those within every group were equal, as for tasks that are '
        'always or never solved, for a group_size of 1, and for a reward '
        'function that takes completions for strings where they are messages, '
        'or mask_truncated left out the rollouts',
        stage,
      )


def widths(stage: schema.Stage, micro_batches: int) -> packing.Widths:
  """Returns the lengths of a stage's rows.

  Args:
    stage: the stage's options.
    micro_batches: M.
  """
  batch, model = stage.batch, stage.model
  is_large = model is None or model.is_large or not batch.trees
  return packing.Widths(
    batch.packed_rows,
    batch.packed_tokens,
    batch.fit,
    packing.COMPILED if is_large else packing.COMPILED_SMALL,
    micro_batches if batch.trees else None,
  )


def metrics(batch: Batch) -> dict[str, float]:
  """Returns the sizes of a batch: tokens, micro-batches, filled share.

  With trees also `batch/shared_tokens`, those that rows of whole samples would
  repeat.
  """
  count = int(batch.num_micro_batches)
  segments = batch.segment_ids[:count]
  tokens = int((segments > 0).sum())
  _, rows, row_tokens = batch.ids.shape
  mask, shared = batch.mask[:count], {}
  if batch.ends is not None:  # the depths at which samples begin
    begins = np.diff(segments, prepend=0) > 0
    depths = batch.positions[:count][begins]
    shared['batch/shared_tokens'] = int(depths.sum())
  if isinstance(batch, types.Batch) and batch.copies is not None:
    mask = mask * batch.copies[:count]
  return shared | {
    'batch/tokens': tokens,
    'batch/completion_tokens': int(mask.sum()),
    'batch/micro_batches': count,
    'batch/fill': tokens / max(count * rows * row_tokens, 1),
  }


def epochs(name: str, source: Mapping[str, Any]) -> dict[str, float]:
  """Returns {'epoch/<name>': passes over a source's items}, by its state.

  {} for a source that is no `sources.Shuffled`.
  """
  if not source.keys() >= {'epoch', 'index', 'length'}:
    return {}
  passes = source['epoch'] + source['index'] / source['length']
  return {f'epoch/{name}': passes}


class StageData:
  """The data of a stage, which needs no model: environments or pairs.

  Attributes:
    stage: the stage's options.
    tokenizer: the run's.
    shape: [micro_batches, rows, row_tokens] of a batch.
    envs: all environments by name; evaluation plays their tasks.
    env_names: in the order of `Batch.env_ids`; () for batches without them.
    hashes: content hashes of the data to train on, and of held-out pairs, by
      the stage's key; and of the files of the user's functions, see
      `preflight.make`.
    checked: what `check` has measured, by environment; of pairs, those of a
      file.
    task_counts: tasks of an epoch, by environment; pairs of a file.
    held_out_counts: held-out tasks that no environment has: pairs of a file.
    group_sizes: samples per task, by environment; of pairs, answers per pair.
    references: models that score, judge or play, each with the stage's key.
    reward_models: reward models, each with the stage's key that names it.
    players: frozen models that play episodes.
    held_models: those of all these that stay loaded while the stage trains.
    min_capacity: tokens that a sequence of the decode engine must hold.
    uses_policy: whether batches depend on the policy's weights.
  """

  stage: schema.Stage
  tokenizer: tokenizers.Tokenizer
  shape: tuple[int, int, int]
  envs: Mapping[str, base.Env]
  env_names: tuple[str, ...] = ()
  hashes: Mapping[str, str] = {}
  checked: Mapping[str, Checked] = {}
  task_counts: Mapping[str, int]
  held_out_counts: Mapping[str, int] = {}
  group_sizes: Mapping[str, int]
  references: Mapping[schema.Reference, str]
  reward_models: Mapping[str, str] = {}
  players: Collection[schema.Reference] = ()
  held_models: Collection[schema.Reference] = ()
  min_capacity: int
  uses_policy: bool = False

  def check(self) -> None:
    """Checks the first tasks or all pairs; does not advance a source.

    Raises:
      ValueError: a row cannot train; names it.
    """

  def shown(self, color: bool) -> list[str]:
    """Returns lines with lengths and first samples, after `check`.

    Args:
      color: marks the tokens that train by color; else by brackets.
    """
    lines, most = [], self.stage.batch.row_tokens
    begin, end = ('\033[32m', '\033[0m') if color else ('[[', ']]')
    for name, (lengths, samples) in self.checked.items():
      p50, p95 = np.percentile(lengths, [50, 95])
      long = sum(length > most for length in lengths)
      lines.append(
        f'  rows of {name}: {p50:.0f} tokens at the median, {p95:.0f} at 95%, '
        f'{max(lengths)} at most; {long} of {len(lengths)} have more than '
        f'{most}; {begin}what trains{end}'
      )
      for ids, trained in samples:
        text, place = '', iter(ids)
        for is_trained, run in itertools.groupby(trained):
          part = [next(place) for _ in run]
          words = tokenizers.show(self.tokenizer, part)
          if len(words) > _SHOWN:
            words = f'{words[: _SHOWN // 2]} ... {words[-_SHOWN // 2 :]}'
          text += f'{begin}{words}{end}' if is_trained else words
        lines.append('    ' + text.replace('\n', '\n    '))
    return lines

  def fingerprints(self) -> dict[str, str]:
    """Returns `hashes`, and those of held-out rows and of the suite."""
    suite = self.stage.eval.suite_path
    texts = {'eval.suite_path': row_files.fingerprint(suite)} if suite else {}
    return {**self.hashes, **texts} | {
      f'envs.{name}.env.eval_path': self.envs[name]
      .source('eval', 0)
      .get_state()['fingerprint']
      for name, entry in self.stage.envs.items()
      if getattr(entry.env, 'eval_path', None)
    }


class Pipeline:
  """An infinite iterator of items, deterministic in its seed and state.

  Attributes:
    uses_policy: whether batches depend on the policy's weights.
    can_prefetch: whether a batch can be built during a step: it needs no model.
    repeats: whether a batch that is made again is the same.
    replays: whether groups of earlier steps are in a batch.
    learns_by_trial: environments that train on rewards of the policy's
      rollouts.
    tally: counts of the stage's rewards; None for pairs.
    held_out: held-out pairs as one batch; None without any.
    selecting: further held-out pairs, which `eval.best` is measured on; or
      None.
  """

  uses_policy: bool = False
  can_prefetch: bool = True
  repeats: bool = True
  replays: bool = False
  learns_by_trial: Collection[str] = ()
  tally: Tally | None = None
  held_out: types.PairBatch | None = None
  selecting: types.PairBatch | None = None

  def __iter__(self):
    return self

  def __next__(self) -> Item:
    raise NotImplementedError

  def paused(self) -> contextlib.AbstractContextManager[None]:
    """Keeps the engine for the caller: no batch is made meanwhile."""
    return contextlib.nullcontext()

  def close(self) -> None:
    """Ends what makes batches."""

  def get_state(self) -> dict[str, Any]:
    """Returns JSON-able state that determines all later items."""
    raise NotImplementedError

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues from a state of `get_state`."""
    raise NotImplementedError
