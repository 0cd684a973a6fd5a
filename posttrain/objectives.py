"""What a train step minimizes: functions (params, micro-batch) -> loss.

An objective returns `(loss, metrics)`: `loss` is this micro-batch's share of
the step's loss, so micro-batches add up to it; metrics merge, see
`losses.combine`. Before the first of them, `prepare(params, batch)` completes
the batch by what takes a look at all of it.

Axes: B rows, T tokens of one micro-batch; K choices of a row.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from posttrain import arrays, imports, schema, scoring, types
from posttrain.losses import (
    ce,
    combine,
    preference,
    ranking,
    ratio,
    ref_kl,
    rl,
)
from posttrain.models import reward_head


class TokenComponents:
  """Sum of the token components, each over its own global member count.

      rl / N_rl + ce / N_ce + ref_kl / N_ref_kl

  All are computed for every batch: who has no member adds 0, and costs a
  handful of element-wise operations. The rl component may be a mean over
  sequences instead, see `rl.denominator`.

  Metrics, besides those of the components: `loss/<component>` and
  `loss/total`, `entropy` and `mismatch/*`; where there are several
  environments, also `entropy/<env>` and `nll/<env>`, and
  `loss/<component>/<env>` and `tokens/<component>/<env>`, an environment's
  share of the loss (these add up) and its member tokens.
  """

  def __init__(
      self,
      model: schema.Model,
      envs: tuple[str, ...],
      loss: schema.Loss | None = None,
  ):
    """Reads the options.

    Args:
      model: with its vocabulary resolved.
      envs: names in `env_ids` order.
      loss: options of the components; None = the defaults.
    """
    self._model = model
    self._envs = envs
    loss = loss or schema.Loss()
    self._rl, self._ref_kl = _options(loss.rl), _options(loss.ref_kl)
    self._constant_tokens = self._rl.pop('constant_tokens')
    if 'import_path' in self._rl:
      self._rl['function'] = imports.function(
          self._rl.pop('import_path'), 'config.<stage>.loss.rl.import_path'
      )

  def prepare(self, params, batch: arrays.Batch) -> arrays.Batch:
    """All is there already."""
    del params
    return batch

  def __call__(
      self, params, micro: arrays.Batch
  ) -> tuple[jax.Array, combine.Metrics]:
    """Scores the micro-batch once and applies the components to it.

    Args:
      params: f32 master weights.
      micro: a Batch whose per-token arrays are [B, T].
    """
    logprobs, entropy = scoring.score(
        params, self._model, micro.ids, micro.positions, micro.segment_ids,
        micro.temperatures,
    )  # fmt: skip
    parts = {
        'rl': rl.loss(
            logprobs, micro.sampler_logprobs, micro.advantages,
            micro.rl_weights, micro.segment_ids, entropy, **self._rl,
        ),
        'ce': ce.loss(logprobs, micro.ce_weights),
        'ref_kl': ref_kl.loss(
            logprobs, micro.sampler_logprobs, micro.ref_logprobs,
            micro.ref_kl_weights, **self._ref_kl,
        ),
    }  # fmt: skip
    counts = {
        'rl': rl.denominator(
            micro.rl_count, micro.rl_sequences,
            aggregation=self._rl['aggregation'],
            constant_tokens=self._constant_tokens,
        ),
        'ce': micro.ce_count,
        'ref_kl': micro.ref_kl_count,
    }  # fmt: skip
    loss, metrics = combine.total(parts, counts)
    if len(self._envs) > 1:
      metrics |= self._per_env(micro, parts, counts)
    return loss, {
        **metrics,
        **self._diagnostics(micro, logprobs, entropy),
        **_mismatch(micro, logprobs, self._rl['max_log_ratio']),
    }

  def _per_env(self, micro, parts, counts) -> combine.Metrics:
    """Every component's loss and member tokens, environment by environment."""
    groups = {
        name: micro.env_ids == i for i, name in enumerate(self._envs)
    }
    metrics = combine.shares(parts, counts, groups)
    for component in types.COMPONENTS:
      member = getattr(micro, f'{component}_weights') != 0
      for name, here in groups.items():
        metrics[f'tokens/{component}/{name}'] = (
            jnp.sum(member & here, dtype=jnp.float32), jnp.zeros(())
        )  # fmt: skip
    return metrics

  def _diagnostics(self, micro, logprobs, entropy) -> combine.Metrics:
    """Means over completion tokens; per environment where there are more."""
    mask = micro.mask & (micro.positions > 0)
    metrics = {'entropy': combine.pair(entropy, mask)}
    if len(self._envs) > 1:
      for i, name in enumerate(self._envs):
        here = mask & (micro.env_ids == i)
        metrics[f'entropy/{name}'] = combine.pair(entropy, here)
        metrics[f'nll/{name}'] = combine.pair(-logprobs, here)
    return metrics


def _mismatch(micro, logprobs, max_log_ratio) -> combine.Metrics:
  """Sampler against trainer, on the tokens that some policy sampled.

  Zero but for rounding where both ran under the same parameters; `k3`
  estimates KL(sampler || trainer). Members or not: what is pruned counts.
  """
  here = micro.mask & (micro.versions >= 0) & (micro.positions > 0)
  at = ratio.moved(
      jax.lax.stop_gradient(logprobs), micro.sampler_logprobs,
      here.astype(jnp.float32), max_log_ratio,
  )  # fmt: skip
  distance = jnp.abs(at.log_ratio)
  return {
      'mismatch/abs_mean': combine.pair(distance, here),
      'mismatch/max': combine.largest(distance, here),
      'mismatch/k3': combine.pair(at.k3, here),
  }


class Preference:
  """The mean of a preference loss over pairs, or with KTO over answers.

  Metrics, in nats: `rewards/chosen` and `rewards/rejected`, the implicit
  rewards beta h (with SimPO, beta l); over pairs `rewards/margins`, and
  `rewards/accuracies`, the share whose margin is positive; `logps/*`, the log
  probability of answers; `drift/*`, h per token. With KTO also `kto/baseline`.
  """

  # Of h (or l, with SimPO), and whether it is one per token.
  _FUNCTIONS = {
      'sigmoid': (preference.sigmoid, False),
      'sigmoid_norm': (preference.sigmoid, True),
      'ipo': (preference.ipo, False),
      'ipo_norm': (preference.ipo, True),
      'simpo': (preference.simpo, True),
      'kto': (preference.kto, False),
  }

  def __init__(
      self, model: schema.Model, envs: tuple[str, ...], loss: schema.Loss
  ):
    """Args: model: with its vocabulary resolved; envs: not read."""
    del envs
    self._model, self._options = model, _options(loss.preference)
    self._type = self._options.pop('type')
    self._function, self._per_token = self._FUNCTIONS[self._type]

  def prepare(
      self, params, batch: arrays.ChoiceBatch
  ) -> arrays.ChoiceBatch:
    """Finds KTO's baseline, from the micro-batches behind those that train."""
    if self._type != 'kto':
      return batch

    def add(i, sums):
      micro = jax.tree.map(lambda x: x[i] if x.ndim else x, batch)
      _, log_ratio, _ = self._score(params, micro)
      here = micro.present[..., 0]
      value = jnp.sum(jnp.where(here, log_ratio[..., 0], 0.0))
      return sums[0] + value, sums[1] + jnp.sum(here, dtype=jnp.float32)

    total, count = jax.lax.fori_loop(
        batch.live, batch.scored, add, (jnp.zeros(()), jnp.zeros(()))
    )
    mean = total / jnp.maximum(count, 1.0)
    baseline = preference.kto_baseline(mean, count > 0)
    return dataclasses.replace(batch, baseline=baseline)

  def __call__(
      self, params, micro: arrays.ChoiceBatch
  ) -> tuple[jax.Array, combine.Metrics]:
    """Scores both answers of every choice in one forward."""
    logps, log_ratio, lengths = self._score(params, micro)
    values = logps if self._type == 'simpo' else log_ratio
    if self._per_token:
      values = values / lengths
    both = micro.present.all(-1)
    if self._type == 'kto':
      terms = self._function(
          values, jnp.array([[[True, False]]]), micro.baseline, **self._options
      )
      where, count = micro.present, micro.answers
    else:
      terms = self._function(values[..., 0], values[..., 1], **self._options)
      where, count = both, micro.pairs
    loss, metrics = combine.total(
        {'preference': (jnp.where(where, terms, 0.0), {})},
        {'preference': count},
    )
    rewards = self._options['beta'] * values
    margins = rewards[..., 0] - rewards[..., 1]
    return loss, {
        **metrics,
        'rewards/margins': combine.pair(margins, both),
        'rewards/accuracies': combine.pair(margins > 0, both),
        **_by_answer('rewards', rewards, micro.present),
        **_by_answer('logps', logps, micro.present),
        **({} if self._type == 'simpo' else _by_answer(
            'drift', log_ratio / lengths, micro.present
        )),
        **({'kto/baseline': combine.largest(micro.baseline, True)}
           if self._type == 'kto' else {}),
    }

  def _score(self, params, micro):
    """(log probability, log ratio, tokens) of answers, f32[B, K, 2] each."""
    logprobs, _ = scoring.score(
        params, self._model, micro.ids, micro.positions, micro.segment_ids,
        jnp.ones(micro.ids.shape, jnp.float32),
    )  # fmt: skip
    mask = _whose(micro) & micro.mask[:, None, None]
    logps = preference.seq_logprob(logprobs[:, None, None], mask)
    log_ratio = jnp.where(micro.present, logps - micro.ref_logprobs, 0.0)
    return logps, log_ratio, jnp.maximum(jnp.sum(mask, axis=-1), 1)


class Ranking:
  """The mean of the reward model's loss over pairs.

  Metrics: `rewards/chosen`, `rewards/rejected`, `rewards/margins` and
  `rewards/accuracies`, as `Preference`, of the rewards themselves.
  """

  def __init__(
      self, model: schema.Model, envs: tuple[str, ...], loss: schema.Loss
  ):
    """Args: model: with its vocabulary resolved; envs: not read."""
    del envs
    self._model, self._options = model, _options(loss.ranking)

  def prepare(
      self, params, batch: arrays.ChoiceBatch
  ) -> arrays.ChoiceBatch:
    """All is there already."""
    del params
    return batch

  def __call__(
      self, params, micro: arrays.ChoiceBatch
  ) -> tuple[jax.Array, combine.Metrics]:
    """Reads what both answers of every choice are worth in one forward."""
    whose = _whose(micro)
    places = jnp.arange(micro.ids.shape[-1])[None, None, None]
    ends = jnp.max(jnp.where(whose, places, 0), axis=-1)
    rewards = reward_head.rewards(
        params, self._model, micro.ids, micro.positions, micro.segment_ids,
        ends.reshape(ends.shape[0], -1),
    ).reshape(ends.shape)  # fmt: skip
    terms = ranking.loss(
        rewards[..., 0], rewards[..., 1], margins=micro.margins,
        **self._options,
    )
    both = micro.present.all(-1)
    loss, metrics = combine.total(
        {'ranking': (jnp.where(both, terms, 0.0), {})},
        {'ranking': micro.pairs},
    )
    margins = rewards[..., 0] - rewards[..., 1]
    return loss, {
        **metrics,
        'rewards/margins': combine.pair(margins, both),
        'rewards/accuracies': combine.pair(margins > 0, both),
        **_by_answer('rewards', rewards, micro.present),
    }


def _whose(micro: arrays.ChoiceBatch) -> jax.Array:
  """bool[B, K, 2, T]: which tokens are an answer's, its prompt included."""
  choices = micro.present.shape[-2]
  segments = jnp.arange(1, 2 * choices + 1).reshape(1, choices, 2, 1)
  return micro.segment_ids[:, None, None] == segments


def _by_answer(name: str, values, present) -> combine.Metrics:
  return {
      f'{name}/{which}': combine.pair(values[..., i], present[..., i])
      for i, which in enumerate(('chosen', 'rejected'))
  }


def _options(node) -> dict[str, Any]:
  return {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}


KINDS = {
    'tokens': TokenComponents, 'preference': Preference, 'ranking': Ranking,
}  # fmt: skip
