"""Pairs of rollouts: right against wrong, each answer once, seeded."""

import collections
import dataclasses

import pytest

from posttrain import schema, types
from posttrain.data import preferences, sources
from posttrain.rollout import driver as drivers
from posttrain.rollout import pairing
from tests.rollout import fakes

RIGHT, WRONG = 'yes', 'no'


class Env:
  """Tasks by name; each prompt comes twice."""

  name, max_turns = 'e', 1

  def __init__(self, tasks=6):
    self.tasks = tasks

  def source(self, split, seed):
    return sources.Shuffled(
      [
        types.Task(f'{split}{i}', 'e', _user(f'{split} q{i // 2}'))
        for i in range(2 * self.tasks)
      ],
      seed,
    )


class StandIns(Env):
  """Tasks of one prompt, told apart by what else they have."""

  def source(self, split, seed):
    return sources.Shuffled(
      [
        types.Task(f'{i}', 'e', _user('reset'), i // 4, info={'x': i // 2})
        for i in range(2 * self.tasks)
      ],
      seed,
    )


class Driver:
  """Gives each spec the next of `script`: a text, or why it has none.

  `change` makes another rollout of (its place in the script, it).
  """

  def __init__(self, script, change):
    self.script, self.change = script, change

  def run(self, specs):
    self.specs = specs
    return [
      self.change(i % len(self.script), self._one(i, spec))
      for i, spec in enumerate(specs)
    ]

  def _one(self, i, spec):
    text = self.script[i % len(self.script)]
    reason = text if text in types.STOP_REASONS else 'eos'
    graded = text not in ('ungraded', *types.STOP_REASONS)
    return types.Rollout(
      spec.uid,
      spec.task,
      (*spec.task.prompt, *_says(text)),
      (),
      types.Score(None, text.startswith(RIGHT) if graded else None),
      reason,
      error='e: broken' if reason == 'error' else None,
    )


def _user(text):
  return ({'role': 'user', 'content': text},)


def _says(text):
  return ({'role': 'assistant', 'content': text},)


def make(
  script,
  seed=0,
  max_errors=0,
  tasks=6,
  split='train',
  change=lambda i, rollout: rollout,
  **options,
):
  cfg = schema.MadePairs(**{'prompts': 6, 'samples': len(script), **options})
  driver = Driver(script, change)
  made, count = pairing.make(
    {'e': Env(tasks)}, driver, cfg, seed, max_errors, split
  )
  return made, count, driver


def test_a_right_answer_is_chosen_and_a_wrong_one_rejected():
  made, count, driver = make([RIGHT, WRONG, 'max_tokens', 'ungraded', 'yes 2'])
  assert len(made) == 6
  for pair in made:
    assert pair.chosen[0]['content'].startswith(RIGHT)
    assert pair.rejected == _says(WRONG)
  assert (count.tasks, count.answers, count.pairs) == (6, 30, 6)
  assert (count.cut, count.ungraded, count.errors) == (6, 6, 0)
  assert (count.correct, count.incorrect, count.one_sided) == (12, 6, 0)
  assert len({spec.uid for spec in driver.specs}) == 30
  # It is seeded which of two right ones is taken, and not always the same.
  chosen = collections.Counter(pair.chosen[0]['content'] for pair in made)
  assert len(chosen) == 2
  assert made == make([RIGHT, WRONG, 'max_tokens', 'ungraded', 'yes 2'])[0]


def test_what_is_asked_or_said_twice_counts_once():
  made, count, driver = make([RIGHT, RIGHT, WRONG], per_prompt=1)
  prompts = {str(spec.task.prompt) for spec in driver.specs}
  assert len(prompts) == 6 and len(driver.specs) == 18
  assert len(made) == 6 and count.repeated == 6 and count.correct == 6


@pytest.mark.parametrize(('limit', 'pairs'), [(1, 1), (2, 2), (9, 3)])
def test_the_rarer_kind_is_taken_again(limit, pairs):
  made, _, _ = make(
    ['yes 1', 'yes 2', 'no 1', 'no 2', 'no 3'], per_prompt=limit
  )
  assert len(made) == 6 * pairs
  for i in range(0, len(made), pairs):
    mine = made[i : i + pairs]
    assert len({str(x.prompt) for x in mine}) == 1
    assert len({str(x.rejected) for x in mine}) == pairs
    assert len({str(x.chosen) for x in mine}) == min(pairs, 2)


def test_fewer_tasks_than_asked_for():
  assert len(make([RIGHT, WRONG], tasks=2)[0]) == 2


def test_held_out_tasks_are_others():
  made, count, driver = make([RIGHT, WRONG], split='eval', eval_prompts=4)
  assert count.tasks == len(made) == 4
  assert all(pair.prompt[0]['content'].startswith('eval') for pair in made)
  training = make([RIGHT, WRONG])[2].specs
  assert not {x.uid for x in driver.specs} & {x.uid for x in training}


def test_one_kind_of_answer_makes_no_pair():
  with pytest.raises(ValueError, match='got 0 pairs of 6 tasks .* 6 tasks had'):
    make([RIGHT, 'yes 2'])


def test_what_is_to_be_done_about_no_held_out_pair():
  with pytest.raises(ValueError, match='answers to the train split') as error:
    make([RIGHT, 'yes 2'], eval_prompts=4)
  assert 'eval_prompts' not in str(error.value)
  with pytest.raises(
    ValueError, match='the eval split .* 0 pairs of 4 .* pairs.eval_prompts'
  ):
    make([RIGHT, 'yes 2'], split='eval', eval_prompts=4)


def test_a_rollout_knows_what_was_asked():
  task = types.Task('3', 'e', _user('reset(seed=3)'))
  whole = types.Rollout(
    0,
    task,
    (*_user('A maze.'), *_says('N'), *_user('Out.')),
    (),
    types.Score(1.0),
    'env_done',
  )
  assert whole.prompt == _user('A maze.')
  assert whole.completion_messages == (*_says('N'), *_user('Out.'))
  failed = dataclasses.replace(whole, messages=(), stop_reason='error')
  assert (failed.prompt, failed.completion_messages) == (task.prompt, ())


def test_tasks_that_are_shown_otherwise_are_told_apart():
  """Twelve tasks of one prompt; two each have the same answer and info."""
  found = pairing.asked(StandIns(), schema.MadePairs(), 0)
  assert sorted(task.info['x'] for task in found) == list(range(6))


def test_a_pair_answers_one_prompt_as_it_was_shown():
  def show(i, rollout):
    asks = rollout.task.prompt[0]['content']
    shown = _user(f'{asks}, door {i % 2}')
    failed = rollout.stop_reason == 'error'
    return dataclasses.replace(
      rollout, messages=() if failed else (*shown, *rollout.completion_messages)
    )

  made, count, _ = make(
    ['yes 0', 'yes 1', 'no 0', 'no 1', 'error'],
    max_errors=6,
    per_prompt=9,
    change=show,
  )
  assert (count.tasks, count.one_sided, count.errors) == (12, 0, 6)
  assert count.pairs == len(made) == len({str(x.prompt) for x in made}) == 12
  for pair in made:
    door = pair.prompt[0]['content'][-1]
    assert (pair.chosen, pair.rejected) == (
      _says(f'yes {door}'),
      _says(f'no {door}'),
    )
  with pytest.raises(ValueError, match='0 pairs of 12 tasks .* 12 tasks had'):
    make([RIGHT, WRONG], change=show)


@pytest.mark.parametrize('reason', ['max_tokens', 'overflow'])
def test_an_episode_with_a_turn_that_was_cut_is_in_no_pair(reason):
  def end(i, rollout):
    how = ('eos', reason if i == 2 else 'eos')
    turns = tuple(types.Turn(0, 0, 1, 0.0, x) for x in how)
    return dataclasses.replace(rollout, stop_reason='env_done', turns=turns)

  made, count, _ = make([RIGHT, WRONG, 'no, cut'], per_prompt=9, change=end)
  assert (count.cut, count.incorrect) == (6, 6)
  assert all(pair.rejected == _says(WRONG) for pair in made)


@pytest.mark.parametrize(
  ('says', 'why'),
  [
    (['red', 'red'], None),
    (['reddish', 'red'], 'cut'),
    (['red', 'reddish'], 'cut'),
  ],
)
def test_cut_turns_of_the_driver(says, why):
  spec = fakes.spec(7, max_tokens=4)
  (rollout,) = drivers.Driver(fakes.Engine({7: says}), fakes.RENDERER, 64).run(
    [spec]
  )
  assert len(rollout.turns) == 2 and pairing._unusable(rollout) == why


def test_what_is_graded_both_ways_is_in_no_pair():
  def grade(i, rollout):
    score = dataclasses.replace(rollout.score, correct=i in (0, 2, 4))
    return dataclasses.replace(rollout, score=score)

  made, count, _ = make(
    [RIGHT, WRONG, 'maybe', 'maybe', 'maybe'], per_prompt=9, change=grade
  )
  assert [(x.chosen, x.rejected) for x in made] == [
    (_says(RIGHT), _says(WRONG))
  ] * 6
  assert (count.contradicted, count.repeated) == (12, 6)
  assert (count.correct, count.incorrect, count.answers) == (6, 6, 30)
  assert '12 graded both ways' in count.line()
  with pytest.raises(ValueError, match='0 pairs .* 6 tasks had but one kind'):
    make(['maybe', 'maybe'], change=grade)


def test_errors_have_a_budget():
  with pytest.raises(RuntimeError, match='max_errors=0'):
    make([RIGHT, WRONG, 'error'])
  made, count, _ = make([RIGHT, WRONG, 'error'], max_errors=6)
  assert len(made) == count.errors == 6


def test_a_file_of_them_is_read_as_they_are(tmp_path):
  made, _, _ = make([RIGHT, WRONG])
  preferences.write(tmp_path / 'p.jsonl', made)
  for a, b in zip(made, preferences.read(tmp_path / 'p.jsonl'), strict=True):
    assert (a.prompt, a.chosen, a.rejected, a.info) == (
      b.prompt,
      b.chosen,
      b.rejected,
      b.info,
    )
