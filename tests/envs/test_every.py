"""Promises of every environment whose tasks are generated."""

import functools

import pytest

from posttrain import schema
from posttrain.envs import registry

# Options by environment, all of them with different tasks.
OPTIONS = {
  'arithmetic': [
    schema.Arithmetic(),
    schema.Arithmetic(
      ops=('-', '+'),
      min_operand=5,
      max_operand=30,
      train_tasks=300,
      eval_tasks=80,
    ),
    schema.Arithmetic(
      ops=('x',), max_factor=40, worked=False, train_tasks=300, eval_tasks=80
    ),
  ],
  'reverse_text': [
    schema.ReverseText(),
    schema.ReverseText(
      min_length=2, max_length=20, alphabet='hgfedcba', train_tasks=400
    ),
  ],
  'alphabet_sort': [
    schema.AlphabetSort(),
    schema.AlphabetSort(
      turns=3, first=2, more=4, role='tool', train_tasks=300, eval_tasks=80
    ),
  ],
  'countdown': [
    schema.Countdown(train_tasks=800),
    schema.Countdown(sizes=(2, 4), worked=False, train_tasks=300),
  ],
  'wordle': [
    schema.Wordle(train_tasks=300),
    schema.Wordle(style='compact', train_tasks=100, eval_tasks=128),
  ],
}
ALL = [cfg for each in OPTIONS.values() for cfg in each]
make = functools.cache(lambda cfg: registry.make('e', cfg))


def ids(cfg, split, seed=0):
  source = make(cfg).source(split, seed)
  return [task.id for task in source.take(len(source))]


@pytest.mark.parametrize('split', ['train', 'eval'])
@pytest.mark.parametrize('cfg', ALL)
def test_demonstrations_are_correct_and_show_what_an_episode_says(cfg, split):
  env = make(cfg)
  source = env.source(split, 0)
  assert len(source) == getattr(cfg, f'{split}_tasks')
  for task in source.take(1000):
    episode = env.make(task)
    assert episode.reset() == task.prompt and task.env == 'e'
    assert episode.grade().reward is None  # not scorable without a turn
    turns = [m for m in task.demonstration if m['role'] == 'assistant']
    assert len(turns) <= env.max_turns
    messages, rewards = [], []
    for i, turn in enumerate(turns, start=1):
      out = episode.step(turn['content'], truncated=False)
      assert out.done == (i == len(turns))
      messages += [turn, *out.messages]
      rewards.append(out.reward)
    assert tuple(messages) == task.demonstration
    score = episode.grade()
    assert score.reward == sum(rewards) == 1.0
    assert score.correct and score.formatted
    episode.close()


@pytest.mark.parametrize('kind', OPTIONS)
def test_tasks_are_distinct_and_no_options_mix_the_splits(kind):
  def key(text):  # of tasks that must share a split
    for op in ('+', 'x') if kind == 'arithmetic' else ():
      text = op.join(sorted(text.split(op)))
    if kind == 'wordle':
      return text.split()[0]
    return min(text, text[::-1]) if kind == 'reverse_text' else text

  sides = {'train': set(), 'eval': set()}
  for cfg in OPTIONS[kind]:
    for split, side in sides.items():
      for seed in (0, 7):
        found = ids(cfg, split, seed)
        assert len(set(found)) == len(found)
        side |= set(map(key, found))
  assert not sides['train'] & sides['eval']


@pytest.mark.parametrize('kind', OPTIONS)
def test_the_seed_draws_the_training_tasks_alone(kind):
  cfg = OPTIONS[kind][1]
  assert ids(cfg, 'train', 5) == ids(cfg, 'train', 5)
  assert set(ids(cfg, 'train', 5)) != set(ids(cfg, 'train', 6))
  assert ids(cfg, 'eval', 5) == ids(cfg, 'eval', 6)


@pytest.mark.parametrize(
  'kind, expected',
  [
    ('arithmetic', ['95-55', '18-64', '57+51', '7+78']),
    ('reverse_text', ['ysx', 'dbip', 'jxdqe', 'mfqsyt', 'eoteilf', 'fuzsxqnf']),
    ('countdown', ['25,50,89', '18,64,65,84', '18,57,61', '11,55,79,88']),
    ('wordle', ['ready', 'steam', 'alone', 'sound', 'onion']),
    ('alphabet_sort', ['Hal,Leo,Wim', 'Fen,Neve,Pax', 'Kip,Mab,Wim']),
  ],
)
def test_evaluation_tasks_are_pinned(kind, expected):
  """An evaluation task must stay one in every later version."""
  assert ids(OPTIONS[kind][0], 'eval')[: len(expected)] == expected


@pytest.mark.parametrize(
  'cfg, words',
  [
    (schema.Arithmetic(eval_tasks=5000), 'eval_tasks must .*got 5000'),
    (schema.Wordle(eval_tasks=129), 'eval_tasks must .*got 129'),
    (schema.ReverseText(min_length=1, max_length=2), 'train_tasks .*got 8000'),
  ],
)
def test_more_tasks_than_there_are_is_refused(cfg, words):
  with pytest.raises(ValueError, match=rf'^envs\.e\.env\.{words}'):
    registry.make('e', cfg)
