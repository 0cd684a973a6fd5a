"""Pairs of rollouts: right against wrong, each answer once, seeded."""

import collections

import pytest

from posttrain import schema, types
from posttrain.data import pairs, sources
from posttrain.rollout import pairing

RIGHT, WRONG = 'yes', 'no'


class Env:
  """Tasks by name; each prompt comes twice."""

  name, max_turns = 'e', 1

  def __init__(self, tasks=6):
    self.tasks = tasks

  def source(self, split, seed):
    return sources.Shuffled([
        types.Task(f'{split}{i}', 'e', _user(f'{split} q{i // 2}'))
        for i in range(2 * self.tasks)
    ], seed)  # fmt: skip


class Driver:
  """Gives each play the next of `script`: a text, or why it has none."""

  def __init__(self, script):
    self.script = script

  def play(self, plays):
    self.plays = plays
    return [self._one(i, play) for i, play in enumerate(plays)]

  def _one(self, i, play):
    text = self.script[i % len(self.script)]
    reason = text if text in types.STOP_REASONS else 'eos'
    graded = text not in ('ungraded', *types.STOP_REASONS)
    return types.Rollout(
        play.uid, play.task, (*play.task.prompt, *_says(text)), (),
        types.Score(None, text.startswith(RIGHT) if graded else None), reason,
        error='e: broken' if reason == 'error' else None,
    )  # fmt: skip


def _user(text):
  return ({'role': 'user', 'content': text},)


def _says(text):
  return ({'role': 'assistant', 'content': text},)


def make(script, seed=0, max_errors=0, tasks=6, split='train', **options):
  cfg = schema.MadePairs(
      **{'prompts': 6, 'samples': len(script), **options}
  )
  driver = Driver(script)
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
  assert len({play.uid for play in driver.plays}) == 30
  # It is seeded which of two right ones is taken, and not always the same.
  chosen = collections.Counter(pair.chosen[0]['content'] for pair in made)
  assert len(chosen) == 2
  assert made == make([RIGHT, WRONG, 'max_tokens', 'ungraded', 'yes 2'])[0]


def test_what_is_asked_or_said_twice_counts_once():
  made, count, driver = make([RIGHT, RIGHT, WRONG], per_prompt=1)
  prompts = {str(play.task.prompt) for play in driver.plays}
  assert len(prompts) == 6 and len(driver.plays) == 18
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
  training = make([RIGHT, WRONG])[2].plays
  assert not {x.uid for x in driver.plays} & {x.uid for x in training}


def test_one_kind_of_answer_makes_no_pair():
  with pytest.raises(ValueError, match='got 0 pairs of 6 tasks .* 6 tasks had'):
    make([RIGHT, 'yes 2'])


def test_errors_have_a_budget():
  with pytest.raises(RuntimeError, match='max_errors=0'):
    make([RIGHT, WRONG, 'error'])
  made, count, _ = make([RIGHT, WRONG, 'error'], max_errors=6)
  assert len(made) == count.errors == 6


def test_a_file_of_them_is_read_as_they_are(tmp_path):
  made, _, _ = make([RIGHT, WRONG])
  pairs.write(tmp_path / 'p.jsonl', made)
  for a, b in zip(made, pairs.read(tmp_path / 'p.jsonl'), strict=True):
    assert (a.prompt, a.chosen, a.rejected, a.info) == (
        b.prompt, b.chosen, b.rejected, b.info
    )
