"""Options of the SQL exploration environment."""

import dataclasses
import datetime

from posttrain.schema import base

DIFFICULTIES = ('easy', 'medium', 'hard')
_TIME = '%Y-%m-%d %H:%M:%S'


@dataclasses.dataclass(frozen=True)
class SqlSynth:
  """Generated databases, each with questions of every difficulty."""

  # Which data source this is; fixed.
  type: str = 'synth'
  # Number of databases in the training split, at most a million.
  train_databases: int = 3000
  # Number of databases in the evaluation split, none in training; 0 = no
  # evaluation on this environment.
  eval_databases: int = 200
  # Evaluation databases: 'eval' (new databases with the vocabulary of
  # training), or 'ood' (tables and names that are not in training).
  eval_split: str = 'eval'

  def __post_init__(self):
    base.require_positive(self, 'train_databases')
    base.require_non_negative(self, 'eval_databases')
    for field in ('train_databases', 'eval_databases'):
      count = getattr(self, field)
      base.require(count <= 1_000_000, field, 'be <= 1000000', count)
    base.require_choice(self, 'eval_split', ('eval', 'ood'))


@dataclasses.dataclass(frozen=True)
class SqlFiles:
  """Questions in a file, about SQLite databases in a folder."""

  # Which data source this is; fixed.
  type: str = 'files'
  # Path of a JSON list, or JSONL, of objects with `id`, `question`, `db_id`,
  # `tables`, `gold_sql`, `gold_answer` (rows), `answer_type`, `difficulty`;
  # `gold_answers`, a list, instead of `gold_answer`: any of them is correct.
  questions: base.File = ''
  # Folder with the databases, `<db_id>/<db_id>.sqlite`.
  databases: base.File = ''
  # Fraction of the databases that is held out for evaluation; 0 = no
  # evaluation.
  eval_share: float = 0.3
  # Largest number of instructions of SQLite's virtual machine per query.
  query_steps: int = 1_000_000
  # repr=False: options added later; envs/sql/env.py adds them to the tasks'
  # fingerprint unless they have their defaults.

  # Grades the order of rows where the gold SQL has ORDER BY; rows with equal
  # keys may come in any order. A question's own `ordered` goes before it.
  ordered: bool = dataclasses.field(default=False, repr=False)
  # Time of `date('now')` and CURRENT_TIMESTAMP in queries, UTC.
  now: str = dataclasses.field(default='2025-01-01 00:00:00', repr=False)
  # Leaves out questions that are malformed, or whose gold SQL the sandbox
  # refuses, and logs them; False = they are an error, which lists all.
  skip_refused: bool = dataclasses.field(default=False, repr=False)

  def __post_init__(self):
    for field in ('questions', 'databases'):
      base.require(
        bool(getattr(self, field)), field, 'name a path', getattr(self, field)
      )
    base.require(
      0 <= self.eval_share < 1, 'eval_share', 'be in [0, 1)', self.eval_share
    )
    base.require_positive(self, 'query_steps')
    base.require(
      _is_time(self.now), 'now', "be 'YYYY-MM-DD HH:MM:SS', UTC", self.now
    )


SqlData = SqlSynth | SqlFiles


@dataclasses.dataclass(frozen=True)
class SqlReward:
  """The reward of an episode: the sum of three terms."""

  # 'v2' (every step has a cost; lost progress is subtracted), 'v1' (the shaping
  # terms are capped; only a new maximum of progress is rewarded), or 'binary'
  # (only the answer is rewarded).
  version: str = 'v2'
  # Weight of the term for steps that succeed, are new, or repeat.
  operational: float = 1.0
  # Weight of the term for results that approach the gold answer.
  progress: float = 1.0
  # Weight of the term for the answer.
  correctness: float = 1.0

  def __post_init__(self):
    base.require_choice(self, 'version', ('v1', 'v2', 'binary'))
    base.require_non_negative(self, 'operational', 'progress', 'correctness')


@dataclasses.dataclass(frozen=True)
class SqlTeacher:
  """Deviations of the demonstrations from the shortest solution."""

  # Fraction of demonstrations with a useless step: another table, or a sample.
  detour: float = 0.0
  # Fraction of demonstrations that query a missing column, read the error, and
  # then describe the table.
  error: float = 0.0
  # Fraction of demonstrations of medium and hard questions that read only a
  # sample of rows, and answer with a value from it.
  haste: float = 0.0

  def __post_init__(self):
    for field in ('detour', 'error', 'haste'):
      value = getattr(self, field)
      base.require(0 <= value <= 1, field, 'be in [0, 1]', value)


@dataclasses.dataclass(frozen=True)
class Sql:
  """A question about a database, explored step by step."""

  # Which environment this is; fixed.
  type: str = 'sql'
  # Source of questions and databases: 'synth' or 'files'. Another type replaces
  # the node.
  data: SqlData = SqlSynth()
  # Difficulties of the questions: 'easy', 'medium', 'hard'.
  difficulties: tuple[str, ...] = ('easy', 'medium')
  # Largest number of steps (DESCRIBE, SAMPLE, QUERY, ANSWER) in an episode, the
  # answer included.
  budget: int = 8
  # Style of the messages: 'compact' (a few tokens, for small models), or
  # 'verbose' (a system prompt with the rules, for language models).
  style: str = 'compact'
  # Role of the observations: 'tool', or 'user' for chat templates without
  # tools.
  role: str = 'tool'
  # Reward of an episode.
  reward: SqlReward = SqlReward()
  # Demonstrations.
  teacher: SqlTeacher = SqlTeacher()

  def __post_init__(self):
    base.require(
      bool(self.difficulties)
      and set(self.difficulties) <= set(DIFFICULTIES)
      and len(set(self.difficulties)) == len(self.difficulties),
      'difficulties',
      f'hold some of {DIFFICULTIES}, each once',
      self.difficulties,
    )
    base.require(
      1 <= self.budget <= 100, 'budget', 'be in [1, 100]', self.budget
    )
    base.require_choice(self, 'style', ('compact', 'verbose'))
    base.require_choice(self, 'role', ('tool', 'user'))


def _is_time(text: str) -> bool:
  try:
    time = datetime.datetime.strptime(text, _TIME)
  except ValueError:
    return False
  return time.strftime(_TIME) == text  # with all zeros
