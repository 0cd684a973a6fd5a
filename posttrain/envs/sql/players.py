"""Players without a model: a teacher, and baseline policies.

A player is a generator: observations are sent to it, and it yields turns.

    oracle    describes tables, runs the gold SQL, answers with its result
    chance    random actions, with tables and columns from the observations
"""

import contextlib
import random
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

from posttrain import schema, types
from posttrain.envs import base
from posttrain.envs.sql import cells, database, dialogue, verifier, words
from posttrain.util import errors

# (task, random numbers) -> turns: (type, argument) of actions.
Turns = Generator[tuple[str, str], str, None]
Player = Callable[[types.Task, random.Random], Turns]

_SIBLINGS = {
  column: columns for columns in words.CONCEPTS.values() for column in columns
}


def play(
  env: base.Env, task: types.Task, player: Player, seed: int = 0
) -> types.Rollout:
  """Plays one episode to its end.

  Args:
    env: a `Sql` environment.
    task: a task of it.
    player: the player.
    seed: seed of the player's random numbers, with the task's id.

  Returns:
    A rollout with messages, score and rewards per turn, without samples.
  """
  turns, colon = (
    player(task, random.Random(f'{seed}:{task.id}')),
    env.cfg.style == 'verbose',
  )
  action, stop_reason, rollout_turns = next(turns), 'max_turns', []
  with contextlib.closing(env.make(task)) as episode:
    messages = list(episode.reset())
    for _ in range(env.max_turns):
      text = dialogue.write(*action, colon=colon)
      out = episode.step(text, truncated=False)
      messages += [{'role': 'assistant', 'content': text}, *out.messages]
      rollout_turns.append(types.Turn(0, 0, 0, out.reward, 'eos'))
      if out.done:
        stop_reason = 'env_done'
        break
      action = turns.send(out.messages[-1]['content'])
    score = episode.grade()
  return types.Rollout(
    0, task, tuple(messages), (), score, stop_reason, turns=tuple(rollout_turns)
  )


def oracle(teacher: schema.SqlTeacher) -> Player:
  """Returns the player that writes demonstrations.

      easy     QUERY, ANSWER
      medium   DESCRIBE, QUERY, ANSWER
      hard     DESCRIBE, DESCRIBE, QUERY, ANSWER

  For questions about real databases, it describes every table that the gold SQL
  reads, at any difficulty. The generator raises ValueError if the gold SQL has
  no result.
  """

  def player(task, rng):
    info, sql = task.info, task.info['gold_sql']
    detour, error, haste = (
      rng.random() < share
      for share in (teacher.detour, teacher.error, teacher.haste)
    )
    describes = not info['template'].startswith('E')
    if haste and describes:
      observation = yield 'SAMPLE', info['tables'][0]
      answer = _shown_value(observation, info, rng)
      yield 'ANSWER', answer
      return
    if detour:
      yield rng.choice(('SAMPLE', 'DESCRIBE')), rng.choice(tables(task))
    wrong_sql = _rename_column(sql, rng) if error else None
    if wrong_sql is not None:
      yield 'QUERY', wrong_sql
    if describes:
      for table in info['tables']:
        yield 'DESCRIBE', table
    observation = yield 'QUERY', sql
    answer = shown_result(observation)
    if answer is None:
      raise ValueError(dialogue.read(observation)[1])
    if answer.endswith(cells.CUT):  # the result is not complete
      answer = verifier.answer(info['gold_rows'], info['answer_type'])
    yield 'ANSWER', answer

  return player


def chance(task: types.Task, rng: random.Random) -> Turns:
  """Plays random actions, with words of earlier results."""
  known_words = ['id', 'name', '1']
  names = tables(task)
  while True:
    kind, table = rng.choice(dialogue.TYPES), rng.choice(names)
    argument = {
      'QUERY': f'SELECT {rng.choice(known_words)} FROM {table}',
      'ANSWER': rng.choice(known_words),
    }.get(kind, table)
    observation = yield kind, argument
    known_words += re.findall(r'\w+', shown_result(observation) or '')


def demonstrate(
  env: base.Env, task: types.Task, teacher: schema.SqlTeacher
) -> types.Messages | None:
  """Returns the teacher's turns and the observations, after the prompt.

  None if the budget leaves no step for the answer.

  Raises:
    ValueError: the gold SQL does not run; names the question.
  """
  try:
    rollout = play(env, task, oracle(teacher))
  except (database.Timeout, ValueError) as error:
    raise ValueError(
      f'question {task.id} of envs.{env.name} must have a gold_sql that its '
      f'database answers: got {errors.quote(task.info["gold_sql"])}, '
      f'and: {errors.text(error)}'
    ) from error
  if rollout.stop_reason != 'env_done':
    return None
  return rollout.completion_messages


def shown_result(observation: str) -> str | None:
  """Returns the result in an observation, on one line; None for an error."""
  result, _ = dialogue.read(observation)
  return None if result is None else result.replace('\n', '; ')


def tables(task: types.Task) -> list[str]:
  """Returns the names of the tables in the prompt."""
  line = task.prompt[-1]['content'].splitlines()[-2]
  return line.partition(': ')[2].split(', ')


def _rename_column(sql: str, rng: random.Random) -> str | None:
  """Replaces a column by another name of its concept; None without concepts."""
  choices = [
    (column, other)
    for column in dict.fromkeys(re.findall(r'\w+', sql))
    for other in _SIBLINGS.get(column, ())
    if other != column
  ]
  if not choices:
    return None
  column, other = rng.choice(choices)
  return re.sub(rf'\b{column}\b', other, sql)


def _shown_value(
  observation: str, info: Mapping[str, Any], rng: random.Random
) -> str:
  """Draws a value of the shown rows, of the answer's type if there is one."""
  rows = cells.read((shown_result(observation) or '').removesuffix(cells.CUT))
  values = [value for row in rows for value in row if value]
  numbers = [value for value in values if value.lstrip('-').isdigit()]
  others = [value for value in values if value not in numbers]
  fitting = numbers if info['answer_type'] == 'integer' else others
  return rng.choice(fitting or values or [cells.NULL])
