"""Generalized advantage estimation over the tokens of packed rows.

Axes: T tokens of a row; any dimensions before it.
"""

import chex
import jax
import jax.numpy as jnp


def advantages(
  rewards: jax.Array,
  values: jax.Array,
  last_values: jax.Array,
  member: jax.Array,
  segment_ids: jax.Array,
  *,
  gamma: float,
  gae_lambda: float,
) -> jax.Array:
  """Returns GAE(gamma, lambda) of each member token.

      delta_t = r_t + gamma V_t+1 - V_t
      A_t = delta_t + gamma lambda A_t+1

  t + 1 is the next member of the token's segment: tokens between them, as those
  of tools, are no actions and take no time. At a segment's last member V_t+1 is
  `last_values` and A_t+1 is 0. The return of a token is A_t + V_t.

  With gamma = lambda = 1 and values of 0 it is the sum of the rewards from the
  token on. No member gives all zeros.

  Args:
    rewards: f32[..., T], reward of each token.
    values: f32[..., T], value of the state in which the token was sampled.
    last_values: f32[..., T], at each segment's last member the value of the
      state after it; 0 where an episode ends.
    member: bool[..., T], the sampled tokens.
    segment_ids: i32[..., T], the sequence within the row; it may have
      tokens between its members, but none of another sequence.
    gamma: discount per member token.
    gae_lambda: decay of the weight of later deltas.

  Returns:
    f32[..., T], 0 where not a member; no gradient passes.

  References:
    Schulman et al., "High-Dimensional Continuous Control Using Generalized
    Advantage Estimation", arXiv 1506.02438.
  """
  arrays = rewards, values, last_values, member, segment_ids
  chex.assert_equal_shape(arrays)

  def step(after, token):
    advantage, value, segment = after
    reward, own_value, last_value, is_member, own_segment = token
    same = segment == own_segment
    next_value = jnp.where(same, value, last_value)
    delta = reward + gamma * next_value - own_value
    own = delta + gamma * gae_lambda * jnp.where(same, advantage, 0.0)
    found = own, own_value, own_segment
    after = jax.tree.map(lambda x, y: jnp.where(is_member, x, y), found, after)
    return after, jnp.where(is_member, own, 0.0)

  arrays = [jnp.moveaxis(jax.lax.stop_gradient(x), -1, 0) for x in arrays]
  zeros = jnp.zeros_like(arrays[1][0])
  none = jnp.full_like(arrays[4][0], -1)
  _, result = jax.lax.scan(step, (zeros, zeros, none), arrays, reverse=True)
  return jnp.moveaxis(result, 0, -1)
