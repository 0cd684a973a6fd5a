"""Reward functions of transcripts, against the environment's rewards."""

import pytest

from posttrain import schema
from posttrain.envs import registry
from posttrain.envs.sql import functions, players

PLAYERS = {
  'oracle': players.oracle(schema.SqlTeacher(error=0.5, detour=0.5)),
  'astray': players.oracle(schema.SqlTeacher(haste=1.0)),
  'chance': players.chance,
}


@pytest.mark.parametrize('name', PLAYERS)
@pytest.mark.parametrize('style', ['compact', 'verbose'])
def test_rewards_of_transcripts_equal_those_of_the_environment(style, name):
  env = registry.make(
    'sql', schema.Sql(style=style, difficulties=('easy', 'medium', 'hard'))
  )
  rollouts = [
    players.play(env, task, PLAYERS[name])
    for task in env.source('eval', 0).take(30)
  ]
  columns = {
    'completions': [list(r.messages[len(r.task.prompt) :]) for r in rollouts],
    **{
      key: [r.task.info[key] for r in rollouts]
      for key in ('gold_rows', 'answer_type', 'difficulty')
    },
  }
  assert functions.reward_correctness(**columns) == [
    float(r.score.correct) for r in rollouts
  ]
  for fn, metric in (
    (functions.reward_progress, 'progress'),
    (functions.reward_operational, 'operational'),
  ):
    assert fn(**columns) == pytest.approx(
      [r.score.metrics[metric] for r in rollouts]
    )


def test_a_truncated_answer_does_not_count():
  """A truncated answer has an observation; the next answer counts."""
  env = registry.make('sql', schema.Sql())
  (task,) = env.source('eval', 0).take(1)
  episode, said = env.make(task), []
  for text, truncated in (
    *[('ANSWER wrong', True)] * 2,
    (f'ANSWER {task.answer}', False),
  ):
    out = episode.step(text, truncated)
    said += [{'role': 'assistant', 'content': text}, *out.messages]
  columns = {'completions': [said], 'gold_rows': [task.info['gold_rows']]}
  assert functions.reward_correctness(
    answer_type=[task.info['answer_type']], **columns
  ) == [1.0]
  # Two failures, the second of which is a repeat.
  assert functions.reward_operational(**columns) == [pytest.approx(-0.07)]
  assert episode.grade().metrics['operational'] == pytest.approx(-0.07)


def test_rewards_of_a_transcript_written_by_hand():
  said = [
    {'role': 'assistant', 'content': 'QUERY SELECT wage FROM dogs'},
    {'role': 'tool', 'content': 'error: no such column: wage\nleft: 7'},
    {'role': 'assistant', 'content': 'QUERY SELECT pay FROM dogs'},
    {'role': 'tool', 'content': 'result: 41\nleft: 6'},
    {'role': 'assistant', 'content': 'ANSWER 41'},
  ]
  columns = {
    'completions': [said],
    'gold_rows': [((42,),)],
    'answer_type': ['integer'],
  }
  assert functions.reward_correctness(**columns) == [0.0]
  # card 1, J 0, N 0.59: 1.6 bins.
  assert functions.reward_progress(**columns) == [0.5]
  assert functions.reward_operational(**columns) == [pytest.approx(-0.01)]


def test_several_golds_and_ranks_are_read_from_columns():
  said = [[{'role': 'assistant', 'content': f'ANSWER {x}'}] for x in 'abab']
  columns = {
    'completions': said,
    'gold_rows': [(('a',),)] * 4,
    'answer_type': ['string'] * 4,
    'other_golds': [((('b',),),), ((('b',),),), (), None],
    'ranks': [(), (), (0,), None],
  }
  right = functions.reward_correctness(**columns)
  assert right == [1.0, 1.0, 1.0, 0.0]
