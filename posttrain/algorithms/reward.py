"""The reward as it is: policy gradient without a baseline."""

from posttrain.algorithms import base, credit


class Reward(base.Algorithm):
  """REINFORCE: what is rewarded becomes likelier, by as much.

      A_i = r_i

  For rewards that are centered already, by a critic or by their design; others
  give the same gradient in expectation as `rloo`, with more noise.

  Streams: `advantages`, `rl_weights`, and the leash, as `grpo`. A reward of
  exactly 0 is pruned: it adds nothing to the gradient, but leaves the
  denominator; set `prune_zero_advantage` to False to keep it there.

  References:
    Williams, "Simple Statistical Gradient-Following Algorithms for
    Connectionist Reinforcement Learning", 1992.
  """

  component = 'rl'

  def assign(self, group: base.Group) -> list[float]:
    return credit.rewards(group).tolist()
