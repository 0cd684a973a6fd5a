"""Rewards of held-out pairs, pair by pair, under a policy or a reward model.

    accuracy   1 if the chosen answer has the higher reward, else 0
    margin     reward of the chosen answer minus that of the rejected one

Their means are what training logs as `eval/pairs/rewards/accuracies` and
`eval/pairs/rewards/margins`, see `pair_objectives`. Here each pair is an
`Answer`, so that two policies are compared pair by pair.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain import types
from posttrain.chat import renderer as chat
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


def answers(
  pairs: Sequence[types.Pair], rewards: np.ndarray, renderer: chat.Renderer
) -> list[answers_lib.Answer]:
  """Returns each pair as an `Answer`, the chosen one, with both measures.

  Args:
    pairs: pairs of two answers.
    rewards: f64[2 N], of the chosen and of the rejected answer of each pair.
    renderer: decodes the answers.
  """
  values = rewards.reshape(-1, 2)
  return [
    _answer(str(i), pair, float(chosen - rejected), renderer)
    for i, (pair, (chosen, rejected)) in enumerate(
      zip(pairs, values, strict=True)
    )
  ]


def _answer(
  name: str, pair: types.Pair, margin: float, renderer: chat.Renderer
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
    id=name,
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
    measures=dict(zip(_NAMES, (float(margin > 0), margin), strict=True)),
  )


def summary(answers: Sequence[answers_lib.Answer]) -> dict[str, float]:
  """Returns {'eval/<measure>/pairs': mean}, with its 95 % interval."""
  weights = [1.0] * len(answers)
  values = {}
  for name in _NAMES:
    known = [answer.measures[name] for answer in answers]
    for key, value in measures.summary(name, (known, weights)).items():
      values[f'eval/{key}/{ENV}'] = value
  return values
