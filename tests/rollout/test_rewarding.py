"""Rewards that add up, and models that judge."""

import dataclasses

import numpy as np
import pytest

from posttrain import schema, types
from posttrain.rollout import rewarding
from tests import fixtures, toys
from tests.algorithms import two_turns

PATH = 'tests.rollout.judged'


def functions(**named):
  return {
      name: schema.RewardFn(**{'fn': None if name == 'env' else (
          f'{PATH}:{options.pop("fn", name)}'
      ), **options})
      for name, options in named.items()
  }  # fmt: skip


def run(rollouts, cfg, judge=None):
  made = rewarding.Rewards('e', cfg)
  made.connect(judge)
  found, metrics = made(rollouts)
  return [r.score.reward for r in found], metrics


def test_the_environments_grade_is_the_default():
  rollouts = two_turns.group(1.0, 0.0)
  assert run(rollouts, {}) == ([1.0, 0.0], {})


def test_summands_have_weights_and_none_is_left_out():
  cfg = functions(
      env={'weight': 2.0}, slow={'weight': 0.25}, some={'weight': 10.0}
  )
  rewards, metrics = run(two_turns.group(1.0, 0.0), cfg)
  # Four sampled tokens each; `some` scores the first rollout alone.
  assert rewards == [2 + 1 + 10, 0 + 1]
  assert metrics == {
      'rewards/env': 0.5, 'rewards/slow': 4.0, 'rewards/some': 1.0
  }


def test_what_nobody_can_score_has_no_reward():
  rewards, metrics = run(two_turns.group(1.0, 0.0), functions(none={}))
  assert rewards == [None, None] and metrics == {}


def test_what_failed_is_not_asked_about():
  failed = types.Rollout(
      7, two_turns.TASK, (), (), types.Score(None), 'error', 'broken'
  )
  rewards, _ = run([failed, two_turns.rollout(1.0)], functions(slow={}))
  assert rewards == [None, 4.0]


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('one', r'envs.e.rewards.one: .* a reward per rollout: got 1, expec'),
        ('nothing', 'a reward per rollout: got None, expected 2'),
        ('words', "finite rewards: got 'good' for rollout 0"),
        ('infinite', 'finite rewards: got inf for rollout 0; None says'),
        ('wants', r"must ask for what there is: got \['trainer_state'\], exp"),
    ],
)
def test_bad_rewards_are_refused(name, message):
  with pytest.raises(ValueError, match=message):
    run(two_turns.group(1.0, 0.0), functions(**{name: {}}))


def test_a_function_that_raises_is_named():
  with pytest.raises(RuntimeError, match='rewards.broken: .*KeyError: .no. *'):
    run(two_turns.group(1.0), functions(broken={}))


def test_what_a_function_logs():
  _, metrics = run(two_turns.group(1.0, 0.0), functions(logs={}))
  assert metrics == {
      'rewards/logs': 0.0, 'rewards/logs/count': 2.0,
      'rewards/logs/length': 3.0,
  }


def test_columns_are_those_of_trl():
  found = rewarding.columns(two_turns.group(1.0, 0.0))
  assert found['prompts'] == [[two_turns.MESSAGES[0]]] * 2
  assert found['completions'] == [list(two_turns.MESSAGES[1:])] * 2
  assert found['completion_ids'] == [[3, 4, 8, 9]] * 2
  assert found['answer'] == ['7', '7'] and found['hint'] == ['add', 'add']


def test_a_judge_is_handed_over_and_answers_alike():
  engine = toys.engine(capacity=64)
  engine.set_params(toys.params(), -1)
  judge = rewarding.LocalJudge(engine, fixtures.RENDERER)
  asked = []

  def judges(name):
    asked.append(name)
    return judge

  cfg = functions(length={'judge': 'stage:sft'})
  rollouts = two_turns.group(1.0, 0.0)
  first, metrics = run(rollouts, cfg, judges)
  again, _ = run(rollouts, cfg, judges)
  assert asked == ['stage:sft'] * 2
  assert first == again and first[0] == first[1]  # they said the same
  np.testing.assert_allclose(
      metrics['rewards/length/letters'], 4 * first[0], rtol=1e-6
  )


def test_a_judge_draws_by_what_it_is_asked():
  engine = toys.engine(capacity=64)
  engine.set_params(toys.params(), -1)
  judge = rewarding.LocalJudge(engine, fixtures.RENDERER)
  a, b = [[{'role': 'user', 'content': x}] for x in 'ab']
  options = {'max_tokens': 8, 'temperature': 1.0}
  first = judge([a, b, a], **options)
  assert first[0] == first[2] != first[1]
  assert judge([b], **options) == [first[1]]


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'fn': 'json.loads'}, 'fn must be an import path'),
        ({'judge': 'init'}, 'nothing reads it without fn'),
        ({'kwargs': {'a': 1}}, 'nothing reads it without fn'),
        ({'fn': 'json:loads', 'weight': float('nan')}, 'weight must be fin'),
        ({'weight': 0.0}, 'weight must be finite and not 0'),
        ({'fn': 'json:loads', 'judge': 'policy'}, 'judge must be frozen'),
        ({'fn': 'json:loads', 'judge': 'ema:0.9'}, 'judge must be frozen'),
    ],
)
def test_options_that_mean_nothing(options, message):
  with pytest.raises(schema.FieldError, match=message):
    schema.RewardFn(**options)
  with pytest.raises(schema.FieldError, match="name a function for each but"):
    schema.EnvEntry(rewards={'x': schema.RewardFn()})


def test_rewards_are_what_an_algorithm_learns_from(monkeypatch):
  toys.install(monkeypatch)
  entry = dataclasses.replace(toys.entry(), rewards=functions(slow={}))
  source, driver = toys.connected(toys.stage(envs={'toy': entry}))
  item = next(source)
  lengths = [r.samples[0].mask.sum() for r in driver.rollouts]
  np.testing.assert_allclose(
      item.metrics['reward/mean/toy'], np.mean(lengths), rtol=1e-6
  )
  assert item.metrics['rewards/slow/toy'] == item.metrics['reward/mean/toy']
  assert item.batch.advantages.any()


class Judged(toys.Letters):
  """Asks a model what an answer is worth."""

  judge = None

  def grade(self, task, text):
    (said,) = self.judge([[{'role': 'user', 'content': text}]], max_tokens=3)
    return types.Score(float(len(said)))


def test_an_environment_is_handed_its_judge(monkeypatch):
  """Which decodes by an engine of its own, while the policy's is at work."""
  toys.install(monkeypatch, Judged)
  entry = dataclasses.replace(toys.entry(group_size=2), judge='stage:sft')
  engine = toys.engine(capacity=64)
  engine.set_params(toys.params(1), -1)
  judge = rewarding.LocalJudge(engine, fixtures.RENDERER)
  source, driver = toys.connected(
      toys.stage(prompts=2, envs={'toy': entry}), judge=lambda name: judge
  )
  assert source.references == {'stage:sft': 'envs.toy.judge'}
  metrics = next(source).metrics
  said = [
      len(judge([[r.messages[-1] | {'role': 'user'}]], max_tokens=3)[0])
      for r in driver.rollouts
  ]
  assert metrics['reward/mean/toy'] == np.mean(said)
