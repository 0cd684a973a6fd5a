"""Reversed texts and sorted names: grades, messages, distinct draws."""

import itertools

import pytest

from posttrain import schema
from posttrain.envs import registry, text_games


def make(**options):
  return registry.make('sort', schema.AlphabetSort(**options))


@pytest.mark.parametrize(
  'text, reward, formatted',
  [
    (' edcba\n', 1.0, True),
    ('edcb', 8 / 9, True),  # one letter is missing
    ('abcde', 0.2, True),  # not reversed at all
    ('', 0.0, False),
    ('Answer: edcba', 0.0, False),
  ],
)
def test_grade_of_a_reversed_text(text, reward, formatted):
  score = text_games.grade_word(text, 'edcba')
  assert score.reward == pytest.approx(reward)
  assert (score.correct, score.formatted) == (reward == 1, formatted)
  assert score.answer == (text.strip() if formatted else None)
  truncated = text_games.grade_word(text, 'edcba', truncated=True)
  assert (truncated.reward, truncated.formatted) == (0.0, False)


@pytest.mark.parametrize(
  'text, grade',
  [
    (' Ada,Ben, Cio\n', 1.0),
    ('Ada, Ben', 0.8),  # one of three is missing
    ('Ben, Ada, Cio', 2 / 3),  # two have changed places
    ('Xyz', 0.0),
    ('Here: Ada, Ben, Cio', None),
    ('', None),
  ],
)
def test_a_turn_is_graded_by_names(text, grade):
  answer = ['Ada', 'Ben', 'Cio']
  assert text_games.grade_list(text, answer) == pytest.approx(grade)
  assert text_games.grade_list(text, answer, truncated=True) is None


KEY = 'Ada,Ane,Mio'


def test_the_messages_of_a_task():
  task = make(turns=3, role='tool').task(KEY)
  assert task.prompt == (
    {'role': 'user', 'content': 'Sort these names: Mio, Ane, Ada'},
  )
  assert task.info == {
    'turns': [['Mio', 'Ane', 'Ada'], ['Gav', 'Dus'], ['Alm', 'Bru']]
  }
  roles, texts = zip(
    *((x['role'], x['content']) for x in task.demonstration), strict=True
  )
  assert roles == ('assistant', 'tool', 'assistant', 'tool', 'assistant')
  assert texts == (
    'Ada, Ane, Mio',
    'Yes: Ada, Ane, Mio. Add: Gav, Dus',
    'Ada, Ane, Dus, Gav, Mio',
    'Yes: Ada, Ane, Dus, Gav, Mio. Add: Alm, Bru',
    'Ada, Alm, Ane, Bru, Dus, Gav, Mio',
  )
  assert (task.id, task.env, task.answer) == (KEY, 'sort', texts[-1])


@pytest.mark.parametrize(
  'texts, reward, correct, formatted',
  [
    (['Ada, Ane, Mio', 'Ada, Ane, Dus, Gav, Mio'], 1.0, True, True),
    # The observation has the list so far: the second turn can be right.
    (['Mio, Ane, Ada', 'Ada, Ane, Dus, Gav, Mio'], 2 / 3, False, True),
    (['Ada, Ane, Mio'], 0.5, False, False),  # one turn of two
  ],
)
def test_an_episode_is_graded_by_the_mean_of_its_turns(
  texts, reward, correct, formatted
):
  env = make()
  episode = env.make(env.task(KEY))
  episode.reset()
  steps = [episode.step(text, truncated=False) for text in texts]
  score = episode.grade()
  assert score.reward == pytest.approx(reward)
  assert (score.correct, score.formatted) == (correct, formatted)
  (observation,) = steps[0].messages
  verdict = 'Yes' if texts[0] == 'Ada, Ane, Mio' else 'No'
  assert observation['content'] == f'{verdict}: Ada, Ane, Mio. Add: Gav, Dus'


def test_capacity_of_a_large_space_is_half_of_the_expected_number():
  size = 26**64
  large = text_games.Space(size, key=str)
  assert large.capacity('train') == size // 10 * 4
  train, held_out = (
    list(itertools.islice(large.walk(split, (0,)), 300))
    for split in ('train', 'eval')
  )
  assert not set(train) & set(held_out)
  numbers = [int(key) for key in train]
  assert len(set(train)) == 300 and 0 <= min(numbers) <= max(numbers) < size
  # Uniform: the mean of 300 has a standard deviation of 0.017.
  assert 0.43 < sum(number / size for number in numbers) / 300 < 0.57


def test_spaces_take_turns_until_they_are_exhausted():
  spaces = [
    text_games.Space(size, lambda i, tag=tag: f'{tag}{i}')
    for size, tag in ((4, 'a'), (1000, 'b'), (1000, 'c'))
  ]

  cfg = schema.ReverseText(train_tasks=401, eval_tasks=1)
  keys = text_games.Draws('toy', cfg, spaces).keys('train', 5)
  assert len(set(keys)) == 401
  counts = [sum(key[0] == tag for key in keys) for tag in 'abc']
  assert counts[0] == spaces[0].capacity('train')
  assert abs(counts[1] - counts[2]) <= 1
