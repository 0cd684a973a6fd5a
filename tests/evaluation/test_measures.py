"""Measures beside the grade: reward functions, the loss on held-out rows."""

import itertools

import numpy as np
import pytest

from posttrain import schema, types
from posttrain.chat import rendering
from posttrain.evaluation import measures
from posttrain.rollout import grading
from posttrain.stage import resume

UIDS = itertools.count()
USER = {'role': 'user', 'content': 'a'}
UNKNOWN = dict.fromkeys(measures.GRADES, ([None], [1.0]))


def rollout(text, demonstration=None, correct=None):
  """A greedy answer, as far as measures read it."""
  if demonstration is not None:
    demonstration = ({'role': 'assistant', 'content': demonstration},)
  task = types.Task(
    text, 'e', (USER,), demonstration=demonstration, as_text=True
  )
  return types.Rollout(
    next(UIDS),
    task,
    (USER, {'role': 'assistant', 'content': text}),
    ('sample',),
    types.Score(None, correct),
    'eos',
  )


def lengths(completions, **columns):
  """None for an empty one, which is not scorable."""
  return [float(len(text)) or None for text in completions]


@pytest.fixture
def byte_renderer():
  return rendering.load(schema.Tokenizer())


def never(sequences):
  raise AssertionError('nothing must be scored')


def measure_of(renderer, monkeypatch, model=None, judge=None, **rewards):
  """Measures with reward functions, which get the answers alone."""
  monkeypatch.setattr(
    'posttrain.rollout.grading.columns',
    lambda rollouts: {
      'completions': [x.completion_messages[0]['content'] for x in rollouts]
    },
  )
  entry = schema.EnvEntry(
    env=schema.Rows(path='x'),
    sampler=schema.Policy(),
    algorithm=schema.Grpo(),
    rewards=rewards,
  )
  functions = measures.functions({'e': entry}, model, judge)
  return measures.Measures(functions, never, renderer)


def _of(measure, greedy):
  return measure('e', greedy, [x.task for x in greedy])


@pytest.mark.parametrize('judge', [None, lambda model: lambda *_: ['good']])
def test_judged_rewards_are_measured_where_there_is_a_judge(
  judge, byte_renderer, monkeypatch
):
  judged = schema.RewardFn(fn=f'{__name__}:judges', judge='init')
  measure = measure_of(byte_renderer, monkeypatch, judge=judge, judged=judged)
  values, errors = measure.rewards('e', [rollout('abc')])
  expected = {} if judge is None else {'reward/judged': ([4.0], [1.0])}
  assert (values, errors) == (expected | UNKNOWN, ())


def judges(completions, judge, **columns):
  return [float(len(text)) for text in judge(completions)]


def test_reward_functions_have_their_own_values(byte_renderer, monkeypatch):
  """Without their weights; a task without a value is in no mean."""
  measure = measure_of(
    byte_renderer,
    monkeypatch,
    lambda name: lambda x: grading.Result([0.25] * len(x)),
    long=schema.RewardFn(fn=f'{__name__}:lengths', weight=7.0),
    env=schema.RewardFn(),
    learned=schema.RewardFn(model='stage:rm'),
  )
  values, errors = _of(measure, [rollout('abc'), rollout(''), rollout('a')])
  assert not errors
  assert values == {
    'reward/long': ([3.0, None, 1.0], [1.0] * 3),
    'reward/learned': ([0.25] * 3, [1.0] * 3),
    **dict.fromkeys(measures.GRADES, ([None] * 3, [1.0] * 3)),
  }
  # 3 and 1: s = sqrt(2), so the half-width is 1.96.
  assert measures.summary(
    'reward/long', values['reward/long']
  ) == pytest.approx(
    {
      'reward/long': 2,
      'reward/long_low': 0.040036,
      'reward/long_high': 3.959964,
    }
  )
  assert measures.summary('reward/long', ([None], [1.0])) == {}


def test_functions_that_fail_are_errors_and_end_no_run(
  byte_renderer, monkeypatch
):
  bad = schema.RewardFn(fn='json:loads')  # takes no columns
  measure = measure_of(byte_renderer, monkeypatch, bad=bad)
  values, (error,) = _of(measure, [rollout('abc')])
  assert values == {'reward/bad': ([None], [1.0])} | UNKNOWN
  assert error.startswith('envs.e.rewards.bad')


def test_nll_is_the_mean_over_the_demonstrations_tokens(byte_renderer):
  def score(sequences):
    counts = [np.arange(len(ids), dtype=np.float32) for ids in sequences]
    return [np.stack((-x, x % 2), axis=-1) for x in counts]

  measure = measures.Measures({}, score, byte_renderer)
  greedy = [rollout('x', 'yes'), rollout('x'), rollout('x', 'n')]
  values, _ = _of(measure, greedy)
  means, tokens = values['nll']
  # 'yes' and its eos after a prompt of some tokens; the prompt does not count.
  prompt = len(byte_renderer.render([USER], add_generation_prompt=True).ids)
  np.testing.assert_allclose(means[0], prompt + 1.5)
  assert means[1] is None
  np.testing.assert_allclose(means[2], prompt + 0.5)
  assert tokens == [4, 0, 2]
  summary = measures.summary('nll', (means, tokens))
  mean = prompt + (4 * 1.5 + 2 * 0.5) / 6
  np.testing.assert_allclose(summary['nll'], mean)
  # Weights 4/3 and 2/3 of the distances 1/3 and -2/3: s^2 = 2 (4/9)^2.
  np.testing.assert_allclose(
    summary['nll_high'] - mean, 1.96 * 4 / 9, rtol=1e-4
  )
  # Every second token is the most likely one.
  assert values['token_accuracy'] == ([0.5, None, 0.5], tokens)


def test_graded_answers_need_no_nll(byte_renderer):
  measure = measures.Measures({}, never, byte_renderer)
  graded = {**UNKNOWN, 'pass_rate': ([False], [1.0])}
  assert _of(measure, [rollout('x', 'y', correct=False)]) == (graded, ())
  assert _of(measure, [rollout('x')]) == (UNKNOWN, ())


@pytest.mark.parametrize(
  'best, chosen', [('eval/nll/e', 2), ('eval/reward/long/e', 1)]
)
def test_the_best_nll_is_the_smallest(best, chosen):
  state = resume.Selection('sft', schema.Eval(every=1, best=best))
  key = best.replace('eval/', 'select/')
  for step, value in enumerate((2.0, 3.0, 1.0, 1.5)):
    state.add(step, {key: value})
  assert state.step == chosen
