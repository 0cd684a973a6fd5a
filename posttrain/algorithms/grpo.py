"""GRPO: group-relative policy optimization."""

from collections.abc import Sequence

import numpy as np

from posttrain.algorithms import base, length

_EPS = 1e-4  # added to a standard deviation, as in TRL


class Grpo(base.Algorithm):
  """Policy gradient with the mean reward of the group as the baseline.

      A_i = (r_i - mean(r)) / s       the same on all completion tokens of i

      s = 1 ('none'), or sigma + 1e-4, sigma the standard deviation (unbiased,
      ddof 1) of the group's rewards ('group') or of all rewards of the
      environment in the step ('batch')

  r is the environment's reward, after the `length_penalty` if there is one.

  Streams: `advantages`; `rl_weights = 1` on the completion mask, 0 where the
  advantage is exactly 0 (if `prune_zero_advantage`); with `kl_beta` also
  `ref_kl_weights` and `ref_logprobs`, on pruned tokens too.

  Rollouts that failed, or have no reward, are not in the group. One rollout,
  or equal rewards, give advantages of exactly 0. The default does not divide,
  unlike the paper: dividing by the group's deviation gives more weight to
  tasks with less variance (Liu et al., 2503.20783). The paper specifies
  neither eps nor ddof; these are TRL's.

  References:
    Shao et al., "DeepSeekMath", arXiv 2402.03300. Liu et al., "Understanding
    R1-Zero-Like Training", arXiv 2503.20783 (no division). Liu et al., "Part
    I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning", arXiv
    2508.08221 (mean of the group, deviation of the batch).
  """

  only_rewards = True
  group_relative = True

  def assign(self, group: base.Group) -> list[float]:
    """Returns A_i, with s = 1 for 'batch'."""
    rewards = length.rewards(group, self.cfg.length_penalty)
    advantages = base.centered(rewards)
    if self.cfg.scale_rewards == 'group' and advantages.any():
      advantages = advantages / (rewards.std(ddof=1) + np.float32(_EPS))
    return advantages.tolist()

  def rescale(
    self, groups: Sequence[base.Group], credits: Sequence[Sequence[base.Credit]]
  ) -> Sequence[Sequence[base.Credit]]:
    """Divides the advantages by s for 'batch'."""
    if self.cfg.scale_rewards != 'batch':
      return credits
    rewards = np.concatenate(
      [length.rewards(group, self.cfg.length_penalty) for group in groups]
    )
    if rewards.size < 2:
      return credits
    scale = rewards.std(ddof=1) + np.float32(_EPS)
    return [[value / scale for value in group] for group in credits]
