"""Weighted cross-entropy. Axes: any; all arrays have the same shape."""

import chex
import jax
import jax.numpy as jnp

from posttrain.losses import combine


def loss(
  logprobs: jax.Array, weights: jax.Array
) -> tuple[jax.Array, combine.Metrics]:
  """Returns the weighted negative log-likelihood of the member tokens.

  -w_t log pi(y_t) where w_t != 0

  A token with weight 0 has a term of exactly 0, and no gradient, whatever its
  logprob (also inf or NaN).

  Args:
    logprobs: f32[...], log pi of each token, in nats.
    weights: f32[...]; a token is a member where this is not 0.

  Returns:
    The terms, f32[...], and the metric `nll`: the members' unweighted
    -logprobs.
  """
  chex.assert_equal_shape([logprobs, weights])
  member = weights != 0
  # Masked before the product: 0 * inf is NaN, in the gradient as well.
  nll = -jnp.where(member, logprobs, 0.0)
  return nll * weights, {'nll': combine.pair(nll, member)}
