"""Policy gradient without a baseline."""

from posttrain.algorithms import base


class Reward(base.Algorithm):
  """REINFORCE: the advantage is the reward.

      A_i = r_i

  For rewards that are already centered; other rewards give the same expected
  gradient as `rloo`, with more variance.

  Streams: `advantages`, `rl_weights`, and the KL to a reference, as `grpo`.
  Tokens with a reward of exactly 0 are pruned: they have no gradient, and leave
  the denominator; set `prune_zero_advantage` to False to count them.

  References:
    Williams, "Simple Statistical Gradient-Following Algorithms for
    Connectionist Reinforcement Learning", 1992.
  """

  only_rewards = True

  def assign(self, group: base.Group) -> list[float]:
    """Returns A_i."""
    return base.rewards(group).tolist()
