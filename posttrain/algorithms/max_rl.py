"""Maximum-likelihood RL: rewards relative to the group's success rate."""

import numpy as np

from posttrain.algorithms import base


class MaxRl(base.Algorithm):
  """Policy gradient that approximates the gradient of the log pass rate.

      A_i = (r_i - m) / m     baseline
      A_i = r_i / m           no baseline         m = mean(r); all 0 if m <= 0

  For rewards of 0 and 1, p = E[r] and N rollouts, the expected gradient is

      (1 - (1 - p)^K) / p  d p,    K = N - 1 with the baseline, N without

  that is, the Taylor series of log p in (1 - p), truncated after K terms: K = 1
  is the policy gradient of p, K = infinity that of log p. So a task with a low
  pass rate has more weight, at most K times. (The baseline costs one term:
  K = N with it would need A_i = -1 for all rollouts of a group without a
  success; here such a group has no gradient.)

  Streams: `advantages`, `rl_weights`, and the KL to a reference, as `grpo`.

  The expectation is per group. A token mean divides by the tokens of the step,
  and where zeros are pruned (without the baseline: all failures) by the tokens
  of the successes: the same direction, with a scale that varies by step.

  One rollout gives 0 with the baseline (K = 0), and REINFORCE without. Equal
  rewards give exactly 0 with the baseline. Rewards must not be negative:
  dividing by a mean near 0 would give failures large credit.

  References:
    Tajwar et al., "Maximum Likelihood Reinforcement Learning", arXiv
    2602.02710.
  """

  only_rewards = True
  group_relative = True

  def assign(self, group: base.Group) -> list[float]:
    """Returns A_i; ValueError for a negative reward."""
    rewards = base.rewards(group)
    if rewards.size and rewards.min() < 0:
      raise ValueError(
        f'rewards must be >= 0 for algorithm max_rl: got {rewards.min():g} for '
        f'task {group[0].task.id} of environment {group[0].task.env}'
      )
    mean = rewards.mean() if rewards.size else 0
    if mean <= 0:
      return np.zeros_like(rewards).tolist()
    gain = base.centered(rewards) if self.cfg.baseline else rewards
    return (gain / mean).tolist()
