"""Episodes, demonstrations and players."""

import pytest

from posttrain import schema
from posttrain.envs import registry, sql

DATA = schema.SqlSynth(train_databases=60, eval_databases=60)
ALL = ('easy', 'medium', 'hard')


def make(**options):
  return registry.make('sql', schema.Sql(**{'data': DATA, **options}))


def tasks(count, difficulties=ALL, **options):
  env = make(difficulties=difficulties, **options)
  return env, env.source('eval', 0).take(count)


def find(template, **options):
  """Returns the first task of a template."""
  env = make(difficulties=ALL, **options)
  source = env.source('eval', 0)
  return env, next(
    task
    for task in source.take(len(source))
    if task.info['template'] == template
  )


def play(env, task, *turns):
  """Plays turns; returns (steps, score, messages after the prompt)."""
  episode = env.make(task)
  episode.reset()
  steps = [episode.step(turn, False) for turn in turns]
  score = episode.grade()
  episode.close()
  return steps, score


def test_an_episode_step_by_step():
  env, task = find('M1')
  table, sql = task.info['tables'][0], task.info['gold_sql']
  steps, score = play(
    env,
    task,
    f'describe: {table}',
    f'DESCRIBE {table}',
    'DESCRIBE nothing',
    'hello',
    f'QUERY {sql}',
    f'ANSWER {task.answer}',
  )
  said = [step.messages[0]['content'] for step in steps[:-1]]
  columns = said[0].partition('result: ')[2].partition(';')[0].split(', ')
  assert columns[:2] == ['id', 'name'] and len(columns) >= 4
  assert said[3] == 'error: only SELECT is allowed\nleft: 4'
  assert said[4] == f'result: {task.answer}\nleft: 3'
  assert [step.done for step in steps] == [False] * 5 + [True]
  assert steps[-1].messages == () and steps[-1].reward == 1.0
  # News, a repeat, two failures, the whole progress.
  assert [step.reward for step in steps[:-1]] == pytest.approx(
    [0.01, -0.03, -0.02, -0.02, 0.15]
  )  # 0.01 + 0.15, clipped
  assert score.reward == pytest.approx(1.09)
  assert score.correct and not score.formatted
  assert score.metrics == {
    'operational': pytest.approx(-0.05),
    'progress': 1.0,
    'answered': 1.0,
    'steps': 6.0,
    'failed': 2.0,
    'unparsed': 1.0,
    'derived': 1.0,
    'guessed': 0.0,
    'pass_rate_medium': 1.0,
    'derived_medium': 1.0,
    'guessed_medium': 0.0,
  }


# A question of H2: a is the child's table, b the parent's.
@pytest.mark.parametrize(
  ('queries', 'derived'),
  [
    (['{gold}'], True),
    (['SELECT 1', '{gold}', 'SELECT COUNT(*) FROM {b}'], True),
    (['SELECT MAX(x) FROM (SELECT {a}.{column} x FROM {a}, {b})'], False),
    (['WITH x AS (SELECT * FROM {b}) SELECT {value} FROM {a}, x'], True),
    (['SELECT {value} FROM {a} WHERE id IN (SELECT id FROM {b})'], True),
    (['SELECT COUNT(*), {value} FROM {b}, {a}'], True),
    (['SELECT {value} FROM {a}', 'SELECT {value} FROM {b}'], False),
    (['SELECT 12345 FROM {a}, {b}'], False),
    (['SELECT nothing, {value} FROM {a}, {b}'], False),  # an error
    ([], False),
  ],
)
def test_a_right_answer_is_derived_from_all_tables_or_guessed(queries, derived):
  env, task = find('H2')
  gold = task.info['gold_sql']
  a, b = task.info['tables']
  column = gold.partition('.')[2].partition(')')[0]
  words = {'a': a, 'b': b, 'gold': gold, 'column': column, 'value': task.answer}
  turns = [f'QUERY {x.format(**words)}' for x in queries]
  for answer, correct in ((task.answer, True), ('no', False)):
    _, score = play(env, task, *turns, f'ANSWER {answer}')
    rates = [
      score.metrics[f'{name}_hard']
      for name in ('pass_rate', 'derived', 'guessed')
    ]
    assert rates == [correct, correct and derived, correct and not derived]


def test_an_episode_without_a_right_answer():
  env, task = find('E1', budget=2)
  assert env.make(task).grade().reward is None  # no turn: not scorable
  steps, score = play(env, task, 'ANSWER 1234')
  assert steps[0].done and score.reward == 0.0 and score.correct is False
  assert score.formatted
  steps, score = play(env, task, 'hm', 'hm')
  assert score.reward == pytest.approx(-0.02 - 0.05)
  assert score.correct is False and score.metrics['answered'] == 0.0


def test_the_oracle_is_always_correct():
  env, chosen = tasks(180)
  player = sql.oracle(schema.SqlTeacher())
  for task in chosen:
    rollout = sql.play(env, task, player)
    assert rollout.score.correct, (task.id, rollout.messages)
    steps = {'easy': 2, 'medium': 3, 'hard': 4}[task.info['difficulty']]
    assert rollout.score.metrics['steps'] == steps
    assert rollout.messages[len(task.prompt) :] == task.demonstration


@pytest.mark.parametrize(
  'option, text', [('error', 'error: no such column'), ('detour', 'result: ')]
)
def test_a_teacher_with_detours_or_errors_is_correct(option, text):
  teacher = schema.SqlTeacher(**{option: 1.0})
  _, straight = tasks(60, ('medium',))
  _, astray = tasks(60, ('medium',), teacher=teacher)
  longer = 0
  for short, long in zip(straight, astray, strict=True):
    assert long.demonstration[-1] == short.demonstration[-1]
    if len(long.demonstration) == len(short.demonstration) + 2:
      longer += text in long.demonstration[1]['content']
  assert longer > 30


def test_a_budget_too_small_for_the_teacher_gives_no_demonstration():
  _, chosen = tasks(6, budget=2)
  for task in chosen:
    assert (task.demonstration is None) == (task.info['difficulty'] != 'easy')


def test_a_hasty_teacher_answers_from_a_sample():
  """Its answer is a value of a sample, which is rarely correct."""
  _, chosen = tasks(180, ('medium',), teacher=schema.SqlTeacher(haste=1.0))
  right = 0
  for task in chosen:
    sample, shown, answer = (m['content'] for m in task.demonstration)
    assert sample == f'SAMPLE {task.info["tables"][0]}'
    assert answer.removeprefix('ANSWER ') in shown
    right += answer == f'ANSWER {task.answer}'
  assert right < 0.2 * 180
