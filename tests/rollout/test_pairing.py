"""Preference pairs: correct against incorrect, distinct answers, seeded."""

import dataclasses

import pytest

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import rows
from posttrain.rollout import pairing

RIGHT, WRONG = 'yes', 'no'


class Env:
  """Tasks of which each prompt occurs twice."""

  name, max_turns = 'e', 1

  def source(self, split, seed):
    return sources.Shuffled(
      [
        types.Task(f'{split}{i}', 'e', _user(f'{split} q{i // 2}'))
        for i in range(12)
      ],
      seed,
    )


class Driver:
  """Gives each spec the next item of `script`: a text, or a stop reason.

  `change` maps (index in the script, rollout) to another rollout.
  """

  env_timeout = 5.0

  def __init__(self, script, change):
    self.script, self.change = script, change

  def run(self, specs):
    self.specs = specs
    return [
      self.change(i % len(self.script), self._rollout(i, spec))
      for i, spec in enumerate(specs)
    ]

  def _rollout(self, i, spec):
    text = self.script[i % len(self.script)]
    reason = text if text in types.STOP_REASONS else 'eos'
    graded = text not in ('ungraded', *types.STOP_REASONS)
    return types.Rollout(
      spec.uid,
      spec.task,
      (*spec.task.prompt, *_assistant(text)),
      (),
      types.Score(None, text.startswith(RIGHT) if graded else None),
      reason,
      error='e: broken' if reason == 'error' else None,
    )


def _user(text):
  return ({'role': 'user', 'content': text},)


def _assistant(text):
  return ({'role': 'assistant', 'content': text},)


def make(script, split='train', change=lambda i, rollout: rollout, **options):
  cfg = schema.MadePairs(**{'prompts': 6, 'samples': len(script), **options})
  driver = Driver(script, change)
  pairs, count = pairing.make({'e': Env()}, driver, cfg, 0, 0.5, split)
  return pairs, count, driver


def test_correct_answers_are_chosen_and_incorrect_ones_rejected():
  script = [RIGHT, WRONG, 'max_tokens', 'ungraded', 'yes 2']
  pairs, count, driver = make(script)
  assert len(pairs) == 6
  for pair in pairs:
    assert pair.chosen[0]['content'].startswith(RIGHT)
    assert pair.rejected == _assistant(WRONG)
  assert (count.tasks, count.answers, count.pairs) == (6, 30, 6)
  assert (count.cut, count.ungraded, count.errors) == (6, 6, 0)
  assert len({spec.uid for spec in driver.specs}) == 30
  # The choice among two correct answers is seeded and varies.
  assert len({pair.chosen[0]['content'] for pair in pairs}) == 2


def test_equal_tasks_and_equal_answers_count_once():
  pairs, count, driver = make([RIGHT, RIGHT, WRONG], per_prompt=1)
  assert len({str(spec.task.prompt) for spec in driver.specs}) == 6
  assert len(pairs) == count.repeated == count.correct == 6


@pytest.mark.parametrize(('limit', 'expected'), [(1, 1), (9, 3)])
def test_rarer_kind_is_reused(limit, expected):
  pairs, _, _ = make(
    ['yes 1', 'yes 2', 'no 1', 'no 2', 'no 3'], per_prompt=limit
  )
  assert len(pairs) == 6 * expected
  for i in range(0, len(pairs), expected):
    group = pairs[i : i + expected]
    assert len({str(x.rejected) for x in group}) == expected
    assert len({str(x.chosen) for x in group}) == min(expected, 2)


def test_eval_split_has_other_tasks_and_uids():
  pairs, count, driver = make([RIGHT, WRONG], split='eval', eval_prompts=4)
  assert count.tasks == len(pairs) == 4
  assert all(pair.prompt[0]['content'].startswith('eval') for pair in pairs)
  training = {x.uid for x in make([RIGHT, WRONG])[2].specs}
  assert training.isdisjoint(x.uid for x in driver.specs)


def test_pairs_share_the_prompt_that_was_shown():
  def show(i, rollout):
    text = rollout.task.prompt[0]['content']
    shown = _user(f'{text}, door {i % 2}')
    return dataclasses.replace(
      rollout, messages=(*shown, *rollout.completion_messages)
    )

  script = ['yes 0', 'yes 1', 'no 0', 'no 1']
  pairs, count, _ = make(script, per_prompt=9, change=show)
  assert count.tasks == len(pairs) == len({str(x.prompt) for x in pairs}) == 12
  for pair in pairs:
    door = pair.prompt[0]['content'][-1]
    assert (pair.chosen, pair.rejected) == (
      _assistant(f'yes {door}'),
      _assistant(f'no {door}'),
    )


@pytest.mark.parametrize('reason', ['max_tokens', 'overflow'])
def test_episodes_with_a_cut_turn_are_in_no_pair(reason):
  def end(i, rollout):
    reasons = ('eos', reason if i == 2 else 'eos')
    turns = tuple(types.Turn(0, 0, 1, 0.0, x) for x in reasons)
    return dataclasses.replace(rollout, stop_reason='env_done', turns=turns)

  pairs, count, _ = make([RIGHT, WRONG, 'no, cut'], per_prompt=9, change=end)
  assert (count.cut, count.incorrect) == (6, 6)
  assert all(pair.rejected == _assistant(WRONG) for pair in pairs)


def test_equal_answers_graded_both_ways_are_in_no_pair():
  def grade(i, rollout):
    score = dataclasses.replace(rollout.score, correct=i in (0, 2, 4))
    return dataclasses.replace(rollout, score=score)

  pairs, count, _ = make(
    [RIGHT, WRONG, 'maybe', 'maybe', 'maybe'], per_prompt=9, change=grade
  )
  assert [(x.chosen, x.rejected) for x in pairs] == [
    (_assistant(RIGHT), _assistant(WRONG))
  ] * 6
  assert (count.contradicted, count.repeated) == (12, 6)


def test_failed_episodes_have_a_budget():
  with pytest.raises(RuntimeError, match='got 12 of 18'):
    make([RIGHT, 'error', 'error'])
  pairs, count, _ = make([RIGHT, WRONG, 'error'])
  assert len(pairs) == count.errors == 6


def test_answers_that_nothing_grades_are_not_the_policys_fault(tmp_path):
  with pytest.raises(ValueError, match='12 not graded.* reward functions are'):
    make(['ungraded', 'ungraded'])
  (tmp_path / 'rows.jsonl').write_text('{"prompt": "a"}\n')
  env = rows.Rows('e', schema.Rows(path=str(tmp_path / 'rows.jsonl')))
  with pytest.raises(ValueError, match=r'envs\.e\.env must grade answers'):
    pairing.first_tasks(env, schema.MadePairs(), 0, 5.0)
