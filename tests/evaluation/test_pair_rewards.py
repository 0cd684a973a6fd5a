"""Rewards of pairs: literal values, and their table."""

import numpy as np
import pytest

from posttrain import schema, types
from posttrain.chat import rendering
from posttrain.evaluation import comparison
from posttrain.losses import preference
from posttrain.stage import from_checkpoint

RENDERER = rendering.load(schema.Tokenizer())


def sample(prompt, answer):
  ids = np.frombuffer(f'{prompt}{answer}'.encode(), np.uint8).astype(np.int32)
  zeros = np.zeros(len(ids), np.float32)
  return types.Sample(
    env='',
    row='',
    ids=ids,
    mask=np.arange(len(ids)) >= len(prompt),
    roles=zeros,
    is_content=zeros,
    sampler_logprobs=zeros,
    temperatures=zeros + 1,
    versions=zeros,
  )


def pair(chosen, rejected):
  answers = sample('2 + 2? ', chosen), sample('2 + 2? ', rejected)
  return types.Pair(*answers, np.zeros(2, np.float32))


PAIRS = [pair('four', '5'), pair('4', 'five')]
LOGPROBS = np.array([-8.0, -3.0, -1.0, -8.0])
REFERENCE = np.array([-10.0, -2.0, -1.5, -4.0])


@pytest.mark.parametrize(
  'loss, expected',
  [
    (schema.Sigmoid(beta=0.5), [1.0, -0.5, 0.25, -2.0]),
    # Per token: of four, one, one and four.
    (schema.SigmoidNorm(beta=0.5), [0.25, -0.5, 0.25, -0.5]),
    (schema.SimPo(beta=4.0), [2.0, -4.0, 2.0, -4.0]),
  ],
)
def test_implicit_rewards(loss, expected):
  values = preference.per_answer(loss.type, LOGPROBS - REFERENCE, [4, 1, 1, 4])
  np.testing.assert_allclose(loss.beta * values, expected)


def measurement(rewards):
  pairs = from_checkpoint.pair_answers(PAIRS, np.array(rewards), RENDERER)
  return comparison.Measurement(from_checkpoint.pair_metrics(pairs), pairs, [])


@pytest.mark.parametrize(
  'chosen, accuracy',
  [(0.5, 0.0), (1.0, 0.5), (2.0, 1.0)],  # equal rewards rank nothing
)
def test_a_pair_is_right_if_the_chosen_answer_has_more(chosen, accuracy):
  pairs = measurement([chosen, 1.0, 2.0, 1.0])
  first = pairs.answers[0]
  assert first.measures == {'accuracy': accuracy, 'margin': chosen - 1.0}
  assert pairs.values['eval/accuracy/pairs'] == (accuracy + 1.0) / 2
  assert pairs.values['eval/margin/pairs'] == chosen / 2
  assert first.text == 'four' and first.tokens == 4


def test_rewards_must_be_finite():
  with pytest.raises(ValueError, match='must be finite: got nan, for 1 of 4'):
    measurement([1.0, float('nan'), 2.0, 1.0])
