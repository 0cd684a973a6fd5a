"""Players that need no model: a teacher, and policies to compare with.

A player is a generator: it is sent what the environment said, and yields what
it says next.

    oracle    describes, queries by the gold SQL, answers what the result says
    chance    any action, of tables and columns that it has seen
    farmer    explores for ever, for the rewards of exploring; never answers
"""

import contextlib
import random
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

from posttrain import schema, types
from posttrain.envs import base
from posttrain.envs.sql import (
  actions,
  cells,
  database,
  observations,
  verifier,
  words,
)

# (task, says a colon, random numbers) -> its turns.
Turns = Generator[str, str, None]
Player = Callable[[types.Task, bool, random.Random], Turns]

_SIBLINGS = {
  column: columns for columns in words.CONCEPTS.values() for column in columns
}


def play(
  env: base.Env, task: types.Task, player: Player, seed: int = 0
) -> types.Rollout:
  """Plays one episode to its end.

  Args:
    env: a `Sql` environment.
    task: of it.
    player: who plays.
    seed: of the player, beside the task's id.

  Returns:
    Its messages, score and rewards per turn; no samples, for nobody sampled a
    token.
  """
  turns = player(
    task, env.cfg.style == 'verbose', random.Random(f'{seed}:{task.id}')
  )
  said, stop_reason, taken = next(turns), 'max_turns', []
  with contextlib.closing(env.make(task)) as episode:
    messages = list(episode.reset())
    for _ in range(env.max_turns):
      out = episode.step(said, truncated=False)
      messages += [{'role': 'assistant', 'content': said}, *out.messages]
      taken.append(types.Turn(0, 0, 0, out.reward, 'eos'))
      if out.done:
        stop_reason = 'env_done'
        break
      said = turns.send(out.messages[-1]['content'])
    score = episode.grade()
  return types.Rollout(
    0, task, tuple(messages), (), score, stop_reason, turns=tuple(taken)
  )


def oracle(teacher: schema.SqlTeacher) -> Player:
  """Returns the player of demonstrations.

      easy     QUERY, ANSWER
      medium   DESCRIBE, QUERY, ANSWER
      hard     DESCRIBE, DESCRIBE, QUERY, ANSWER

  Where questions come with real databases, every table that the gold SQL
  reads is described first, whatever the difficulty. Its turns raise ValueError
  where the gold SQL has no result.
  """

  def player(task, colon, rng):
    info, sql = task.info, task.info['gold_sql']
    detour, error, haste = (
      rng.random() < share
      for share in (teacher.detour, teacher.error, teacher.haste)
    )
    looks = not info['template'].startswith('E')
    if haste and looks:
      shown = yield actions.write('SAMPLE', info['tables'][0], colon=colon)
      yield actions.write('ANSWER', _seen(shown, info, rng), colon=colon)
      return
    if detour:
      yield actions.write(
        rng.choice(('SAMPLE', 'DESCRIBE')),
        rng.choice(_tables(task)),
        colon=colon,
      )
    guessed = _guessed(sql, rng) if error else None
    if guessed is not None:
      yield actions.write('QUERY', guessed, colon=colon)
    if looks:
      for table in info['tables']:
        yield actions.write('DESCRIBE', table, colon=colon)
    shown = yield actions.write('QUERY', sql, colon=colon)
    answer = shown_result(shown)
    if answer is None:
      raise ValueError(observations.read(shown)[1])
    if answer.endswith(cells.CUT):  # does not say all of it
      answer = verifier.answer(info['gold_rows'], info['answer_type'])
    yield actions.write('ANSWER', answer, colon=colon)

  return player


def chance(task: types.Task, colon: bool, rng: random.Random) -> Turns:
  """Acts at random, with words that it has seen."""
  seen = ['id', 'name', '1']
  tables = _tables(task)
  while True:
    kind, table = rng.choice(actions.TYPES), rng.choice(tables)
    said = {
      'QUERY': f'SELECT {rng.choice(seen)} FROM {table}',
      'ANSWER': rng.choice(seen),
    }.get(kind, table)
    heard = yield actions.write(kind, said, colon=colon)
    seen += re.findall(r'\w+', shown_result(heard) or '')


def farmer(task: types.Task, colon: bool, rng: random.Random) -> Turns:
  """Earns what there is to earn without an answer."""
  del rng
  while True:
    for table in _tables(task):
      for kind, argument in (
        ('DESCRIBE', table),
        ('SAMPLE', table),
        ('QUERY', f'SELECT * FROM {table}'),
        ('QUERY', f'SELECT COUNT(*) FROM {table}'),
      ):
        yield actions.write(kind, argument, colon=colon)


def demonstrate(
  env: base.Env, task: types.Task, teacher: schema.SqlTeacher
) -> types.Messages | None:
  """Returns what a teacher says, and hears, behind the prompt.

  None where the budget leaves no step for the answer.

  Raises:
    ValueError: the gold SQL does not run; names the question.
  """
  try:
    rollout = play(env, task, oracle(teacher))
  except (database.Timeout, ValueError) as error:
    raise ValueError(
      f'question {task.id} of envs.{env.name} must have a gold_sql that its '
      f'database answers: got {task.info["gold_sql"]!r}, and: {error}'
    ) from error
  if rollout.stop_reason != 'env_done':
    return None
  return rollout.completion_messages


def shown_result(said: str) -> str | None:
  """Returns the result in an observation, on one line; None for an error."""
  result, _ = observations.read(said)
  return None if result is None else result.replace('\n', '; ')


def _tables(task: types.Task) -> list[str]:
  """The tables that the prompt names."""
  line = task.prompt[-1]['content'].splitlines()[-2]
  return line.partition(': ')[2].split(', ')


def _guessed(sql: str, rng: random.Random) -> str | None:
  """Calls a column what its concept may also be called; None if none may."""
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


def _seen(said: str, info: Mapping[str, Any], rng: random.Random) -> str:
  """A value that a sample of rows shows, of the kind that is asked for."""
  rows = cells.read((shown_result(said) or '').removesuffix(cells.CUT))
  values = [value for row in rows for value in row if value]
  numbers = [value for value in values if value.lstrip('-').isdigit()]
  others = [value for value in values if value not in numbers]
  wanted = numbers if info['answer_type'] == 'integer' else others
  return rng.choice(wanted or values or [cells.NULL])
