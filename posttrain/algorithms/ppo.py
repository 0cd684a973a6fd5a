"""Policy gradient with a critic: advantages of the train step."""

import numpy as np

from posttrain import types
from posttrain.algorithms import base


class Ppo(base.Algorithm):
  """PPO: the advantage of a token is GAE of rewards and the critic's values.

      r_t = the reward of the turn that ends at t;  at the last turn's end, also
            the episode's reward less those of all turns: they add up to it
      A = GAE(gamma, lambda) of r and V, in the train step, see `losses.gae`

  The stage has a critic (`critic.kind`), and `loss.value` its options; the
  clipped ratio is `loss.rl.type='clip'`. A turn's reward is at the last token
  that the policy sampled in it. Samples of a rewritten history are separate
  sequences: the value after one's last token stands for the later ones.

  `assign` gives the reward, for metrics. Nothing is pruned, and no group is
  replaced by `batch.max_draws`: a reward of 0 has an advantage.

  Streams: `rewards`, `value_weights` and `bootstraps`, beside those of `grpo`.

  References:
    Schulman et al., "Proximal Policy Optimization Algorithms", arXiv
    1707.06347.
  """

  only_rewards = True
  prune_zero_advantage = False

  def assign(self, group: base.Group) -> list[float]:
    """Returns r_i."""
    return base.rewards(group).tolist()

  def rewards(self, rollout: types.Rollout) -> list[np.ndarray]:
    """Returns r_t, f32[T] per sample."""
    rewards = [np.zeros(len(sample), np.float32) for sample in rollout.samples]
    for turn in rollout.turns:
      rewards[turn.sample][turn.start + turn.length - 1] += turn.reward
    ends = np.flatnonzero(rollout.samples[-1].mask)[-1:]
    (total,) = base.rewards([rollout])
    rewards[-1][ends] += total - sum(turn.reward for turn in rollout.turns)
    return rewards
