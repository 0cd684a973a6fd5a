"""Sorting names over several turns: messages, grades, disjoint splits."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import schema, types
from posttrain.envs import alphabet_sort, registry
from posttrain.rollout import sampler
from tests import fixtures


def make(**options):
  return registry.make('sort', schema.AlphabetSort(**options))


def ids(env, split, seed=0):
  source = env.source(split, seed)
  return [task.id for task in source.take(len(source))]


def play(env, task, texts):
  """Plays the texts turn by turn; returns the episode and its steps."""
  episode = env.make(task)
  assert episode.reset() == task.prompt
  return episode, [episode.step(text, truncated=False) for text in texts]


KEY = 'Ada,Ane,Mio'


def test_the_names_are_distinct_and_sorted():
  names = alphabet_sort.NAMES
  assert len(names) > 50 and list(names) == sorted(set(names))
  assert all(name.isalpha() and name.istitle() for name in names)


@pytest.mark.parametrize(
  'text, names',
  [
    ('Ada, Ben', ('Ada', 'Ben')),
    (' Ada,Ben\n', ('Ada', 'Ben')),
    ('Ada,  Ben', ('Ada', 'Ben')),
    ('Ada', ('Ada',)),
    ('ada', ('ada',)),
    ('', None),
    ('Ada, Ben.', None),
    ('Ada,\nBen', None),
    ('Ada Ben', None),
    ('Ada,, Ben', None),
    ('Ada, B3n', None),
    ('Ada, Bén', None),
    (',', None),
    ('Here: Ada, Ben', None),
  ],
)
def test_parse_answer(text, names):
  assert alphabet_sort.parse_answer(text) == names
  assert alphabet_sort.parse_answer(text, truncated=True) is None


@pytest.mark.parametrize(
  'text, grade',
  [
    ('Ada, Ben, Cio', 1.0),
    ('Ada, Ben', 0.8),  # one of three is missing
    ('Ada, Ben, Cio, Dov', 6 / 7),  # one too many
    ('Ben, Ada, Cio', 2 / 3),  # two have changed places
    ('Cio, Ben, Ada', 1 / 3),
    ('Xyz', 0.0),
    ('', 0.0),
    ('Ada Ben Cio', 0.0),
  ],
)
def test_a_turn_is_graded_by_names(text, grade):
  answer = ['Ada', 'Ben', 'Cio']
  assert alphabet_sort.grade_turn(text, answer) == pytest.approx(grade)
  assert alphabet_sort.grade_turn(text, answer, truncated=True) == 0


def test_the_messages_of_a_task():
  task = make(turns=3, role='tool').task(KEY)
  assert task.prompt == (
    {'role': 'user', 'content': 'Sort these names: Mio, Ane, Ada'},
  )
  assert task.info == {
    'turns': [['Mio', 'Ane', 'Ada'], ['Gav', 'Dus'], ['Alm', 'Bru']]
  }
  assert task.demonstration == (
    {'role': 'assistant', 'content': 'Ada, Ane, Mio'},
    {'role': 'tool', 'content': 'Yes: Ada, Ane, Mio. Add: Gav, Dus'},
    {'role': 'assistant', 'content': 'Ada, Ane, Dus, Gav, Mio'},
    {'role': 'tool', 'content': 'Yes: Ada, Ane, Dus, Gav, Mio. Add: Alm, Bru'},
    {'role': 'assistant', 'content': 'Ada, Alm, Ane, Bru, Dus, Gav, Mio'},
  )
  assert task.answer == 'Ada, Alm, Ane, Bru, Dus, Gav, Mio'
  assert (task.id, task.env) == (KEY, 'sort')


@pytest.mark.parametrize('role', ['user', 'tool'])
@pytest.mark.parametrize('turns', [2, 3])
@pytest.mark.parametrize('split', ['train', 'eval'])
def test_demonstrations_equal_played_episodes(split, turns, role):
  """Playing them gives the same observations, and every turn is correct."""
  env = make(turns=turns, role=role, train_tasks=300)
  assert env.max_turns == turns
  for task in env.source(split, 0).take(500):
    texts = [m['content'] for m in task.demonstration[::2]]
    episode, steps = play(env, task, texts)
    said = [message for step in steps for message in step.messages]
    assert tuple(said) == task.demonstration[1::2]
    assert {message['role'] for message in said} == {role}
    assert [step.done for step in steps] == [False] * (turns - 1) + [True]
    score = episode.grade()
    assert score.reward == sum(step.reward for step in steps) == 1.0
    assert score.correct and score.formatted
    episode.close()


@pytest.mark.parametrize(
  'texts, reward, correct, formatted',
  [
    (['Ada, Ane, Mio', 'Ada, Ane, Dus, Gav, Mio'], 1.0, True, True),
    # The list so far is told: who errs first may yet be right.
    (
      ['Mio, Ane, Ada', 'Ada, Ane, Dus, Gav, Mio'],
      (1 / 3 + 1) / 2,
      False,
      True,
    ),
    (['Ada, Ane, Mio', 'Ada, Ane, Mio'], (1 + 3 / 4) / 2, False, True),
    (['?', 'Ada, Ane, Dus, Gav, Mio'], 0.5, False, False),
    (['Ada, Ane, Mio'], 0.5, False, False),  # the second turn never came
  ],
)
def test_an_episode_is_graded_by_the_mean_of_its_turns(
  texts, reward, correct, formatted
):
  env = make()
  episode, steps = play(env, env.task(KEY), texts)
  score = episode.grade()
  assert score.reward == pytest.approx(reward)
  assert (score.correct, score.formatted) == (correct, formatted)
  assert sum(step.reward for step in steps) == pytest.approx(reward)
  (says,) = steps[0].messages
  assert says['content'] == (
    ('Yes' if texts[0] == 'Ada, Ane, Mio' else 'No')
    + ': Ada, Ane, Mio. Add: Gav, Dus'
  )


def test_an_episode_without_a_turn_is_not_scorable():
  env = make()
  episode, _ = play(env, env.task(KEY), [])
  assert episode.grade().reward is None


ENV = make(turns=3)


@given(st.lists(st.tuples(st.text(), st.booleans()), min_size=3, max_size=3))
@settings(max_examples=60, deadline=None)
def test_any_text_has_a_grade(said):
  episode = ENV.make(ENV.task(KEY))
  episode.reset()
  steps = [episode.step(text, truncated) for text, truncated in said]
  assert [step.done for step in steps] == [False, False, True]
  assert 0 <= episode.grade().reward <= 1
  episode.reset()
  assert episode.grade().reward is None


@pytest.mark.parametrize('role', ['user', 'tool'])
def test_a_demonstration_replays_as_one_sample(role):
  """Assistant turns are trained; observations are not."""
  task = make(role=role).task(KEY)
  replay = sampler.DatasetSampler(
    schema.Dataset(), None, fixtures.RENDERER, 256
  )
  (sample,) = replay.rollout(task, 0).samples
  texts = [message['content'] for message in task.demonstration]
  # Every turn has its eos.
  assert sample.mask.sum() == len(texts[0]) + len(texts[2]) + 2
  heard = (sample.roles == types.ROLES.index(role)) & sample.is_content
  heard[: np.argmax(sample.mask)] = False  # the prompt
  assert bytes(sample.ids[heard].tolist()) == texts[1].encode()


OPTIONS = st.builds(
  dict,
  turns=st.sampled_from([2, 3]),
  first=st.sampled_from([2, 3, 4]),
  more=st.integers(1, 3),
  role=st.sampled_from(['user', 'tool']),
  train_tasks=st.integers(1, 300),
  eval_tasks=st.integers(1, 80),
)


@given(OPTIONS, OPTIONS, st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=10, deadline=None)
def test_splits_are_disjoint_for_any_options(one, other, seed, seed2):
  train, held = ids(make(**one), 'train', seed), ids(make(**other), 'eval')
  assert len(set(train)) == len(train) == one['train_tasks']
  assert len(set(held)) == len(held) == other['eval_tasks']
  assert not set(train) & set(held)
  assert held == ids(make(**other), 'eval', seed2)
  for task in make(**one).source('train', seed).take(20):
    sizes = [len(names) for names in task.info['turns']]
    assert sizes == [one['first']] + [one['more']] * (one['turns'] - 1)
    names = [name for turn in task.info['turns'] for name in turn]
    assert len(set(names)) == len(names)
    assert sorted(task.info['turns'][0]) == task.id.split(',')


def test_every_set_of_names_has_one_number():
  """Sets of two and of all but one name, against their list."""
  names = alphabet_sort.NAMES
  pairs = {alphabet_sort._key(2, i) for i in range(math.comb(len(names), 2))}
  assert pairs == {
    f'{a},{b}' for i, a in enumerate(names) for b in names[i + 1 :]
  }
  n = len(names)
  most = {alphabet_sort._key(n - 1, i) for i in range(n)}
  assert most == {','.join(x for x in names if x != out) for out in names}


def test_names_are_shuffled():
  tasks = make().source('train', 0).take(2000)
  sorted_already = [
    task.info['turns'][0] == task.id.split(',') for task in tasks
  ]
  # One in six of three names: standard deviation 0.008.
  assert 0.13 < np.mean(sorted_already) < 0.20


def test_the_seed_determines_the_training_tasks():
  five, again, six = (
    ids(make(train_tasks=500), 'train', seed) for seed in (5, 5, 6)
  )
  assert five == again and set(five) != set(six)


def test_evaluation_tasks_are_pinned():
  assert ids(make(), 'eval')[:4] == [
    'Hal,Leo,Wim',
    'Fen,Neve,Pax',
    'Kip,Mab,Wim',
    'Mox,Rolo,Yara',
  ]


@pytest.mark.parametrize(
  'options, words',
  [
    ({'first': 2}, ('envs.sort.env.train_tasks must be at most 1458', 'first')),
    ({'eval_tasks': 8000}, ('envs.sort.env.eval_tasks', '8000')),
    ({'first': 50, 'more': 12}, ('envs.sort.env.first must leave', '62')),
  ],
)
def test_more_tasks_or_names_than_there_are_is_refused(options, words):
  with pytest.raises(ValueError) as error:
    make(**options)
  assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
  'options, words',
  [
    ({'turns': 4}, r'turns must be one of \(2, 3\): got 4'),
    ({'role': 'system'}, 'role must be one of'),
    ({'more': 0}, 'more must be > 0'),
  ],
)
def test_invalid_options_are_refused(options, words):
  with pytest.raises(ValueError, match=words):
    schema.AlphabetSort(**options)


def test_resuming_with_other_options_is_refused():
  state = make().source('train', 0).get_state()
  with pytest.raises(ValueError, match='the fingerprint of a resumed source'):
    make(turns=3).source('train', 0).set_state(state)
