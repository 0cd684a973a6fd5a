"""Counts of the rewards of a whole stage, and what its end says about them.

Part of the pipeline's state, so that a resumed stage counts on.
"""

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from posttrain.util import errors


class NoReward(RuntimeError):
  """No rollout of a stage had a reward, because rewards or episodes failed."""

  exit_code = errors.NO_REWARD


@dataclasses.dataclass
class Counts:
  """Counts of one environment that trains on rewards."""

  rollouts: int = 0
  rewarded: int = 0  # rollouts with a reward
  failures: int = 0  # failed episodes, and failed calls of reward functions
  last: str = ''  # the last failure

  @property
  def is_broken(self) -> bool:
    """Whether failures left it without any reward."""
    return bool(self.failures) and not self.rewarded


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

    Args:
      stage: the stage's name.

    Raises:
      NoReward: it had none, because rewards or episodes failed.
    """
    counts = list(self._envs.values())
    if not any(x.is_broken for x in counts) or self.has_rewards:
      return
    failures = sum(x.failures for x in counts)
    last = next(x.last for x in reversed(counts) if x.last)
    raise NoReward(
      f'stage {stage!r} must get rewards: got none for its '
      f'{sum(x.rollouts for x in counts)} rollouts in {self._steps} steps, '
      f'after {failures} failures of episodes or reward functions, the last: '
      f'{last}; everything is saved; fix it, and train with another --workdir'
    )

  def warn(self, stage: str) -> None:
    """Logs what a finished stage could not learn from."""
    log = logging.getLogger('absl').warning
    for name, counts in self._envs.items():
      if counts.is_broken:
        log(
          'environment %s of stage %s had no reward in the whole stage: %d '
          'failures of episodes or reward functions, the last: %s',
          name,
          stage,
          counts.failures,
          counts.last,
        )
      elif counts.rollouts and not counts.rewarded:
        log(
          'environment %s of stage %s had no reward in the whole stage: all '
          'its rollouts were graded None, which is not scorable',
          name,
          stage,
        )
    if self._envs and self._steps and self._steps == self._tied_steps:
      log(
        'no step of stage %s had an advantage, so nothing was learned from '
        'rewards: those within every group were equal, as for tasks that are '
        'always or never solved, for a group_size of 1, and for a reward '
        'function that takes completions for strings where they are messages',
        stage,
      )


def check_saved(stage: str, host: Mapping[str, Any]) -> None:
  """Checks the counts in a checkpoint of a finished stage, if it has them.

  Args:
    stage: the stage's name.
    host: the checkpoint's item `host`.

  Raises:
    NoReward: as `Tally.check`.
  """
  pipeline = host.get('pipeline')
  state = pipeline.get('tally') if isinstance(pipeline, Mapping) else None
  if state and host.get('stage') == stage:
    tally = Tally(state['envs'])
    tally.set_state(state)
    tally.check(stage)
