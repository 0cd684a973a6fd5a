"""SQL exploration: a question, tables of unknown columns, a few steps.

1. The prompt holds the question, the tables' names and the budget. The names
   of the columns must be explored.
2. A turn is one action. `database` runs it, in a sandbox, and `dialogue`
   reads the turn and writes the result.
3. Every step has a reward (`functions`). ANSWER ends the episode, and
   `verifier` grades it. An episode without an answer has the rewards of its
   steps.

    user       how many dogs are there / tables: dogs, toys / left: 8
    assistant  QUERY SELECT COUNT(*) FROM dogs
    tool       result: 7 / left: 7
    assistant  ANSWER 7

Players play without a model. They are generators: observations are sent to
them, and they yield turns.

    oracle    the teacher: describes tables, runs the gold SQL, answers with its
              result; it writes the demonstrations
    chance    random actions, with tables and columns from the observations
"""

import contextlib
import dataclasses
import random
import re
from collections.abc import Callable, Generator

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import base
from posttrain.envs.sql import (
  database,
  dialogue,
  functions,
  questions,
  synth,
  verifier,
)

# (task, random numbers) -> turns: (type, argument) of actions.
Turns = Generator[tuple[str, str], str, None]
Player = Callable[[types.Task, random.Random], Turns]

# By `type` of the options `data`.
DATA = {'synth': synth.Synth, 'files': questions.Files}


class Sql(base.Env):
  """`schema.Sql`."""

  def __init__(self, name: str, cfg: schema.Sql):
    """Opens the data.

    Raises:
      ValueError: a file or database is missing, or a question is malformed.
    """
    self.name, self.cfg, self.max_turns = name, cfg, cfg.budget
    self._data = DATA[cfg.data.type](name, cfg.data, cfg.difficulties)
    self._writer = dialogue.WRITERS[cfg.style](cfg.role)

  def source(self, split: str, seed: int) -> base.Source:
    """Returns the tasks of a split; no database is in both splits."""
    data = self.cfg.data
    # Options that came later are not in the `repr`, and count if they are set:
    # sources saved before them keep their fingerprint.
    later = {
      x.name: value
      for x in dataclasses.fields(data)
      if not x.repr and (value := getattr(data, x.name)) != x.default
    }
    return sources.Shuffled(
      base.Tasks(self._data.select(split), self.task),
      seed,
      sources.fingerprint(
        f'{self.cfg!r}{later or ""}'.encode(),
        self._data.fingerprint(split).encode(),
      ),
    )

  def make(self, task: types.Task) -> 'Episode':
    """Returns an episode, which opens the task's database on its first step."""
    return Episode(task, self._data, self.cfg, self._writer)

  def task(self, question: questions.Question) -> types.Task:
    """Returns the task of a question, with a demonstration by the teacher.

    Without one if the budget leaves no step for the answer.
    """
    tables = self._data.tables(question.db_id)
    task = types.Task(
      id=question.id,
      env=self.name,
      info=dict(vars(question)),
      prompt=self._writer.prompt(question.text, tables, self.cfg.budget),
      answer=verifier.answer(question.gold_rows),
    )
    rollout = play(self, task, oracle(self.cfg.teacher))
    if rollout.stop_reason != 'env_done':
      return task
    demonstration = rollout.completion_messages
    return dataclasses.replace(task, demonstration=demonstration)


class Episode:
  """One exploration of one question."""

  def __init__(
    self,
    task: types.Task,
    data: synth.Synth | questions.Files,
    cfg: schema.Sql,
    writer: dialogue.Writer,
  ):
    """Builds an episode.

    Args:
      task: the task, with `info` as `Sql.task` writes it.
      data: opens the task's database, on the first step that needs it.
      cfg: the environment's options.
      writer: writes the dialogue.
    """
    self._task, self._data, self._cfg = task, data, cfg
    self._writer = writer
    self._database: database.Database | None = None
    self._ledger = functions.Ledger(
      cfg.reward, task.info['gold_rows'], task.info['other_golds']
    )
    self._rewards: list[float] = []  # per step
    self._num_failed = self._num_unparsed = 0
    self._results: list[database.Result] = []  # of successful queries

  def reset(self) -> types.Messages:
    return self._task.prompt

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Runs the action of a turn; a truncated turn fails without an action."""
    action = dialogue.parse(text)
    self._num_unparsed += not action.parsed
    if action.type == 'ANSWER' and not truncated:
      correct = verifier.equals_any(action.argument, self._task.info)
      self._rewards.append(self._ledger.answer(correct))
      return types.StepOut((), self._rewards[-1], done=True)
    text, failed, rows = 'the turn was too long and was cut off', True, None
    if not truncated:
      text, failed, rows = self._act(action)
    self._num_failed += failed
    self._rewards.append(self._ledger.step(action, failed, rows))
    left = self._cfg.budget - len(self._rewards)
    messages = self._writer.observe(text, action.type, left, failed=failed)
    return types.StepOut(messages, self._rewards[-1], done=False)

  def grade(self) -> types.Score:
    """Returns the sum of the steps' rewards; `correct` if the answer is.

    `formatted` if every turn was an action. An episode without a turn is not
    scorable. Metrics: the layers (`progress` is the last query's, in [0, 1]),
    the number of steps, and how many of them failed or could not be parsed;
    whether a correct answer is derived or guessed, all by difficulty as well.
    """
    if not self._rewards:
      return types.Score(reward=None)
    ledger = self._ledger
    correct = bool(ledger.correct)
    derived = correct and self._derives()
    rates = {
      'derived': float(derived),
      'guessed': float(correct and not derived),
    }
    each = {'pass_rate': float(correct), **rates}
    difficulty = self._task.info['difficulty']
    return types.Score(
      reward=sum(self._rewards),
      correct=correct,
      formatted=not self._num_unparsed,
      metrics={
        'operational': ledger.operational,
        'progress': ledger.progress,
        'answered': float(ledger.correct is not None),
        'steps': float(len(self._rewards)),
        'failed': float(self._num_failed),
        'unparsed': float(self._num_unparsed),
        **rates,
        **{f'{name}_{difficulty}': value for name, value in each.items()},
      },
    )

  def close(self) -> None:
    if self._database is not None:
      self._database.close()

  def _derives(self) -> bool:
    """Returns whether the values of a gold are in the result of a query.

    It must read every table that the gold SQL reads. A correct answer that was
    not shown so is guessed, also if it was counted or put together by reading.
    """
    info = self._task.info
    golds = [*map(functions.texts, (info['gold_rows'], *info['other_golds']))]
    return any(
      any(gold <= functions.texts(result.rows) for gold in golds)
      and self._database.query(info['gold_sql'], 1).tables <= result.tables
      for result in self._results
    )

  def _act(
    self, action: dialogue.Action
  ) -> tuple[str, bool, database.Rows | None]:
    """Runs an action; returns (text, whether it failed, rows of a query)."""
    if self._database is None:  # a waiting episode holds no file
      self._database = self._data.open(self._task.info['db_id'])
    db = self._database
    if action.type == 'QUERY':
      result = db.query(action.argument, dialogue.QUERY_ROWS)
    else:
      table = db.find(action.argument)
      if table is None:
        name, known = dialogue.cut(action.argument, 20), ', '.join(db.tables)
        return f'no such table: {name}; tables: {known}', True, None
      if action.type == 'DESCRIBE':
        return self._writer.table(db, table), False, None
      result = db.sample(table, self._writer.sample_rows)
    if result.error is not None:
      return result.error, True, None
    text = self._writer.rows(result.rows, result.more)
    if action.type != 'QUERY':
      return text, False, None
    self._results.append(result)
    return text, False, result.rows


def play(
  env: Sql, task: types.Task, player: Player, seed: int = 0
) -> types.Rollout:
  """Plays one episode to its end.

  Args:
    env: the environment.
    task: a task of it.
    player: the player.
    seed: seed of the player's random numbers, with the task's id.

  Returns:
    A rollout with messages, score and rewards per turn, without samples.
  """
  turns = player(task, random.Random(f'{seed}:{task.id}'))
  action, stop_reason, rollout_turns = next(turns), 'max_turns', []
  with contextlib.closing(env.make(task)) as episode:
    messages = list(episode.reset())
    for _ in range(env.max_turns):
      text = dialogue.write(*action, colon=env.cfg.style == 'verbose')
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
      # A value of the shown rows, of the answer's type if there is one.
      observation = yield 'SAMPLE', info['tables'][0]
      shown = (shown_result(observation) or '').removesuffix(dialogue.CUT)
      rows = dialogue.read_rows(shown)
      values = [value for row in rows for value in row if value]
      integer = info['answer_type'] == 'integer'
      fitting = [x for x in values if x.lstrip('-').isdigit() == integer]
      yield 'ANSWER', rng.choice(fitting or values or [dialogue.NULL])
      return
    if detour:
      yield rng.choice(('SAMPLE', 'DESCRIBE')), rng.choice(tables(task))
    # A column of the query, and another name of its concept.
    swaps = [
      (column, other)
      for column in dict.fromkeys(re.findall(r'\w+', sql))
      for other in synth.CONCEPTS.get(synth.CONCEPT_OF.get(column), ())
      if other != column
    ]
    if error and swaps:
      column, other = rng.choice(swaps)
      yield 'QUERY', re.sub(rf'\b{column}\b', other, sql)
    if describes:
      for table in info['tables']:
        yield 'DESCRIBE', table
    observation = yield 'QUERY', sql
    answer = shown_result(observation)
    if answer is None:
      raise ValueError(dialogue.read(observation)[1])
    if answer.endswith(dialogue.CUT):  # the result is not complete
      answer = verifier.answer(info['gold_rows'])
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


def shown_result(observation: str) -> str | None:
  """Returns the result in an observation, on one line; None for an error."""
  result, _ = dialogue.read(observation)
  return None if result is None else result.replace('\n', '; ')


def tables(task: types.Task) -> list[str]:
  """Returns the names of the tables in the prompt."""
  line = task.prompt[-1]['content'].splitlines()[-2]
  return line.partition(': ')[2].split(', ')
