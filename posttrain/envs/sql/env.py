"""SQL exploration: a question, tables of unknown columns, a few steps.

1. `reset` tells the question, the tables' names and the budget; what their
   columns are called must be found out.
2. A turn is one action (`actions`); `database` runs it, where nothing that a
   model writes can do harm, and `observations` says what came of it.
3. Every step has a reward (`rewards`); ANSWER ends the episode, and `verifier`
   grades it. A budget without an answer is worth what its steps were.

    user       how many dogs are there / tables: dogs, toys / left: 8
    assistant  QUERY SELECT COUNT(*) FROM dogs
    tool       result: 7 / left: 7
    assistant  ANSWER 7
"""

import dataclasses
from collections.abc import Callable

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import base
from posttrain.envs.sql import (
  actions,
  cells,
  database,
  files,
  generated,
  observations,
  players,
  record,
  rewards,
  verifier,
)

# By `type` of the options `data`.
DATA = {'synth': generated.Generated, 'files': files.Files}
_NAME = 20  # characters of a name that is no table's, in the error


class Sql(base.Env):
  """`schema.Sql`."""

  def __init__(self, name: str, cfg: schema.Sql):
    """Finds the data.

    Raises:
      ValueError: a file or database is missing, or a question is malformed.
    """
    self.name, self.cfg, self.max_turns = name, cfg, cfg.budget
    self._data = DATA[cfg.data.type](name, cfg.data, cfg.difficulties)
    self._says = observations.Observations(cfg.style, cfg.role)

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns a split's questions; no database is in both splits.

    Raises:
      ValueError: a split has no question of these difficulties.
    """
    base.check_split(split)
    questions = self._data.questions(split)
    return sources.Shuffled(
      base.Tasks(questions, self.task),
      seed,
      sources.fingerprint(
        repr(self.cfg).encode(), self._data.fingerprint(split).encode()
      ),
    )

  def make(self, task: types.Task) -> 'Episode':
    """Returns an episode, which opens the task's database when it acts."""
    db_id = task.info['db_id']
    return Episode(lambda: self._data.open(db_id), task, self.cfg, self._says)

  def task(self, question: record.Question) -> types.Task:
    """Returns the task of a question, with how a teacher explores it.

    Raises:
      ValueError: the question's gold SQL does not run.
    """
    tables = self._data.tables(question.db_id)
    task = types.Task(
      id=question.id,
      env=self.name,
      info=dict(vars(question)),
      prompt=self._says.prompt(question.text, tables, self.cfg.budget),
      answer=verifier.answer(question.gold_rows, question.answer_type),
    )
    said = players.demonstrate(self, task, self.cfg.teacher)
    return dataclasses.replace(task, demonstration=said)


class Episode:
  """One question, explored."""

  def __init__(
    self,
    connect: Callable[[], database.Database],
    task: types.Task,
    cfg: schema.Sql,
    says: observations.Observations,
  ):
    """Args: connect: opens the database; says: writes observations."""
    self._connect, self._opened = connect, None
    self._task, self._cfg, self._says = task, cfg, says
    self._ledger = rewards.Ledger(cfg.reward, task.info['gold_rows'])
    self._taken: list[float] = []  # reward per step
    self._failed = self._unparsed = 0

  def reset(self) -> types.Messages:
    return self._task.prompt

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Does what a turn says; one that was cut off does nothing."""
    assert self._ledger.correct is None, 'the episode is over'
    assert self._left > 0, 'the budget is spent'
    action = actions.parse(text)
    self._unparsed += not action.parsed
    if action.type == 'ANSWER' and not truncated:
      self._taken.append(
        self._ledger.answer(
          verifier.correct(
            action.argument,
            self._task.info['gold_rows'],
            self._task.info['answer_type'],
          )
        )
      )
      return types.StepOut((), self._taken[-1], done=True)
    shown, error, rows = None, 'the turn was too long and was cut off', None
    if not truncated:
      shown, error, rows = self._act(action)
    self._failed += error is not None
    move = rewards.Move(rewards.key(action), error is not None, rows)
    self._taken.append(self._ledger.step(move))
    said = (
      self._says.result(shown, action.type, self._left)
      if error is None
      else self._says.error(error, action.type, self._left)
    )
    return types.StepOut(said, self._taken[-1], done=False)

  def grade(self) -> types.Score:
    """Returns the sum of the steps' rewards; correct if answered so.

    `formatted` if every turn was an action; an episode without a turn is not
    scorable. Metrics: the layers (`progress` is the last query's, in [0, 1]),
    steps, and how many of them failed or were no action.
    """
    if not self._taken:
      return types.Score(reward=None)
    ledger = self._ledger
    correct = bool(ledger.correct)
    return types.Score(
      reward=sum(self._taken),
      correct=correct,
      formatted=not self._unparsed,
      metrics={
        'operational': ledger.operational,
        'progress': ledger.nearest,
        'answered': float(ledger.correct is not None),
        'steps': float(len(self._taken)),
        'failed': float(self._failed),
        'unparsed': float(self._unparsed),
        f'pass_rate_{self._task.info["difficulty"]}': float(correct),
      },
    )

  def close(self) -> None:
    if self._opened is not None:
      self._opened.close()

  @property
  def _db(self) -> database.Database:
    """The database; an episode that waits for its turn holds no file."""
    if self._opened is None:
      self._opened = self._connect()
    return self._opened

  @property
  def _left(self) -> int:
    return self._cfg.budget - len(self._taken)

  def _act(
    self, action: actions.Action
  ) -> tuple[str | None, str | None, record.Rows | None]:
    """Runs an action: what it shows, or what was wrong; rows of a query."""
    if action.type == 'QUERY':
      return self._show(
        self._db.query(action.argument, observations.QUERY_ROWS), True
      )
    table = self._db.find(action.argument)
    if table is None:
      name = cells.cut(action.argument, _NAME)
      known = ', '.join(self._db.tables)
      return None, f'no such table: {name}; tables: {known}', None
    if action.type == 'DESCRIBE':
      return self._says.table(self._db, table), None, None
    return self._show(self._db.sample(table, self._says.sample_rows), False)

  def _show(self, result: database.Result, graded: bool):
    if result.error is not None:
      return None, result.error, None
    text = self._says.rows(result.rows, result.more)
    return text, None, result.rows if graded else None
