"""Rewards of held-out pairs, pair by pair, under a policy or a reward model.

    accuracy   1 if the chosen answer has the higher reward, 0 if it has the
               lower one, 0.5 where both are equal
    margin     reward of the chosen answer minus that of the rejected one

Training logs their means as `eval/pairs/rewards/accuracies`, where equal
rewards count 0, and `eval/pairs/rewards/margins`, see `pair_objectives`. Here
each pair is an `Answer`, so that two models are compared pair by pair.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain import types
from posttrain.chat import rendering
from posttrain.evaluation import answers as answers_lib
from posttrain.evaluation import measures
from posttrain.losses import preference

ENV = 'pairs'  # stands for an environment in the names of the values
_NAMES = 'accuracy', 'margin'


def implicit(
  loss: Any,
  samples: Sequence[types.Sample],
  logprobs: np.ndarray,
  ref_logprobs: np.ndarray,
) -> np.ndarray:
  """Returns the rewards that a preference loss trains implicitly.

      beta h,  h = log pi(y | x) - log pi_ref(y | x)

  h is divided by the answer's length where the loss does so; SimPO has no
  reference.

  Args:
    loss: options of the preference loss.
    samples: the answers, with their prompts.
    logprobs: f64[N], of each answer under the policy, nats.
    ref_logprobs: f64[N], of each answer under the reference; 0 without one.

  Returns:
    f64[N].
  """
  values = logprobs - ref_logprobs
  if loss.type in preference.PER_TOKEN:
    values = values / [max(int(sample.mask.sum()), 1) for sample in samples]
  return loss.beta * values


@dataclasses.dataclass(frozen=True)
class PairRewards:
  """The pairs as answers, each the chosen one, with both measures."""

  answers: tuple[answers_lib.Answer, ...] = ()

  @classmethod
  def of(
    cls,
    pairs: Sequence[types.Pair],
    rewards: np.ndarray,
    renderer: rendering.Renderer,
  ) -> 'PairRewards':
    """Builds the answers.

    Args:
      pairs: pairs of two answers.
      rewards: f64[2 N], of the chosen and the rejected answer of each pair.
      renderer: decodes the answers.

    Raises:
      ValueError: a reward is not finite.
    """
    finite = np.isfinite(rewards)
    if not finite.all():
      raise ValueError(
        'rewards of held-out pairs must be finite: got '
        f'{rewards[~finite][0]}, for {int((~finite).sum())} of {len(rewards)} '
        'answers'
      )
    margins = rewards[::2] - rewards[1::2]
    return cls(
      tuple(
        _answer(index, pair, float(margin), renderer)
        for index, (pair, margin) in enumerate(zip(pairs, margins, strict=True))
      )
    )

  @property
  def metrics(self) -> dict[str, float]:
    """{'eval/<measure>/pairs': mean}, with its 95 % interval over pairs."""
    weights = [1.0] * len(self.answers)
    values = {}
    for name in _NAMES:
      each = [answer.measures[name] for answer in self.answers]
      for key, value in measures.summary(name, (each, weights)).items():
        values[f'eval/{key}/{ENV}'] = value
    return values


def _answer(
  index: int, pair: types.Pair, margin: float, renderer: rendering.Renderer
) -> answers_lib.Answer:
  sample = pair.chosen
  assert sample is not None, 'a pair of two answers'
  start = int(np.argmax(sample.mask))
  prompt, text = (
    renderer.tokenizer.decode(ids.tolist())
    for ids in (sample.ids[:start], sample.ids[start:])
  )
  return answers_lib.Answer(
    env=ENV,
    id=str(index),
    prompt=prompt,
    text=text,
    answer=None,
    correct=None,
    formatted=None,
    reward=None,
    stop_reason='eos',
    tokens=int(sample.mask.sum()),
    error=None,
    question=prompt,
    messages=(),
    turn_rewards=(),
    metrics={},
    measures={'accuracy': (np.sign(margin) + 1) / 2, 'margin': margin},
  )
