"""The value component: the loss of a critic.

Axes: any; all arrays have the same shape.
"""

import chex
import jax
import jax.numpy as jnp

from posttrain.losses import combine


def loss(
  values: jax.Array,
  old_values: jax.Array,
  returns: jax.Array,
  weights: jax.Array,
  *,
  clip: float | None,
) -> tuple[jax.Array, combine.Metrics]:
  """Returns the weighted squared error of the member tokens' values.

      w / 2 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2)

  Without a clip, and where V = V_old: w / 2 (V - R)^2. A value that has moved
  further than `clip` towards its return has no gradient. A token with weight 0
  has a term of exactly 0, and no gradient, whatever its other inputs.

  Args:
    values: f32[...], V under the trained parameters.
    old_values: f32[...], V before the step's first update.
    returns: f32[...], R, from `gae`.
    weights: f32[...]; a token is a member where this is not 0.
    clip: bound on the change of a value, or None.

  Returns:
    The terms, f32[...], and metrics over the members: `loss`, their mean
    without weights, and `clip_fraction`, where the clipped error is larger.

  References:
    Schulman et al., "Proximal Policy Optimization Algorithms", arXiv
    1707.06347; the clipped loss is that of its code (openai/baselines).
  """
  chex.assert_equal_shape([values, old_values, returns, weights])
  member = weights != 0
  values, old, returns = (
    jnp.where(member, x, 0.0) for x in (values, old_values, returns)
  )
  error = jnp.square(values - returns)
  clipped = error
  if clip is not None:
    near = old + jnp.clip(values - old, -clip, clip)
    clipped = jnp.square(near - returns)
  terms = 0.5 * jnp.maximum(error, clipped)
  return weights * terms, {
    'loss': combine.pair(terms, member),
    'clip_fraction': combine.pair(clipped > error, member),
  }
