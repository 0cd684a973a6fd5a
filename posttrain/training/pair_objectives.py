"""Objectives on choices: two answers to a prompt; or one, with KTO.

See `objectives` for what an objective is.

Axes: B rows, T tokens of one micro-batch; K choices of a row.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from posttrain import schema, scoring, tree, types
from posttrain.losses import combine, preference, ranking
from posttrain.models import reward_head, transformer
from posttrain.training import arrays, base


class Preference(base.Objective):
  """The mean of a preference loss over pairs, or with KTO over answers.

  Metrics, in nats: `rewards/chosen` and `rewards/rejected`, the implicit
  rewards beta h (with SimPO, beta l); over pairs `rewards/margins`, and
  `rewards/accuracies`, the share whose margin is positive; `logps/*`, the log
  probability of answers; `drift/*`, h per token. With KTO also `kto/baseline`.
  """

  def __init__(
    self, model: schema.Model, envs: tuple[str, ...], loss: schema.Loss
  ):
    """Args: model: with its vocabulary resolved; envs: not read."""
    del envs
    self._model, self._options = model, tree.fields(loss.preference)
    self._type = self._options.pop('type')
    self._options.pop('reference', None)  # its part is done, see `choices`
    self._function = preference.TYPES[self._type]
    self._per_token = self._type in preference.PER_TOKEN

  def prepare(self, params, batch: arrays.PairBatch) -> arrays.PairBatch:
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
      batch.num_micro_batches, batch.scored, add, (jnp.zeros(()), jnp.zeros(()))
    )
    mean = total / jnp.maximum(count, 1.0)
    baseline = preference.kto_baseline(mean, count > 0)
    return dataclasses.replace(batch, baseline=baseline)

  def unmeasured(
    self, batch: types.PairBatch, measured: Mapping[str, float]
  ) -> set[str]:
    """Names of metrics that say nothing, see `objectives`."""
    silent = _unmeasured(batch, measured)
    return (
      silent
      if batch.scored > batch.num_micro_batches
      else {*silent, 'kto/baseline'}
    )

  def __call__(
    self, params, micro: arrays.PairBatch
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
      {'preference': (jnp.where(where, terms, 0.0), {})}, {'preference': count}
    )
    return loss, {
      **metrics,
      **_told_apart(self._options['beta'] * values, micro.present),
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

  def _score(self, params, micro):
    """(log probability, log ratio, tokens) of answers, f32[B, K, 2] each."""
    logprobs, _ = scoring.score(
      params,
      self._model,
      micro.ids,
      micro.positions,
      micro.segment_ids,
      jnp.ones(micro.ids.shape, jnp.float32),
    )
    mask = _whose(micro) & micro.mask[:, None, None]
    logps = preference.seq_logprob(logprobs[:, None, None], mask)
    log_ratio = jnp.where(micro.present, logps - micro.ref_logprobs, 0.0)
    return logps, log_ratio, jnp.maximum(jnp.sum(mask, axis=-1), 1)


class Ranking(base.Objective):
  """The mean of the reward model's loss over pairs.

  With `lm_coef` = c also how unlikely the chosen answers y are as text:

      mean over pairs of ranking.loss - c / |y| sum_t log pi(y_t | y_<t)

  Metrics: `rewards/chosen`, `rewards/rejected`, `rewards/margins` and
  `rewards/accuracies`, as `Preference`, of the rewards themselves.
  """

  def __init__(
    self, model: schema.Model, envs: tuple[str, ...], loss: schema.Loss
  ):
    """Args: model: with its vocabulary resolved; envs: not read."""
    del envs
    self._model, self._options = model, tree.fields(loss.ranking)
    self._lm_coef = self._options.pop('lm_coef')

  generates_text = False

  @staticmethod
  def init_params(params: base.Params, loss: schema.Loss) -> base.Params:
    return reward_head.add(params, loss.ranking.lm_coef > 0)

  def unmeasured(
    self, batch: types.PairBatch, measured: Mapping[str, float]
  ) -> set[str]:
    """Names of metrics that say nothing, see `objectives`."""
    return _unmeasured(batch, measured)

  def __call__(
    self, params, micro: arrays.PairBatch
  ) -> tuple[jax.Array, combine.Metrics]:
    """Reads what both answers of every choice are worth in one forward."""
    rows = micro.ids, micro.positions, micro.segment_ids
    hidden, _ = transformer.trunk(params, self._model, *rows)
    answers = _whose(micro) & micro.mask[:, None, None]
    places = jnp.arange(micro.ids.shape[-1])[None, None, None]
    ends = jnp.max(jnp.where(answers, places, 0), axis=-1)
    values = reward_head.rewards(params, hidden)
    rewards = jnp.take_along_axis(values[:, None, None], ends[..., None], -1)
    rewards = rewards[..., 0]
    terms = ranking.loss(
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
      )
      chosen = answers[..., 0, :]
      nll = -preference.seq_logprob(logprobs[:, None], chosen)
      nll /= jnp.maximum(jnp.sum(chosen, axis=-1), 1)
      parts['lm'] = jnp.where(both, self._lm_coef * nll, 0.0), {}
    loss, metrics = combine.total(parts, dict.fromkeys(parts, micro.pairs))
    return loss, {**metrics, **_told_apart(rewards, micro.present)}


def _whose(micro: arrays.PairBatch) -> jax.Array:
  """bool[B, K, 2, T]: which tokens are an answer's, its prompt included."""
  choices = micro.present.shape[-2]
  segments = jnp.arange(1, 2 * choices + 1).reshape(1, choices, 2, 1)
  return micro.segment_ids[:, None, None] == segments


def _told_apart(rewards, present) -> combine.Metrics:
  """Of the rewards of answers, f32[B, K, 2], and of their pairs."""
  margins, both = rewards[..., 0] - rewards[..., 1], present.all(-1)
  return {
    'rewards/margins': combine.pair(margins, both),
    'rewards/accuracies': combine.pair(margins > 0, both),
    **_by_answer('rewards', rewards, present),
  }


def _by_answer(name: str, values, present) -> combine.Metrics:
  return {
    f'{name}/{which}': combine.pair(values[..., i], present[..., i])
    for i, which in enumerate(('chosen', 'rejected'))
  }


def _unmeasured(batch: types.PairBatch, measured) -> set[str]:
  """Metrics of pairs where there are none, of one side where it is missing."""
  sides = batch.present[: batch.num_micro_batches].any((0, 1, 2))
  silent = tuple(
    f'/{name}'
    for name, here in zip(('chosen', 'rejected'), sides, strict=True)
    if not here
  )
  if not batch.pairs:
    silent += ('rewards/margins', 'rewards/accuracies')
  return {key for key in measured if key.endswith(silent)}
