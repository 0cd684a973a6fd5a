"""REINFORCE leave-one-out: the baseline is the mean of the other rewards."""

from posttrain.algorithms import base, length


class Rloo(base.Algorithm):
  """Policy gradient with an unbiased baseline from the group.

      A_i = r_i - mean_{j != i} r_j = G / (G - 1) (r_i - mean(r))

  The policy gradient of E[r] without bias, where `grpo`'s is (G - 1) / G of it.
  r is the environment's reward, after the `length_penalty` if there is one. TRL
  subtracts the KL from the reward; here it is the ref_kl component.

  Streams: `advantages`, `rl_weights`, and the KL to a reference, as `grpo`.

  One rollout, or equal rewards, give exactly 0.

  References:
    Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!", 2019.
    Ahmadian et al., "Back to Basics", arXiv 2402.14740.
  """

  only_rewards = True
  group_relative = True

  def assign(self, group: base.Group) -> list[float]:
    """Returns A_i."""
    advantages = base.centered(length.rewards(group, self.cfg.length_penalty))
    scale = len(group) / max(len(group) - 1, 1)
    return (scale * advantages).tolist()
