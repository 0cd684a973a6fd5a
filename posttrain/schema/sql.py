"""Options of the SQL exploration environment."""

import dataclasses

from posttrain.schema import base

DIFFICULTIES = ('easy', 'medium', 'hard')


@dataclasses.dataclass(frozen=True)
class SqlSynth:
  """Generated databases, each with questions of every difficulty."""

  # Which data these are; fixed.
  type: str = 'synth'
  # Databases of the training split, at most a million.
  train_databases: int = 3000
  # Databases of the evaluation split, none of which is trained on; 0 = no
  # evaluation on this environment.
  eval_databases: int = 200
  # What evaluation asks about: 'eval' (new databases of known words), or 'ood'
  # (tables and names that no training database has).
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
  """Questions of a file, about SQLite databases of a folder."""

  # Which data these are; fixed.
  type: str = 'files'
  # A JSON list, or JSONL, of objects with `id`, `question`, `db_id`, `tables`,
  # `gold_sql`, `gold_answer` (rows), `answer_type`, `difficulty`.
  questions: str = ''
  # The folder of `<db_id>/<db_id>.sqlite`.
  databases: str = ''
  # Share of the databases that are kept for evaluation; 0 = no evaluation.
  eval_share: float = 0.3
  # Instructions of SQLite's virtual machine that a query may take.
  query_steps: int = 1_000_000

  def __post_init__(self):
    for field in ('questions', 'databases'):
      base.require(
        bool(getattr(self, field)), field, 'name a path', getattr(self, field)
      )
    base.require(
      0 <= self.eval_share < 1, 'eval_share', 'be in [0, 1)', self.eval_share
    )
    base.require_positive(self, 'query_steps')


SqlData = SqlSynth | SqlFiles


@dataclasses.dataclass(frozen=True)
class SqlReward:
  """What an episode is worth, in three layers."""

  # 'v2' (every step costs; progress may be lost again), 'v1' (caps on what
  # shaping earns; progress only pays when it is a record), or 'binary' (only
  # the answer counts).
  version: str = 'v2'
  # Weight of the layer of steps that work, are new, or repeat.
  operational: float = 1.0
  # Weight of the layer of results that come nearer to the gold answer.
  progress: float = 1.0
  # Weight of the layer of the answer.
  correctness: float = 1.0

  def __post_init__(self):
    base.require_choice(self, 'version', ('v1', 'v2', 'binary'))
    base.require_non_negative(self, 'operational', 'progress', 'correctness')


@dataclasses.dataclass(frozen=True)
class SqlTeacher:
  """How demonstrations differ from the shortest right way."""

  # Share of them with a step that does not help: another table, or a sample.
  detour: float = 0.0
  # Share of them that ask for a column that is not there, read the error, and
  # look first then.
  error: float = 0.0
  # Share of them, of medium and hard questions, that look at a sample of rows
  # alone, and answer with a value that they saw there.
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
  # Where questions and databases come from. Another type replaces the node.
  data: SqlData = SqlSynth()
  # Only questions of these: 'easy', 'medium', 'hard'.
  difficulties: tuple[str, ...] = ('easy', 'medium')
  # Steps of an episode, the answer included: DESCRIBE, SAMPLE, QUERY, ANSWER.
  budget: int = 8
  # How things are said: 'compact' (a few tokens, for small models), or
  # 'verbose' (a system prompt with the rules, for language models).
  style: str = 'compact'
  # Whose words observations are: 'tool', or 'user' for chat templates that
  # know no tools.
  role: str = 'tool'
  # What an episode is worth.
  reward: SqlReward = SqlReward()
  # How demonstrations are played.
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
