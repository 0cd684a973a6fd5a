"""Losses of pairs of answers, or of single labeled answers.

    h = log pi(y | x) - log ref(y | x)    of a whole answer, in nats
    s = sigmoid

beta h is the implicit reward of an answer, see `per_answer`. The functions do
not average: they return one term per pair, or per answer, and the caller
divides by the number of pairs or answers. The types with suffix `_norm` are the
same functions of h / |y|, with |y| the number of the answer's tokens. `ranking`
is the loss of a reward model, of its rewards instead of h.

Axes: any, one entry per pair or answer.
"""

from typing import Any

import jax
import jax.numpy as jnp


def sigmoid(
  chosen: jax.Array, rejected: jax.Array, *, beta: float, label_smoothing: float
) -> jax.Array:
  """Returns the DPO loss; with label smoothing, conservative DPO.

      -(1 - e) log s(d) - e log s(-d)    d = beta (h_c - h_r)

  A policy equal to the reference has d = 0 and a loss of log 2.

  Args:
    chosen, rejected: f32[...], h of each pair's answers.
    beta: > 0; a larger beta keeps the policy closer to the reference.
    label_smoothing: e in [0, 0.5), the assumed rate of wrong labels.

  Returns:
    f32[...], one term per pair.

  References:
    Rafailov et al., "Direct Preference Optimization", arXiv 2305.18290, eq. 7.
    Mitchell, "A note on DPO with noisy preferences", 2023 (smoothing; TRL's
    `robust` is another loss).
  """
  margin = beta * (chosen - rejected)
  wins, loses = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
  return -(1 - label_smoothing) * wins - label_smoothing * loses


def ipo(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> jax.Array:
  """Returns the IPO loss: the squared distance to a margin of 1 / (2 beta).

      (h_c - h_r - 1 / (2 beta))^2

  Args:
    chosen, rejected: f32[...], h of each pair's answers: sums, as in the paper
      and in OpenRLHF. TRL's `ipo` takes means, which is `ipo_norm` here.
    beta: > 0, the paper's tau.

  Returns:
    f32[...], one term per pair.

  References:
    Azar et al., "A General Theoretical Paradigm to Understand Learning from
    Human Preferences", arXiv 2310.12036, eq. 17.
  """
  return jnp.square(chosen - rejected - 1 / (2 * beta))


def simpo(
  chosen: jax.Array, rejected: jax.Array, *, beta: float, gamma: float
) -> jax.Array:
  """Returns the SimPO loss: no reference, and a target margin.

      -log s(beta (l_c - l_r) - gamma)    l = log pi(y | x) / |y|

  Args:
    chosen, rejected: f32[...], l of each pair's answers.
    beta: > 0.
    gamma: >= 0, the target margin. TRL writes gamma / beta inside of the
      bracket, which is the same, and adds a likelihood term (`cpo_alpha`),
      which is left out here.

  Returns:
    f32[...], one term per pair.

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
  beta: float,
  desirable_weight: float,
  undesirable_weight: float,
) -> jax.Array:
  """Returns the KTO loss of single answers, desirable or undesirable.

      w_d s(beta (z - h))    desirable
      w_u s(beta (h - z))    undesirable

  These are w (1 - v) with the paper's v: half the weight where h = z, 0 for a
  desirable answer with h far above z, the weight for one far below.

  Args:
    log_ratios: f32[...], h of each answer.
    desirable: bool[...].
    baseline: f32, z from `kto_baseline`; broadcasts.
    beta: > 0.
    desirable_weight, undesirable_weight: w_d, w_u > 0; the paper uses them to
      balance unequal numbers of answers.

  Returns:
    f32[...], one term per answer.

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
  """Returns KTO's baseline z, an estimate of KL(pi || ref) without gradient.

      max(0, mean h(x, y'))    over prompts x with answers y' to other prompts

  Args:
    log_ratios: f32[...], h of each mismatched answer.
    where: bool[...], the entries to average.

  Returns:
    f32[], nats; 0 if `where` is all False.
  """
  known = jnp.where(where, jax.lax.stop_gradient(log_ratios), 0.0)
  return jnp.maximum(jnp.sum(known) / jnp.maximum(jnp.sum(where), 1), 0.0)


def ranking(
  chosen: jax.Array,
  rejected: jax.Array,
  *,
  margins: jax.Array | float = 0.0,
  center_coef: float,
) -> jax.Array:
  """Returns the Bradley-Terry loss of a reward model.

      -log s(r_c - r_r - m) + c (r_c + r_r)^2

  The negative log-likelihood that the chosen answer wins. It depends on the
  difference alone and leaves the rewards' mean open; c > 0 pulls it to 0.

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


# By `type` of the options.
TYPES = {
  'sigmoid': sigmoid,
  'sigmoid_norm': sigmoid,
  'ipo': ipo,
  'ipo_norm': ipo,
  'simpo': simpo,
  'kto': kto,
}


def per_answer(kind: str, log_ratios: Any, lengths: Any) -> Any:
  """Returns what a loss compares: h, or h / |y| where its type divides.

  Times beta it is the implicit reward of the answer.

  Args:
    kind: one of `TYPES`.
    log_ratios: f[...], h of each answer; with 'simpo' log pi(y | x).
    lengths: [...], |y|, at least 1.

  Returns:
    f[...].
  """
  divides = kind in ('sigmoid_norm', 'ipo_norm', 'simpo')
  return log_ratios / lengths if divides else log_ratios
