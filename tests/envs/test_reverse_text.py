"""Reversing texts: parsing, grades, and disjoint splits."""

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import schema
from posttrain.envs import registry, reverse_text


def make(**options):
  return registry.make('back', schema.ReverseText(**options))


def ids(env, split, seed=0):
  source = env.source(split, seed)
  return [task.id for task in source.take(len(source))]


@pytest.mark.parametrize(
  'text, answer',
  [
    ('dcba', 'dcba'),
    (' dcba\n', 'dcba'),
    ('d', 'd'),
    ('', None),
    (' ', None),
    ('Dcba', None),
    ('dc ba', None),
    ('dcba.', None),
    ('dcba\nabcd', None),
    ('dcbä', None),
    ('dcb4', None),
    ('Answer: dcba', None),
    ('dcba\x00', None),
  ],
)
def test_parse_answer(text, answer):
  assert reverse_text.parse_answer(text) == answer
  assert reverse_text.parse_answer(text, truncated=True) is None


@pytest.mark.parametrize(
  'text, reward, correct',
  [
    ('edcba', 1.0, True),
    (' edcba ', 1.0, True),
    ('edcb', 8 / 9, False),  # one letter is missing
    ('edcbaa', 10 / 11, False),  # one too many
    ('edbca', 0.8, False),  # two have changed places
    ('abcde', 0.2, False),  # not reversed at all
    ('xyz', 0.0, False),
  ],
)
def test_grade(text, reward, correct):
  score = reverse_text.grade(text, 'edcba')
  assert score.reward == pytest.approx(reward)
  assert (score.correct, score.formatted) == (correct, True)
  assert score.answer == text.strip() and ENV.votes


@pytest.mark.parametrize(
  'text, truncated', [('', False), ('It is edcba', False), ('edcba', True)]
)
def test_an_answer_that_cannot_be_parsed_has_reward_0(text, truncated):
  score = reverse_text.grade(text, 'edcba', truncated)
  assert (score.reward, score.correct, score.formatted) == (0.0, False, False)
  assert score.answer is None


ENV = make()


@given(st.text(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_text_has_a_grade(text, truncated):
  episode = ENV.make(ENV.task('abc'))
  episode.reset()
  step = episode.step(text, truncated)
  score = episode.grade()
  assert step.done and not step.messages and step.reward == score.reward
  assert 0 <= score.reward <= 1
  assert score.correct == (text.strip() == 'cba' and not truncated)
  assert score.formatted or score.reward == 0


def test_an_episode_without_an_answer_is_not_scorable():
  env = make()
  episode = env.make(env.task('abc'))
  episode.reset()
  assert episode.grade().reward is None
  episode.step('cba', False)
  episode.reset()
  assert episode.grade().reward is None


def test_the_fields_of_a_task():
  task = make().task('abcd')
  assert task.prompt == ({'role': 'user', 'content': 'Reverse: abcd'},)
  assert (task.id, task.env, task.answer) == ('abcd', 'back', 'dcba')
  assert task.demonstration == ({'role': 'assistant', 'content': 'dcba'},)


@pytest.mark.parametrize('split', ['train', 'eval'])
def test_every_demonstration_is_correct(split):
  env = make()
  source = env.source(split, 0)
  for task in source.take(len(source)):
    episode = env.make(task)
    assert episode.reset() == task.prompt
    (message,) = task.demonstration
    step = episode.step(message['content'], truncated=False)
    assert step.reward == episode.grade().reward == 1.0
    assert episode.grade().correct and episode.grade().formatted
    episode.close()


OPTIONS = st.builds(
  dict,
  min_length=st.integers(2, 4),
  max_length=st.sampled_from([4, 7, 20]),
  alphabet=st.sampled_from(['abcdefgh', 'hgfedcbaxyz']),
  train_tasks=st.integers(1, 400),
  eval_tasks=st.integers(1, 80),
)


@given(OPTIONS, OPTIONS, st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=10, deadline=None)
def test_splits_are_disjoint_for_any_options(one, other, seed, seed2):
  train, held = ids(make(**one), 'train', seed), ids(make(**other), 'eval')
  assert len(set(train)) == len(train) == one['train_tasks']
  assert len(set(held)) == len(held) == other['eval_tasks']
  assert not set(train) & {*held, *(text[::-1] for text in held)}
  for text in train:
    assert one['min_length'] <= len(text) <= one['max_length']
    assert set(text) <= set(one['alphabet'])
  assert held == ids(make(**other), 'eval', seed2)


def test_the_seed_determines_the_training_texts():
  assert ids(make(), 'train', 5) == ids(make(), 'train', 5)
  assert set(ids(make(), 'train', 5)) != set(ids(make(), 'train', 6))
  source, again = (make().source('train', 5) for _ in '12')
  assert [next(source).id for _ in 'abc'] == [next(again).id for _ in 'abc']


def test_evaluation_texts_are_pinned():
  assert ids(make(), 'eval')[:6] == [
    'ysx',
    'dbip',
    'jxdqe',
    'mfqsyt',
    'eoteilf',
    'fuzsxqnf',
  ]


def test_lengths_are_balanced_as_far_as_there_are_texts():
  texts = ids(make(min_length=1, max_length=6, train_tasks=3000), 'train')
  counts = collections.Counter(map(len, texts))
  few = counts[1] + counts[2]  # of 26 + 676 texts, a fifth of them held out
  assert few == 538 and 15 < counts[1] < 26
  assert all(abs(counts[n] - (3000 - few) / 4) <= 1 for n in (3, 4, 5, 6))
  letters = collections.Counter(''.join(texts))
  assert len(letters) == 26 and min(letters.values()) > 300


@pytest.mark.parametrize(
  'options, words',
  [
    (
      {'min_length': 1, 'max_length': 2},
      ('envs.back.env.train_tasks', '8000', 'max_length'),
    ),
    ({'max_length': 3}, ('envs.back.env.train_tasks', 'alphabet')),
    ({'alphabet': 'ab', 'train_tasks': 9}, ('envs.back.env.eval_tasks',)),
  ],
)
def test_more_tasks_than_texts_are_refused(options, words):
  with pytest.raises(ValueError) as error:
    make(**{'min_length': 1, **options})
  assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
  'options, words',
  [
    ({'max_length': 65}, r'max_length must be in \[1, 64\]: got 65'),
    ({'min_length': 9}, r'min_length must be in \[1, max_length=8\]: got 9'),
    ({'alphabet': ''}, 'alphabet must hold letters'),
    ({'alphabet': 'aba'}, 'alphabet must .* each once'),
    ({'alphabet': 'aB'}, 'alphabet must hold letters of a to z'),
  ],
)
def test_invalid_options_are_refused(options, words):
  with pytest.raises(ValueError, match=words):
    schema.ReverseText(**options)


def test_resuming_with_other_options_is_refused():
  state = make().source('train', 0).get_state()
  make().source('train', 0).set_state(state)
  with pytest.raises(ValueError, match='the fingerprint of a resumed source'):
    make(max_length=9).source('train', 0).set_state(state)
