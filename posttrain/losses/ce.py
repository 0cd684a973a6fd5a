"""Weighted cross-entropy. Axes: any; all arrays have the same shape."""

import chex
import jax
import jax.numpy as jnp

from posttrain.losses import combine


def loss(
    logprobs: jax.Array, weights: jax.Array
) -> tuple[jax.Array, combine.Metrics]:
  """Sums the weighted negative log-likelihood over the member tokens.

  sum_{t: w_t != 0} -w_t log pi(y_t)

  A token with weight 0 adds exactly 0 to value and gradient, whatever its
  logprob (also inf or NaN). No member gives 0.

  Args:
    logprobs: f32[...], log pi of each token, in nats.
    weights: f32[...]; a token is a member where this is not 0.

  Returns:
    The sum, f32[], and the metric `nll`: the members' unweighted -logprobs.
  """
  chex.assert_equal_shape([logprobs, weights])
  member = weights != 0
  # Masked before it is multiplied: 0 * inf is NaN, in the gradient as well.
  nll = -jnp.where(member, logprobs, 0.0)
  return jnp.sum(nll * weights), {'nll': combine.pair(nll, member)}
