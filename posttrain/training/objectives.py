"""Objectives of the train step: functions (params, micro-batch) -> loss.

`arrays.Objective` is their protocol; metrics are (sum, count) pairs and merge
over micro-batches, see `losses.combine`. `TYPES` has one objective per
kind of stage.

Axes: B rows, T tokens of one micro-batch.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from posttrain import schema, scoring, types
from posttrain.losses import ce, combine, gae, ratios, ref_kl, rl, value
from posttrain.models import experts, transformer
from posttrain.training import arrays, pair_objectives


class TokenComponents(arrays.Objective):
  """Sum of the token components, each over its own global member count.

      rl / N_rl + ce / N_ce + ref_kl / N_ref_kl + value / N_value

  The last one only where the batch has values, see `types.VALUE_FIELDS`.

  All are computed for every batch: a component without members adds 0, and
  costs a few element-wise operations. The rl component may be a mean over
  sequences instead, see `rl.denominator`.

  Metrics, besides those of the components: `loss/<component>` and
  `loss/total`, `entropy` and `mismatch/*`; with several environments also
  `entropy/<env>` and `nll/<env>`, `loss/<component>/<env>`, an environment's
  share of the loss (these add up), and `tokens/<component>/<env>`, its member
  tokens; of a model with experts `router/*`.
  """

  def __init__(
    self,
    model: schema.Model,
    envs: tuple[str, ...],
    loss: schema.Loss | None = None,
  ):
    """Reads the options.

    Args:
      model: the model's options, with the vocabulary resolved.
      envs: environment names in `env_ids` order.
      loss: options of the components; None = the defaults.
    """
    self._model, self.dtype = model, model.dtype
    self._envs = envs
    loss = loss or schema.Loss()
    self._rl = loss.rl
    self._ref_kl = vars(loss.ref_kl)
    self._value, self._balance = loss.value, loss.balance

  def before_updates(
    self, params: arrays.Params, batch: arrays.AnyBatch
  ) -> tuple[arrays.AnyBatch, dict[str, jax.Array]]:
    """Adds the proximal policy's logprobs, and a critic's advantages.

    Logprobs are added only where `rl.loss` reads them. Returns the batch and
    the metrics of the critic.
    """
    is_proximal = self._rl.sampler_is_mode != 'none'
    has_critic = batch.rewards is not None
    if not (is_proximal or has_critic):
      return batch, {}

    def score(i, before):
      micro = jax.tree.map(lambda x: x[i] if x.ndim else x, batch)
      _, logprobs, _, *values = self._score(params, micro)
      scores = [logprobs] * is_proximal + values
      return [x.at[i].set(y) for x, y in zip(before, scores, strict=True)]

    zeros = [jnp.zeros_like(batch.sampler_logprobs)]
    scores = jax.lax.fori_loop(
      0, batch.num_micro_batches, score, zeros * (is_proximal + 2 * has_critic)
    )
    proximal = scores.pop(0) if is_proximal else None
    fields, metrics = self._credit(batch, *scores) if has_critic else ({}, {})
    fields = vars(batch) | fields
    return arrays.ScoredBatch(**fields, proximal_logprobs=proximal), metrics

  def _credit(
    self, batch: arrays.AnyBatch, before: jax.Array, after: jax.Array
  ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Returns the fields of a batch that a critic fills, and its metrics."""
    cfg, member = self._value, batch.value_weights != 0
    values = jnp.where(member, before, 0.0)
    advantages = gae.advantages(
      batch.rewards,
      values,
      batch.bootstraps * after,
      member,
      batch.segment_ids,
      gamma=cfg.gamma,
      gae_lambda=cfg.gae_lambda,
    )
    returns = advantages + values

    def moments(x):
      count = jnp.maximum(jnp.sum(member), 1)
      mean = jnp.sum(jnp.where(member, x, 0.0)) / count
      return mean, jnp.sum(jnp.where(member, (x - mean) ** 2, 0.0)) / count

    mean, variance = moments(advantages)
    return_mean, spread = moments(returns)
    if cfg.normalize_advantages:
      advantages = (advantages - mean) / (jnp.sqrt(variance) + 1e-8)
    scale = spread + 1e-8 if cfg.normalize_returns else jnp.ones(())
    return {
      'advantages': jnp.where(member, advantages, batch.advantages),
      'values': values,
      'returns': returns,
      'return_scale': scale,
    }, {
      'value/mean': moments(values)[0],
      'value/return_mean': return_mean,
      'value/explained_variance': jnp.where(
        spread > 0, 1 - variance / spread, 0.0
      ),
    }

  def unmeasured(
    self, batch: types.Batch, metrics: Mapping[str, float]
  ) -> set[str]:
    # Every component is computed for every batch, so one without members, in
    # the batch or in an environment, has metrics of 0.
    prefixes = tuple(
      prefix
      for name in (*types.COMPONENTS, 'value')
      if not getattr(batch, f'{name}_count')
      for prefix in (f'{name}/', f'loss/{name}')
    )
    if not (batch.mask & (batch.versions >= 0)).any():
      prefixes += ('mismatch/',)
    if not batch.num_micro_batches:
      prefixes += ('entropy', 'loss/', 'router/')
    # Exact names from here on: an environment's may begin with another's.
    names = {
      key
      for key, value in metrics.items()
      if key.startswith('tokens/') and not value
    }
    names |= {key.replace('tokens/', 'loss/', 1) for key in names}
    for i, name in enumerate(self._envs):
      if not (batch.mask & (batch.env_ids == i)).any():
        names |= {f'entropy/{name}', f'nll/{name}'}
    return names | {key for key in metrics if key.startswith(prefixes)}

  def __call__(
    self, params: arrays.Params, micro: arrays.AnyBatch
  ) -> tuple[jax.Array, combine.Metrics]:
    stats, logprobs, entropy, *values = self._score(params, micro)
    components = self._components(micro, logprobs, entropy)
    if values and self._value.coef:
      terms, metrics = value.loss(
        values[0],
        micro.values,
        micro.returns,
        micro.value_weights,
        clip=self._value.clip,
      )
      terms *= self._value.coef / micro.return_scale
      components['value'] = terms, metrics
    if micro.copies is not None:
      components = {
        name: (terms * micro.copies, metrics)
        for name, (terms, metrics) in components.items()
      }
    if stats and self._balance:
      member = jnp.astype(micro.rl_weights != 0, jnp.float32)
      member += micro.ce_weights != 0
      term = self._balance * jnp.mean(experts.balance(stats))
      components['balance'] = term * member, {}
    counts = {
      'rl': rl.denominator(
        micro.rl_count,
        micro.rl_sequences,
        aggregation=self._rl.aggregation,
        constant_tokens=self._rl.constant_tokens,
      ),
      'ce': micro.ce_count,
      'ref_kl': micro.ref_kl_count,
      'value': micro.value_count,
      'balance': micro.rl_count + micro.ce_count,
    }
    loss, metrics = combine.total(components, counts)
    if len(self._envs) > 1:
      metrics |= self._per_env(micro, components, counts)
    metrics |= self._diagnostics(micro, logprobs, entropy)
    metrics |= _mismatch(micro, logprobs, self._rl.max_log_ratio)
    metrics |= experts.metrics(stats) if stats else {}
    return loss, combine.sums(metrics, micro.copies)

  def _score(
    self, params: arrays.Params, micro: arrays.AnyBatch
  ) -> tuple[Any, ...]:
    """Returns statistics of experts, logprobs and entropy, f32[B, T].

    With a critic also the values before and after each token.
    """
    places = micro.ids, micro.positions, micro.segment_ids
    links = micro.temperatures, micro.parents
    hidden, stats = transformer.trunk(
      params, self._model, *places, ends=micro.ends, routes=micro.routes
    )
    scores = scoring.score_hidden(params, self._model, hidden, *places, *links)
    if micro.rewards is None:
      return stats, *scores
    critic = params['critic']
    if 'layers' in critic:  # it has a trunk of its own
      hidden, _ = transformer.trunk(
        critic, self._model, *places, ends=micro.ends
      )
    return (
      stats,
      *scores,
      *scoring.values(critic, hidden, micro.positions, micro.parents),
    )

  def _components(
    self, micro: arrays.AnyBatch, logprobs: jax.Array, entropy: jax.Array
  ) -> dict[str, tuple[jax.Array, combine.Metrics]]:
    """Returns the (terms, metrics) of each component, terms f32[B, T]."""
    return {
      'rl': rl.loss(
        logprobs,
        micro.sampler_logprobs,
        micro.advantages,
        micro.rl_weights,
        micro.segment_ids,
        entropy,
        self._rl,
        getattr(micro, 'proximal_logprobs', None),
      ),
      'ce': ce.loss(logprobs, micro.ce_weights),
      'ref_kl': ref_kl.loss(
        logprobs,
        micro.sampler_logprobs,
        micro.ref_logprobs,
        micro.ref_kl_weights,
        **self._ref_kl,
      ),
    }

  def _per_env(self, micro, components, counts) -> combine.Metrics:
    """Returns each component's loss and member tokens by environment."""
    groups = {name: micro.env_ids == i for i, name in enumerate(self._envs)}
    metrics = combine.shares(components, counts, groups)
    for component in types.COMPONENTS:
      member = getattr(micro, f'{component}_weights') != 0
      for name, here in groups.items():
        tokens = jnp.astype(member & here, jnp.float32)
        metrics[f'tokens/{component}/{name}'] = (tokens, jnp.zeros(()))
    return metrics

  def _diagnostics(self, micro, logprobs, entropy) -> combine.Metrics:
    """Returns means over completion tokens, also by environment if several."""
    mask = micro.mask & (micro.positions > 0)
    metrics: combine.Metrics = {'entropy': combine.pair(entropy, mask)}
    if len(self._envs) > 1:
      for i, name in enumerate(self._envs):
        here = mask & (micro.env_ids == i)
        metrics[f'entropy/{name}'] = combine.pair(entropy, here)
        metrics[f'nll/{name}'] = combine.pair(-logprobs, here)
    return metrics


def _mismatch(micro, logprobs, max_log_ratio) -> combine.Metrics:
  """Compares sampler and trainer logprobs on tokens that a policy sampled.

  Zero up to rounding where both ran under the same parameters; `k3` estimates
  KL(sampler || trainer). Pruned tokens count as well.
  """
  here = micro.mask & (micro.versions >= 0) & (micro.positions > 0)
  ratio = ratios.policy_over_sampler(
    jax.lax.stop_gradient(logprobs),
    micro.sampler_logprobs,
    here.astype(jnp.float32),
    max_log_ratio,
  )
  distance = jnp.abs(ratio.log_ratio)
  return {
    'mismatch/abs_mean': combine.pair(distance, here),
    'mismatch/max': combine.largest(distance, here),
    'mismatch/k3': combine.pair(ratio.k3, here),
  }


TYPES: dict[str, Any] = {
  'tokens': TokenComponents,
  'preference': pair_objectives.Preference,
  'ranking': pair_objectives.Ranking,
}
