"""Rewards against numbers by hand; reward functions against the environment."""

import pytest

from posttrain import schema
from posttrain.envs import registry, sql
from posttrain.envs.sql import dialogue, functions

PLAYERS = {
  'oracle': sql.oracle(schema.SqlTeacher(error=0.5, detour=0.5)),
  'astray': sql.oracle(schema.SqlTeacher(haste=1.0)),
  'chance': sql.chance,
}


@pytest.mark.parametrize('name', PLAYERS)
@pytest.mark.parametrize('style', ['compact', 'verbose'])
def test_rewards_of_transcripts_equal_those_of_the_environment(style, name):
  env = registry.make(
    'sql', schema.Sql(style=style, difficulties=('easy', 'medium', 'hard'))
  )
  rollouts = [
    sql.play(env, task, PLAYERS[name])
    for task in env.source('eval', 0).take(30)
  ]
  infos = [rollout.task.info for rollout in rollouts]
  columns = {key: [info[key] for info in infos] for key in infos[0]}
  columns['completions'] = [x.completion_messages for x in rollouts]
  right = functions.reward_correctness(**columns)
  assert right == [float(x.score.correct) for x in rollouts]
  for metric in ('progress', 'operational'):
    reward = getattr(functions, f'reward_{metric}')
    assert reward(**columns) == pytest.approx(
      [r.score.metrics[metric] for r in rollouts]
    )


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


GOLD = (('Ann', 42), ('Ben', 17))


@pytest.mark.parametrize(
  'rows, gold, expected',
  [
    (GOLD, GOLD, 1.0),
    # card 0.5, J 2/4, N 1: 0.125 + 0.25 + 0.25 = 0.625, 2.5 bins, to even.
    ((('Ann', 42),), GOLD, 0.5),
    ((), (), 0.25),  # both empty: card 1, J 0 of none, N = J
    # card 1, J 0, N = 1 / (1 + ln 3): 0.25 + 0.119 = 0.369, one bin.
    (((40,),), ((42,),), 0.25),
    (((None,),), ((42,),), 0.25),  # no number of ours: N 0
  ],
)
def test_progress(rows, gold, expected):
  assert functions.progress(rows, gold) == expected


def step(kind='DESCRIBE', argument='dogs', failed=False, rows=None):
  return dialogue.Action(kind, argument), failed, rows


def play(version, *steps, **weights):
  cfg = schema.SqlReward(version=version, **weights)
  ledger = functions.Ledger(cfg, GOLD)
  return ledger, [ledger.step(*each) for each in steps]


def test_v2_rewards_of_a_script():
  half = (('Ann', 42),)  # p = 0.5
  ledger, steps = play(
    'v2',
    step(),  # -0.02 + 0.02 + 0.01
    step(),  # repeat: -0.02 + 0.02 - 0.03
    step('QUERY', 'bad', failed=True),  # -0.02
    step('QUERY', 'bad', failed=True),  # -0.02 - 0.03
    step('QUERY', 'half', rows=half),  # 0.01 + 0.15 * 0.5
    step('QUERY', 'gold', rows=GOLD),  # 0.01 + 0.15 * 0.5
    step('QUERY', 'none', rows=()),  # 0.01 - 0.15, clipped
  )
  assert steps == pytest.approx(
    [0.01, -0.03, -0.02, -0.05, 0.085, 0.085, -0.10]
  )
  assert ledger.progress == 0.0
  assert ledger.operational == pytest.approx(-0.06)
  assert ledger.correct is None


def test_v1_rewards_of_a_script():
  half = (('Ann', 42),)
  _, steps = play(
    'v1',
    step(),  # -0.005 + 0.02 + 0.01
    step(),  # -0.005 + 0.02 - 0.01
    step('QUERY', 'bad', failed=True),  # -0.005
    step('QUERY', 'half', rows=half),  # 0.025 + 0.15 * 0.5
    step('QUERY', 'none', rows=()),  # 0.025: a loss costs nothing
    step('QUERY', 'gold', rows=GOLD),  # 0.025 + 0.15 * 0.5
  )
  assert steps == pytest.approx([0.025, 0.005, -0.005, 0.1, 0.025, 0.1])


def test_v1_caps_new_steps_and_the_sum():
  _, steps = play('v1', *(step(argument=str(i)) for i in range(40)))
  # Ten times news; then 0.015 each until the sum is 0.5.
  assert steps[:10] == pytest.approx([0.025] * 10)
  assert steps[10:26] == pytest.approx([0.015] * 16)
  assert sum(steps) == pytest.approx(0.5) and steps[-1] == 0.0
  _, steps = play('v1', *(step('QUERY', 'bad', failed=True) for _ in range(40)))
  assert sum(steps) == pytest.approx(-0.2)


WEIGHTS = {'operational': 2.0, 'progress': 0.5, 'correctness': 3.0}


@pytest.mark.parametrize(
  'version, weights, expected, answer',
  [
    # Binary: the layers are measured and not paid.
    ('binary', {}, [0.0, 0.0], 1.0),
    ('v2', WEIGHTS, [0.02, 0.02 + 0.075], 3.0),
  ],
)
def test_weights_of_the_layers(version, weights, expected, answer):
  ledger, steps = play(
    version, step(), step('QUERY', 'gold', rows=GOLD), **weights
  )
  assert steps == pytest.approx(expected)
  assert ledger.operational > 0 and ledger.progress == 1.0
  assert ledger.answer(True) == answer and ledger.answer(False) == 0.0
