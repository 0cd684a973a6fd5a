"""Sorting names over several turns: messages, grades, disjoint splits."""

import pytest

from posttrain import schema
from posttrain.envs import alphabet_sort, registry


def make(**options):
  return registry.make('sort', schema.AlphabetSort(**options))


def play(env, task, texts):
  """Plays the texts turn by turn; returns the episode and its steps."""
  episode = env.make(task)
  assert episode.reset() == task.prompt
  return episode, [episode.step(text, truncated=False) for text in texts]


KEY = 'Ada,Ane,Mio'


@pytest.mark.parametrize(
  'text, names',
  [
    ('Ada, Ben', ('Ada', 'Ben')),
    (' Ada,Ben\n', ('Ada', 'Ben')),
    ('Ada', ('Ada',)),
    ('', None),
    ('Ada, Ben.', None),
    ('Ada Ben', None),
    ('Ada, B3n', None),
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
    ('Xyz', 0.0),
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
