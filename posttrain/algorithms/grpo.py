"""Group-relative policy optimization: the group is its own baseline."""

import numpy as np

from posttrain import schema
from posttrain.algorithms import base

_EPS = 1e-4  # added to a standard deviation, as in TRL


class Grpo(base.Algorithm):
  """Policy gradient with the mean reward of the group as the baseline.

      A_i = (r_i - mean(r)) / s       the same on all completion tokens of i

      s = 1 ('none'), or sigma + 1e-4, sigma the standard deviation (unbiased,
      ddof 1) of the group's rewards ('group') or of all rewards of the
      environment in the step ('batch')

  Streams: `advantages`; `rl_weights = 1` on the completion mask, 0 where the
  advantage is exactly 0 (unless told otherwise); with `kl_beta` also
  `ref_kl_weights` and `ref_logprobs`, on pruned tokens too.

  The mean is over the rollouts that survived: one that failed, or could not
  be graded, is no part of the group. One rollout, or equal rewards, give
  advantages of exactly 0. The default does not divide, unlike the paper:
  dividing by the group's deviation weighs tasks by how rarely they vary (Liu
  et al., 2503.20783). The paper names no eps and no ddof; these are TRL's.

  References:
    Shao et al., "DeepSeekMath", arXiv 2402.03300. Liu et al., "Understanding
    R1-Zero-Like Training", arXiv 2503.20783 (no division). Liu et al., "Part
    I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning", arXiv
    2508.08221 (mean of the group, deviation of the batch).
  """

  component = 'rl'

  def __init__(self, cfg: schema.Grpo):
    self.kl_beta = cfg.kl_beta
    self.reference = cfg.reference
    self.prune_zero_advantage = cfg.prune_zero_advantage
    self._scale = cfg.scale_rewards

  def assign(self, group: base.Group) -> list[float]:
    rewards = _rewards([group])
    if not rewards.size or rewards.min() == rewards.max():
      # The mean of equal floats may differ from them in the last bit.
      return [0.0] * len(group)
    advantages = rewards - rewards.mean()
    if self._scale == 'group':
      advantages /= rewards.std(ddof=1) + np.float32(_EPS)
    return advantages.tolist()

  def rescale(self, groups, credits):
    rewards = _rewards(groups)
    if self._scale != 'batch' or rewards.size < 2:
      return credits
    scale = rewards.std(ddof=1) + np.float32(_EPS)
    return [[credit / scale for credit in group] for group in credits]


def _rewards(groups) -> np.ndarray:
  rollouts = [rollout for group in groups for rollout in group]
  for rollout in rollouts:
    assert rollout.stop_reason != 'error' and rollout.score.reward is not None
  return np.array([r.score.reward for r in rollouts], np.float32)
