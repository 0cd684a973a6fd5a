"""The Bradley-Terry loss of a reward model. Axes: any, one entry per pair."""

import jax
import jax.numpy as jnp


def loss(
  chosen: jax.Array,
  rejected: jax.Array,
  *,
  margins: jax.Array | float = 0.0,
  center_coef: float = 0.0,
) -> jax.Array:
  """Returns the negative log-likelihood that the chosen answer wins.

      -log s(r_c - r_r - m) + c (r_c + r_r)^2

  The likelihood depends on the difference alone and leaves the rewards' mean
  open; c > 0 pulls it to 0.

  Args:
    chosen, rejected: f32[...], the rewards r of each pair's answers.
    margins: f32, m, the margin by which the chosen answer must win;
      broadcasts.
    center_coef: c >= 0.

  Returns:
    f32[...], one term per pair; log 2 for equal rewards if m = 0 and c = 0.

  References:
    Bradley and Terry, "Rank Analysis of Incomplete Block Designs", 1952.
    Touvron et al., "Llama 2", arXiv 2307.09288, eq. 2 (the margin). Eisenstein
    et al., "Helping or Herding?", arXiv 2312.09244 (the centre).
  """
  return -jax.nn.log_sigmoid(chosen - rejected - margins) + (
    center_coef * jnp.square(chosen + rejected)
  )
