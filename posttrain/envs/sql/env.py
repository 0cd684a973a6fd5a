"""SQL exploration: a question, tables of unknown columns, a few steps.

1. The prompt holds the question, the tables' names and the budget. The names
   of the columns must be explored.
2. A turn is one action. `database` runs it, in a sandbox, and `dialogue`
   reads the turn and writes the result.
3. Every step has a reward (`rewards`). ANSWER ends the episode, and `verifier`
   grades it. An episode without an answer has the rewards of its steps.

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
  cells,
  database,
  dialogue,
  files,
  players,
  questions,
  rewards,
  synth,
  verifier,
)

# By `type` of the options `data`.
DATA = {'synth': synth.Synth, 'files': files.Files}


class Sql(base.Env):
  """`schema.Sql`."""

  def __init__(self, name: str, cfg: schema.Sql):
    """Opens the data.

    Raises:
      ValueError: a file or database is missing, or a question is malformed.
    """
    self.name, self.cfg, self.max_turns = name, cfg, cfg.budget
    self._data = DATA[cfg.data.type](name, cfg.data, cfg.difficulties)
    self._writer = dialogue.Writer(cfg.style, cfg.role)

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns the tasks of a split; no database is in both splits.

    Raises:
      ValueError: the split has no question of these difficulties.
    """
    base.check_split(split)
    # Options that came later are not in the `repr`, and count if they are set:
    # sources saved before them keep their fingerprint.
    later = {
      field.name: getattr(self.cfg.data, field.name)
      for field in dataclasses.fields(self.cfg.data)
      if not field.repr and getattr(self.cfg.data, field.name) != field.default
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
    db_id = task.info['db_id']
    return Episode(lambda: self._data.open(db_id), task, self.cfg, self._writer)

  def task(self, question: questions.Question) -> types.Task:
    """Returns the task of a question, with a demonstration by the teacher.

    Raises:
      ValueError: the question's gold SQL does not run.
    """
    tables = self._data.tables(question.db_id)
    task = types.Task(
      id=question.id,
      env=self.name,
      info=dict(vars(question)),
      prompt=self._writer.prompt(question.text, tables, self.cfg.budget),
      answer=verifier.answer(question.gold_rows, question.answer_type),
    )
    demonstration = players.demonstrate(self, task, self.cfg.teacher)
    return dataclasses.replace(task, demonstration=demonstration)


class Episode:
  """One exploration of one question."""

  def __init__(
    self,
    open_database: Callable[[], database.Database],
    task: types.Task,
    cfg: schema.Sql,
    writer: dialogue.Writer,
  ):
    """Builds an episode.

    Args:
      open_database: opens the task's database, on the first step that needs it.
      task: the task, with `info` as `Sql.task` writes it.
      cfg: the environment's options.
      writer: writes the dialogue.
    """
    self._open_database = open_database
    self._database: database.Database | None = None
    self._task, self._cfg, self._writer = task, cfg, writer
    self._ledger = rewards.Ledger(
      cfg.reward, task.info['gold_rows'], task.info.get('other_golds', ())
    )
    self._rewards: list[float] = []  # per step
    self._num_failed = self._num_unparsed = 0

  def reset(self) -> types.Messages:
    return self._task.prompt

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Runs the action of a turn; a truncated turn fails without an action."""
    assert self._ledger.correct is None, 'the episode is over'
    assert len(self._rewards) < self._cfg.budget, 'the budget is spent'
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
    step = rewards.Step(rewards.key(action), failed, rows)
    self._rewards.append(self._ledger.step(step))
    left = self._cfg.budget - len(self._rewards)
    messages = self._writer.observe(text, action.type, left, failed=failed)
    return types.StepOut(messages, self._rewards[-1], done=False)

  def grade(self) -> types.Score:
    """Returns the sum of the steps' rewards; `correct` if the answer is.

    `formatted` if every turn was an action. An episode without a turn is not
    scorable. Metrics: the layers (`progress` is the last query's, in [0, 1]),
    the number of steps, and how many of them failed or could not be parsed.
    """
    if not self._rewards:
      return types.Score(reward=None)
    ledger = self._ledger
    correct = bool(ledger.correct)
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
        f'pass_rate_{self._task.info["difficulty"]}': float(correct),
      },
    )

  def close(self) -> None:
    if self._database is not None:
      self._database.close()

  def _act(
    self, action: dialogue.Action
  ) -> tuple[str, bool, cells.Rows | None]:
    """Runs an action; returns (text, whether it failed, rows of a query)."""
    if self._database is None:  # a waiting episode holds no file
      self._database = self._open_database()
    db = self._database
    if action.type == 'QUERY':
      result = db.query(action.argument, dialogue.QUERY_ROWS)
    else:
      table = db.find(action.argument)
      if table is None:
        name, known = cells.cut(action.argument, 20), ', '.join(db.tables)
        return f'no such table: {name}; tables: {known}', True, None
      if action.type == 'DESCRIBE':
        return self._writer.table(db, table), False, None
      result = db.sample(table, self._writer.sample_rows)
    if result.error is not None:
      return result.error, True, None
    text = self._writer.rows(result.rows, result.more)
    return text, False, result.rows if action.type == 'QUERY' else None
