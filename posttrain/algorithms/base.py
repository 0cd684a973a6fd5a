"""The base class of algorithms, which write per-token streams.

Hooks return arrays and write nothing. `streams` calls them on all
finished groups of an environment and a step, and stamps their results on the
samples:

1. `observation_weights(rollout)`: CE weight of each token that the policy did
   not sample (default: none).
2. `assign(group)`: credit of a complete group.
3. `rescale(groups, credits)`: credit adjusted over all groups (default:
   unchanged).
4. `rewards(rollout)`: reward of each token, for a critic (default: none).
5. `score(samples, scorer)`: logprobs under a reference, before packing.

Below the class: what several algorithms compute of a group or a rollout.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from posttrain import schema, types

_ASSISTANT = types.ROLES.index('assistant')
# Attributes of an algorithm that its options may have.
_OPTIONS = (
  'weight kl_beta reference prune_zero_advantage mask_truncated '
  'bootstrap'.split()
)

# Credit of a rollout: a scalar for all its completion tokens, an array over the
# tokens of its samples, or None for "no credit".
Credit = float | np.ndarray | None
Group = Sequence[types.Rollout]


class Scorer(Protocol):
  """Logprobs under a reference."""

  def __call__(
    self,
    reference: schema.Reference,
    samples: Sequence[types.Sample],
    hints: Sequence[types.Messages] | None = None,
  ) -> Sequence[np.ndarray]:
    """Scores samples under a reference.

    Args:
      reference: the model's name in the config, see `rollout.frozen_models`.
      samples: scored at their own temperatures.
      hints: a message for the prompt of each sample in the reference's
        context; None = none.

    Returns:
      One f32[T] per sample: log q(token_t | <t) in nats; 0 at token 0. It may
      wait for them at the first access, so that other models work meanwhile;
      an algorithm that reads them in `score` waits there.
    """
    ...


class Algorithm:
  """Base class. A subclass sets the component that its mask tokens train.

  `streams` reads the attributes below, and calls the hooks.
  """

  component: str = 'rl'  # or 'ce', 'ref_kl'
  # Weight of the mask tokens in it; of an rl token it is 1.
  weight: float = 1.0
  # Whether rewards are all that it learns from, so something must grade.
  only_rewards: bool = False
  # Whether credit is relative to the group, so a group of one has none; an
  # option `baseline=False` of the algorithm undoes it.
  group_relative: bool = False
  # Weight of the KL to `reference` on all mask tokens; 0 = no KL.
  kl_beta: float = 0.0
  reference: schema.Reference = 'init'  # the model of the default `score`
  # Whether tokens with advantage 0 leave the rl component.
  prune_zero_advantage: bool = True
  # Whether rollouts that a token budget cut off train nothing.
  mask_truncated: bool = False
  # With `rewards`, whether a value stands for what follows a rollout that a
  # token budget cut off.
  bootstrap: bool = False

  def __init__(self, cfg: Any):
    """Reads the options.

    Args:
      cfg: options of the algorithm's type; those of `_OPTIONS` are optional.
    """
    self.cfg = cfg
    for name in _OPTIONS:
      setattr(self, name, getattr(cfg, name, getattr(type(self), name)))

  @classmethod
  def needs_critic(cls) -> bool:
    """Returns whether it defines `rewards`, from which a critic learns."""
    return cls.rewards is not Algorithm.rewards

  @property
  def scoring_reference(self) -> schema.Reference | None:
    """The model of the default `score`; None if no token needs its scores."""
    by_kl = self.kl_beta or self.component == 'ref_kl'
    return self.reference if by_kl else None

  def trains_on(self, rollout: types.Rollout) -> bool:
    """Returns whether the rollout's tokens are in the loss."""
    return not (self.mask_truncated and rollout.is_truncated)

  def check(self, task: types.Task) -> None:
    """Raises a ValueError with the row if the algorithm cannot use the task."""

  def observation_weights(
    self, rollout: types.Rollout
  ) -> Sequence[np.ndarray] | None:
    """Returns one f32[T] per sample of CE weights, or None for no weight."""
    del rollout

  def assign(self, group: Group) -> Sequence[Credit]:
    """Returns the credit of each rollout of a complete group."""
    return [None] * len(group)

  def rewards(self, rollout: types.Rollout) -> Sequence[np.ndarray] | None:
    """Returns one f32[T] per sample of rewards, for a critic.

    The critic's advantages replace the credit in the train step. None = no
    critic.
    """
    del rollout

  def rescale(
    self, groups: Sequence[Group], credits: Sequence[Sequence[Credit]]
  ) -> Sequence[Sequence[Credit]]:
    """Returns the final credit of each rollout of each group.

    Args:
      groups: all groups of the environment in the step.
      credits: result of `assign` for each group.
    """
    del groups
    return credits

  def score(
    self, samples: Sequence[types.Sample], scorer: Scorer
  ) -> Sequence[np.ndarray]:
    """Returns reference logprobs in nats, f32[T] per sample.

    Called with the samples that have ref_kl members, if any: once per step, or
    per group if the reference is on a server.
    """
    return scorer(self.reference, samples)

  def get_state(self) -> dict[str, Any]:
    """Returns the algorithm's state, in types that JSON can represent."""
    return {}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Restores a state of `get_state`."""
    assert not state, f'{type(self).__name__} keeps no state: got {state}'


def rewards(group: Group) -> np.ndarray:
  """Returns the rewards of a group, f32[G].

  Args:
    group: rollouts without errors, all with a reward.
  """
  for rollout in group:
    assert rollout.stop_reason != 'error' and rollout.score.reward is not None
  return np.array([r.score.reward for r in group], np.float32)


def centered(values: np.ndarray) -> np.ndarray:
  """Returns values - mean(values); exactly 0 where all are equal.

  The mean of equal floats may differ from them in the last bit.
  """
  if not values.size or values.min() == values.max():
    return np.zeros_like(values)
  return values - values.mean()


def contents(rollout: types.Rollout) -> list[np.ndarray]:
  """Returns masks of the contents of messages after the prompt.

  The prompt is all messages before the first sampled token. If the history was
  rewritten, a later sample begins with the whole history: its mask leaves out
  messages of earlier samples, and assistant turns before its first sampled
  token, which are the policy's. (An assistant turn of the environment cannot be
  distinguished from them, and is left out as well.)

  Returns:
    bool[T] per sample.
  """
  masks: list[np.ndarray] = []
  known: set[int] | None = None  # messages of the prompt or an earlier sample
  for sample in rollout.samples:
    ids, is_prefix = sample.message_ids, np.cumsum(sample.mask) == 0
    assert ids is not None, 'message_ids'
    if known is None:
      known = set(ids[is_prefix].tolist())
    masks.append(
      sample.is_content
      & ~sample.mask
      & (ids >= 0)
      & ~np.isin(ids, list(known))
      & ~(is_prefix & (sample.roles == _ASSISTANT))
    )
    known |= set(ids.tolist())
  return masks


def require_equal(what: str, got: Any, expected: Any) -> None:
  """Raises ValueError unless a function returned the expected shape."""
  if got != expected:
    raise ValueError(f'{what}: got {got}, expected {expected}')
