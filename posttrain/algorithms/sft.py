"""Supervised fine-tuning: cross-entropy on completion tokens."""

from posttrain.algorithms import base


class Sft(base.Algorithm):
  """Maximum likelihood of completions of a data set, or a frozen model.

      loss = - w sum_t log pi(token_t | <t) / N_ce    over completion tokens t

  Streams: `ce_weights = w`, the option `weight`, on the completion mask; no
  credit, no reference.
  A rollout with no completion token trains nothing and is dropped.
  """

  component = 'ce'
