"""Losses of preferences: pairs of answers, one chosen; or answers with labels.

    h = log pi(y | x) - log ref(y | x)    of a whole answer, in nats
    s = sigmoid

beta h is the implicit reward of an answer. Nothing here is averaged: a
function returns a term per pair, or per answer, and whoever calls it divides
by their number. What is `_norm` in a config is the same function of h / |y|,
with |y| the answer's tokens.

Axes: T tokens of a row; else any, one entry per pair or answer.
"""

import jax
import jax.numpy as jnp


def seq_logprob(logprobs: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the log probability of an answer.

      sum_t log pi(y_t)    where mask_t

  Args:
    logprobs: f32[..., T], nats; off the mask anything, also inf or NaN.
    mask: bool[..., T], the answer's tokens.

  Returns:
    f32[...], nats; 0 for an answer without tokens.
  """
  return jnp.sum(jnp.where(mask, logprobs, 0.0), axis=-1)


def sigmoid(
  chosen: jax.Array,
  rejected: jax.Array,
  *,
  beta: float = 0.1,
  label_smoothing: float = 0.0,
) -> jax.Array:
  """DPO; with label smoothing, conservative DPO.

      -(1 - e) log s(d) - e log s(-d)    d = beta (h_c - h_r)

  With a policy that is the reference d is 0, and the loss log 2.

  Args:
    chosen, rejected: f32[...], h of each pair's answers.
    beta: > 0; the larger, the less far from the reference.
    label_smoothing: e in [0, 0.5), how often a label is taken to be wrong.

  Returns:
    f32[...], a term per pair.

  References:
    Rafailov et al., "Direct Preference Optimization", arXiv 2305.18290, eq. 7.
    Mitchell, "A note on DPO with noisy preferences", 2023 (smoothing; TRL has
    it in other types alone, `robust` is not the same).
  """
  margin = beta * (chosen - rejected)
  wins, loses = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
  return -(1 - label_smoothing) * wins - label_smoothing * loses


def ipo(
  chosen: jax.Array, rejected: jax.Array, *, beta: float = 0.1
) -> jax.Array:
  """IPO: a margin of 1 / (2 beta), and no more.

      (h_c - h_r - 1 / (2 beta))^2

  Args:
    chosen, rejected: f32[...], h of each pair's answers: sums, as in the paper
      and in OpenRLHF. TRL's `ipo` takes means; that is our `ipo_norm`.
    beta: > 0, the paper's tau.

  Returns:
    f32[...], a term per pair.

  References:
    Azar et al., "A General Theoretical Paradigm to Understand Learning from
    Human Preferences", arXiv 2310.12036, eq. 17.
  """
  return jnp.square(chosen - rejected - 1 / (2 * beta))


def simpo(
  chosen: jax.Array,
  rejected: jax.Array,
  *,
  beta: float = 2.0,
  gamma: float = 1.0,
) -> jax.Array:
  """SimPO: no reference, and a margin to win by.

      -log s(beta (l_c - l_r) - gamma)    l = log pi(y | x) / |y|

  Args:
    chosen, rejected: f32[...], l of each pair's answers.
    beta: > 0.
    gamma: >= 0. TRL writes it as gamma / beta inside of the bracket, the same,
      and adds a likelihood (`cpo_alpha`) that this has not.

  Returns:
    f32[...], a term per pair.

  References:
    Meng et al., "SimPO: Simple Preference Optimization with a Reference-Free
    Reward", arXiv 2405.14734, eq. 6.
  """
  return -jax.nn.log_sigmoid(beta * (chosen - rejected) - gamma)


def kto(
  log_ratios: jax.Array,
  desirable: jax.Array,
  baseline: jax.Array,
  *,
  beta: float = 0.1,
  desirable_weight: float = 1.0,
  undesirable_weight: float = 1.0,
) -> jax.Array:
  """KTO: answers that are good or bad, each for itself.

      w_d s(beta (z - h))    of a desirable answer
      w_u s(beta (h - z))    of another

  These are w (1 - v) with the paper's v: half the weight where h = z, 0 for a
  desirable answer with h far above z, the weight for one far below.

  Args:
    log_ratios: f32[...], h of each answer.
    desirable: bool[...].
    baseline: z, of `kto_baseline`; broadcasts.
    beta: > 0.
    desirable_weight, undesirable_weight: w_d, w_u > 0; the paper balances
      unequal numbers by them.

  Returns:
    f32[...], a term per answer.

  References:
    Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic
    Optimization", arXiv 2402.01306, eq. 8.
  """
  gain = beta * (log_ratios - jax.lax.stop_gradient(baseline))
  return jnp.where(
    desirable,
    desirable_weight * jax.nn.sigmoid(-gain),
    undesirable_weight * jax.nn.sigmoid(gain),
  )


def kto_baseline(log_ratios: jax.Array, where: jax.Array) -> jax.Array:
  """KTO's point of comparison z: how far the policy has drifted, in nats.

      max(0, mean h(x, y'))    of prompts x with answers y' to other prompts

  An estimate of KL(pi || ref), without gradient.

  Args:
    log_ratios: f32[...], h of those.
    where: bool[...], which of them there are.

  Returns:
    f32[].
  """
  known = jnp.where(where, jax.lax.stop_gradient(log_ratios), 0.0)
  return jnp.maximum(jnp.sum(known) / jnp.maximum(jnp.sum(where), 1), 0.0)


# A type of `schema.PreferenceLoss` -> its function.
TYPES = {
  'sigmoid': sigmoid,
  'sigmoid_norm': sigmoid,
  'ipo': ipo,
  'ipo_norm': ipo,
  'simpo': simpo,
  'kto': kto,
}
# The types whose function gets h / |y|, or l, instead of h.
PER_TOKEN = ('sigmoid_norm', 'ipo_norm', 'simpo')
