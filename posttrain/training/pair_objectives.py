"""Objectives on pairs: two answers to a prompt; or a single one, with KTO.

See `arrays.Objective` for the protocol.

Axes: B rows, T tokens of one micro-batch; K pairs of a row.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from posttrain import schema, scoring, sharding, types
from posttrain.losses import combine, preference, segments
from posttrain.models import transformer
from posttrain.training import arrays


class Preference(arrays.Objective):
  """The mean of a preference loss over pairs, or with KTO over answers.

  Metrics, in nats: `rewards/chosen` and `rewards/rejected`, the implicit
  rewards beta h (with SimPO, beta l); over pairs `rewards/margins`, and
  `rewards/accuracies`, the share whose margin is positive (0, as under
  the reference, counts one half); `logps/*`, the log probability of answers;
  `drift/*`, h per token. With KTO also `kto/baseline`.
  """

  def __init__(
    self, model: schema.Model, envs: tuple[str, ...], loss: schema.Loss
  ):
    """Reads the options; pairs have no environments.

    Args:
      model: the model's options, with the vocabulary resolved.
      envs: not read.
      loss: the options of the losses.
    """
    del envs
    self._model, self.dtype = model, model.dtype
    self._options = dict(vars(loss.preference))
    self._type = self._options.pop('type')
    self._options.pop('reference', None)  # its logprobs are in the batch
    self._function = preference.TYPES[self._type]

  def prepare(
    self, params: arrays.Params, batch: arrays.AnyBatch
  ) -> arrays.AnyBatch:
    """Adds KTO's baseline, from the micro-batches after those that train."""
    if self._type != 'kto':
      return batch

    def add(i, sums):
      micro = jax.tree.map(lambda x: x[i] if x.ndim else x, batch)
      _, log_ratio, _ = self._score(params, micro)
      here = micro.present[..., 0]
      value = jnp.sum(jnp.where(here, log_ratio[..., 0], 0.0))
      return sums[0] + value, sums[1] + jnp.sum(here, dtype=jnp.float32)

    total, count = jax.lax.fori_loop(
      batch.num_micro_batches, batch.scored, add, (jnp.zeros(()), jnp.zeros(()))
    )
    mean = total / jnp.maximum(count, 1.0)
    baseline = preference.kto_baseline(mean, count > 0)
    return dataclasses.replace(batch, baseline=baseline)

  def unmeasured(
    self, batch: types.PairBatch, metrics: Mapping[str, float]
  ) -> set[str]:
    names = _unmeasured(batch, metrics)
    has_baseline = batch.scored > batch.num_micro_batches
    return names if has_baseline else {*names, 'kto/baseline'}

  def __call__(
    self, params: arrays.Params, micro: arrays.AnyBatch
  ) -> tuple[jax.Array, combine.Metrics]:
    """Scores both answers of every pair in one forward."""
    logps, log_ratio, lengths = self._score(params, micro)
    values = preference.per_answer(
      self._type, logps if self._type == 'simpo' else log_ratio, lengths
    )
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
      {'preference': (jnp.where(where, terms, 0.0), {})}, {'preference': count}
    )
    metrics = {
      **metrics,
      **_reward_metrics(self._options['beta'] * values, micro.present),
      **_by_answer('logps', logps, micro.present),
      **(
        {}
        if self._type == 'simpo'
        else _by_answer('drift', log_ratio / lengths, micro.present)
      ),
      **(
        {'kto/baseline': combine.largest(micro.baseline, True)}
        if self._type == 'kto'
        else {}
      ),
    }
    return loss, combine.sums(metrics)

  def _score(self, params, micro):
    """Returns (logprob, log ratio, tokens) of answers, f32[B, K, 2] each."""
    logprobs, _ = scoring.score(
      params,
      self._model,
      micro.ids,
      micro.positions,
      micro.segment_ids,
      jnp.ones(micro.ids.shape, jnp.float32),
      micro.parents,
      micro.ends,
    )
    logps, lengths = _sums(logprobs, micro)
    log_ratio = jnp.where(micro.present, logps - micro.ref_logprobs, 0.0)
    return logps, log_ratio, lengths


class Ranking(arrays.Objective):
  """The mean of the reward model's loss over pairs.

  With `lm_coef` = c also how unlikely the chosen answers y are as text:

      mean over pairs of preference.ranking - c / |y| sum_t log pi(y_t | y_<t)

  Metrics: `rewards/chosen`, `rewards/rejected`, `rewards/margins` and
  `rewards/accuracies`, as `Preference`, of the rewards themselves.
  """

  def __init__(
    self, model: schema.Model, envs: tuple[str, ...], loss: schema.Loss
  ):
    """Reads the options; pairs have no environments.

    Args:
      model: the model's options, with the vocabulary resolved.
      envs: not read.
      loss: the options of the losses.
    """
    del envs
    self._model, self.dtype = model, model.dtype
    self._options = dict(vars(loss.ranking))
    self._lm_coef = self._options.pop('lm_coef')

  generates_text = False

  @staticmethod
  def init_params(params: arrays.Params, loss: schema.Loss) -> arrays.Params:
    return transformer.add_reward(params, loss.ranking.lm_coef > 0)

  def unmeasured(
    self, batch: types.PairBatch, metrics: Mapping[str, float]
  ) -> set[str]:
    return _unmeasured(batch, metrics)

  def __call__(
    self, params: arrays.Params, micro: arrays.AnyBatch
  ) -> tuple[jax.Array, combine.Metrics]:
    """Computes the rewards of both answers of every pair in one forward."""
    rows = micro.ids, micro.positions, micro.segment_ids
    hidden, _ = transformer.trunk(params, self._model, *rows, ends=micro.ends)
    rewards = transformer.rewards(params, hidden)
    rewards = _at_ends(sharding.rows(rewards, micro.ids.shape[1]), micro)
    terms = preference.ranking(
      rewards[..., 0], rewards[..., 1], margins=micro.margins, **self._options
    )
    both = micro.present.all(-1)
    parts = {'ranking': (jnp.where(both, terms, 0.0), {})}
    if self._lm_coef:
      logprobs, _ = scoring.score_hidden(
        params,
        self._model,
        hidden,
        *rows,
        jnp.ones(micro.ids.shape, jnp.float32),
        micro.parents,
      )
      logps, lengths = _sums(logprobs, micro)
      nll = (-logps / lengths)[..., 0]
      parts['lm'] = jnp.where(both, self._lm_coef * nll, 0.0), {}
    loss, metrics = combine.total(parts, dict.fromkeys(parts, micro.pairs))
    metrics |= _reward_metrics(rewards, micro.present)
    return loss, combine.sums(metrics)


def _at_ends(values: jax.Array, micro: arrays.AnyBatch) -> jax.Array:
  """Returns values [B, T] at the last token of each answer, f32[B, K, 2]."""
  pairs, tokens = micro.present.shape[-2], micro.ids.shape[-1]
  numbers = jnp.arange(1, 2 * pairs + 1).reshape(1, pairs, 2, 1)
  answers = jnp.where(micro.mask, micro.segment_ids, 0)[:, None, None]
  places = jnp.where(answers == numbers, jnp.arange(tokens), 0)
  ends = jnp.max(places, axis=-1, keepdims=True)
  return jnp.take_along_axis(values[:, None, None], ends, axis=-1)[..., 0]


def _sums(
  logprobs: jax.Array, micro: arrays.AnyBatch
) -> tuple[jax.Array, jax.Array]:
  """Returns the logprob of each answer and its tokens, f32[B, K, 2] each.

  Sums over an axis of answers would hold all tokens for each of them.
  """
  logps, lengths = (
    _at_ends(
      segments.running(jnp.where(micro.mask, x, 0.0), micro.segment_ids), micro
    )
    for x in (logprobs, 1.0)
  )
  return logps, jnp.maximum(lengths, 1)


def _reward_metrics(rewards: jax.Array, present: jax.Array) -> combine.Metrics:
  """Returns metrics of rewards, f32[B, K, 2], of answers and of pairs."""
  margins, both = rewards[..., 0] - rewards[..., 1], present.all(-1)
  return {
    'rewards/margins': combine.pair(margins, both),
    'rewards/accuracies': combine.pair(
      jnp.where(margins == 0, 0.5, margins > 0), both
    ),
    **_by_answer('rewards', rewards, present),
  }


def _by_answer(
  name: str, values: jax.Array, present: jax.Array
) -> combine.Metrics:
  """Returns the means over chosen and over rejected answers."""
  return {
    f'{name}/{which}': combine.pair(values[..., i], present[..., i])
    for i, which in enumerate(('chosen', 'rejected'))
  }


def _unmeasured(
  batch: types.PairBatch, metrics: Mapping[str, float]
) -> set[str]:
  """Returns the metrics of missing pairs and of missing sides."""
  sides = np.any(batch.present[: batch.num_micro_batches], axis=(0, 1, 2))
  suffixes = tuple(
    f'/{name}' for i, name in enumerate(('chosen', 'rejected')) if not sides[i]
  )
  if not batch.pairs:
    suffixes += ('rewards/margins', 'rewards/accuracies')
  return {key for key in metrics if key.endswith(suffixes)}
