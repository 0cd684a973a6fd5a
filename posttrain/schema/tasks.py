"""Options of the environments, one dataclass per type."""

import dataclasses
import datetime
import math
import re
from typing import Annotated, Any

from posttrain.schema import bounds

DIFFICULTIES = ('easy', 'medium', 'hard')
MAX_SEEDS = 1_000_000  # tasks of one split of `OpenEnv`


WebSocket = Annotated[
  str,
  'server',
  bounds.Rule(
    'be ws://HOST:PORT/ws or wss:// (over HTTP every step has a new '
    'environment)',
    lambda x: x.startswith(('ws://', 'wss://')),
  ),
]
FieldName = Annotated[str | None, bounds.Rule('name a field', bool)]
RowsFile = Annotated[
  str,
  'file',
  bounds.Rule(
    'name a file or folder, as {"type": "rows", "path": "FILE.jsonl"}, or '
    'after the name of a recipe, as grpo:DIR,FILE.jsonl,MODULE:REWARD',
    bool,
  ),
]
Time = Annotated[
  str,
  bounds.readable(
    "be 'YYYY-MM-DD HH:MM:SS', UTC",
    lambda x: datetime.datetime.strptime(
      ''.join(re.findall(r'^[\d-]{10} [\d:]{8}$', x)), '%Y-%m-%d %H:%M:%S'
    ),
  ),
]


class OpenEnv(bounds.Options):
  """An environment on an OpenEnv server, over its WebSocket."""

  # Which environment this is; fixed.
  type: str = 'openenv'
  # The server's URL: ws://HOST:PORT/ws, or wss://.
  url: WebSocket = 'ws://localhost:8000/ws'
  # System message before the first observation; '' = none.
  prompt: str = ''
  # Field of an observation that becomes the message: a string unchanged, other
  # values as JSON; None = the whole observation as JSON, without reward and
  # done.
  observation_field: FieldName = None
  # Field of an action that gets the text of a turn; None = a turn must itself
  # be an action, as a JSON object.
  action_field: FieldName = None
  # Largest number of turns in an episode.
  max_turns: bounds.Count = 10
  # Smallest reward of a correct episode; None = correctness is unknown, and
  # there is no pass rate.
  correct_at: float | None = None
  # Reward of an episode whose every action the server refused; None = such an
  # episode has no reward and is left out of its group. Set it below the worst
  # return of an episode with legal actions, or refused actions pay.
  refused_reward: Annotated[
    float | None, bounds.Rule('be finite', math.isfinite)
  ] = None
  # Number of training tasks, at most a million; task i is reset(seed=i).
  train_tasks: Annotated[int, bounds.within(1, MAX_SEEDS)] = 1000
  # Number of evaluation tasks; task i is reset(seed=1000000 + i).
  eval_tasks: Annotated[int, bounds.within(1, MAX_SEEDS)] = 100
  # Time limit for connecting, in seconds.
  connect_timeout: bounds.Seconds = 10.0
  # Time limit for the answer to one message, in seconds.
  message_timeout: bounds.Seconds = 60.0

  def __post_init__(self):
    super().__post_init__()
    if self.refused_reward is not None and self.correct_at is not None:
      bounds.require(
        self.refused_reward < self.correct_at,
        'refused_reward',
        f'be below correct_at={self.correct_at}',
        self.refused_reward,
      )


class Trl(bounds.Options):
  """A class for TRL's `environment_factory`; its methods are the tools."""

  # Which environment this is; fixed.
  type: str = 'trl'
  # Import path of the class, or of a function that returns an instance.
  factory: bounds.Function = ''
  # JSONL file of rows: `prompt` (a string or messages; missing = ''), and
  # columns that are passed to `reset`; None = empty rows.
  path: bounds.FileOrNone = None
  # JSONL file of the evaluation rows; None = no evaluation on this
  # environment, unless the rows are empty.
  eval_path: bounds.FileOrNone = None
  # Number of empty rows in the training split.
  train_tasks: bounds.Count = 1000
  # Number of empty rows in the evaluation split.
  eval_tasks: bounds.Count = 100
  # Largest number of turns in an episode.
  max_turns: bounds.Count = 10
  # Smallest reward of a correct episode; None = correctness is unknown, and
  # there is no pass rate.
  correct_at: float | None = None
  # Runs episodes in a thread pool: for thread-safe tools that wait for I/O.
  blocking: bool = False
  # How the policy writes calls: 'hermes' (also Qwen), 'llama3' or 'plain';
  # 'auto' = as the chat template does, 'plain' if it tells of no tools.
  tool_format: Annotated[
    str, bounds.one_of('auto', 'hermes', 'llama3', 'plain')
  ] = 'auto'

  def __post_init__(self):
    super().__post_init__()
    bounds.require(
      self.path is not None or self.eval_path is None,
      'eval_path',
      'be None if path is None: the rows are empty',
      self.eval_path,
    )


class Verifiers(bounds.Options):
  """A single-turn taskset of `verifiers` (v1), scored in this process."""

  # Which environment this is; fixed.
  type: str = 'verifiers'
  # Import path of the taskset's class.
  taskset: bounds.Function = ''
  # Options of the class's config.
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  # Further options for the evaluation split; {} = the first tasks of the
  # training split are held out for evaluation.
  eval_options: dict[str, Any] = dataclasses.field(default_factory=dict)
  # Largest number of training tasks.
  train_tasks: bounds.Count = 10_000
  # Largest number of evaluation tasks.
  eval_tasks: bounds.Count = 100
  # Smallest reward of a correct episode; None = correctness is unknown, and
  # there is no pass rate.
  correct_at: float | None = None
  # Scores in a thread pool: for thread-safe rewards that wait for I/O.
  blocking: bool = False


class ReasoningGym(bounds.Options):
  """A task of the package reasoning-gym, generated and scored in process."""

  # Which environment this is; fixed.
  type: str = 'reasoning_gym'
  # The task's name, as 'leg_counting'.
  dataset: str = 'leg_counting'
  # Options of the task's config.
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  # Text of the prompt after the question; '' = none.
  instruction: str = 'Give the answer in <answer> </answer> tags.'
  # Number of tasks that are generated for training; repeated questions, and
  # those of evaluation, are left out.
  train_tasks: bounds.Count = 8000
  # Number of tasks in the evaluation split.
  eval_tasks: bounds.Count = 500


class SqlSynth(bounds.Options):
  """Generated databases, each with questions of every difficulty."""

  # Which data source this is; fixed.
  type: str = 'synth'
  # Number of databases in the training split, at most a million.
  train_databases: Annotated[int, bounds.within(1, 1_000_000)] = 3000
  # Number of databases in the evaluation split, none in training; 0 = no
  # evaluation on this environment.
  eval_databases: Annotated[int, bounds.within(0, 1_000_000)] = 200
  # Evaluation databases: 'eval' (new databases with the vocabulary of
  # training), or 'ood' (tables and names that are not in training).
  eval_split: Annotated[str, bounds.one_of('eval', 'ood')] = 'eval'


class SqlFiles(bounds.Options):
  """Questions in a file, about SQLite databases in a folder."""

  # Which data source this is; fixed.
  type: str = 'files'
  # Path of a JSON list, or JSONL, of objects with `id`, `question`, `db_id`,
  # `tables`, `gold_sql`, `gold_answer` (rows), `answer_type`, `difficulty`;
  # `gold_answers`, a list, instead of `gold_answer`: any of them is correct.
  questions: bounds.File = ''
  # Folder with the databases, `<db_id>/<db_id>.sqlite`.
  databases: bounds.File = ''
  # Fraction of the databases that is held out for evaluation; 0 = no
  # evaluation.
  eval_share: bounds.Fraction = 0.3
  # Largest number of instructions of SQLite's virtual machine per query.
  query_steps: bounds.Count = 1_000_000
  # repr=False: options added later; envs/sql adds them to the tasks'
  # fingerprint unless they have their defaults.

  # Grades the order of rows where the gold SQL has ORDER BY; rows with equal
  # keys may come in any order. A question's own `ordered` goes before it.
  ordered: bool = dataclasses.field(default=False, repr=False)
  # Time of `date('now')` and CURRENT_TIMESTAMP in queries, UTC.
  now: Time = dataclasses.field(default='2025-01-01 00:00:00', repr=False)
  # Leaves out questions that are malformed, or whose gold SQL the sandbox
  # refuses, and logs them; False = they are an error, which lists all.
  skip_refused: bool = dataclasses.field(default=False, repr=False)


SqlData = SqlSynth | SqlFiles


class SqlReward(bounds.Options):
  """The reward of an episode: the sum of three terms."""

  # 'v2' (every step has a cost; lost progress is subtracted), 'v1' (the shaping
  # terms are capped; only a new maximum of progress is rewarded), or 'binary'
  # (only the answer is rewarded).
  version: Annotated[str, bounds.one_of('v1', 'v2', 'binary')] = 'v2'
  # Weight of the term for steps that succeed, are new, or repeat.
  operational: bounds.NonNegative = 1.0
  # Weight of the term for results that approach the gold answer.
  progress: bounds.NonNegative = 1.0
  # Weight of the term for the answer.
  correctness: bounds.NonNegative = 1.0


class SqlTeacher(bounds.Options):
  """Deviations of the demonstrations from the shortest solution."""

  # Fraction of demonstrations with a useless step: another table, or a sample.
  detour: bounds.Share = 0.0
  # Fraction of demonstrations that query a missing column, read the error, and
  # then describe the table.
  error: bounds.Share = 0.0
  # Fraction of demonstrations of medium and hard questions that read only a
  # sample of rows, and answer with a value from it.
  haste: bounds.Share = 0.0


class Sql(bounds.Options):
  """A question about a database, explored step by step."""

  # Which environment this is; fixed.
  type: str = 'sql'
  # Source of questions and databases: 'synth' or 'files'. Another type replaces
  # the node.
  data: SqlData = SqlSynth()
  # Difficulties of the questions: 'easy', 'medium', 'hard'.
  difficulties: Annotated[tuple[str, ...], bounds.some_of(*DIFFICULTIES)] = (
    'easy',
    'medium',
  )
  # Largest number of steps (DESCRIBE, SAMPLE, QUERY, ANSWER) in an episode, the
  # answer included.
  budget: Annotated[int, bounds.within(1, 100)] = 8
  # Style of the messages: 'compact' (a few tokens, for small models), or
  # 'verbose' (a system prompt with the rules, for language models).
  style: Annotated[str, bounds.one_of('compact', 'verbose')] = 'compact'
  # Role of the observations: 'tool', or 'user' for chat templates without
  # tools.
  role: Annotated[str, bounds.one_of('tool', 'user')] = 'tool'
  # Reward of an episode.
  reward: SqlReward = SqlReward()
  # Demonstrations.
  teacher: SqlTeacher = SqlTeacher()


class Arithmetic(bounds.Options):
  """`What is A op B?`, answered with `\\boxed{N}`."""

  # Which environment this is; fixed.
  type: str = 'arithmetic'
  # Operators of the questions: '+', '-', 'x'.
  ops: Annotated[tuple[str, ...], bounds.some_of('+', '-', 'x')] = ('+', '-')
  # Smallest operand of + and -.
  min_operand: int = 0
  # Largest operand of + and -, at most 999.
  max_operand: Annotated[int, bounds.within(1, 999)] = 99
  # Smallest factor of x.
  min_factor: int = 0
  # Largest factor of x, at most 99.
  max_factor: Annotated[int, bounds.within(1, 99)] = 9
  # Demonstrations have the intermediate steps (tens, then units) before the
  # boxed answer.
  worked: bool = True
  # Fraction of the demonstrations with a wrong step and so a wrong answer.
  # Grading uses the correct answer.
  mistakes: bounds.Share = 0.0
  # System message before the question, which must contain {demonstration}, as
  # the hint of opsd does; '' = none.
  hint: Annotated[
    str,
    bounds.Rule(
      "be '' or hold {demonstration} once",
      lambda x: x.count('{demonstration}') == bool(x),
    ),
  ] = ''
  # Number of distinct questions in the training split.
  train_tasks: bounds.Count = 8000
  # Number of distinct questions in the evaluation split, none in training.
  eval_tasks: bounds.Count = 500

  def __post_init__(self):
    super().__post_init__()
    for name in ('operand', 'factor'):
      smallest = getattr(self, f'min_{name}')
      largest = getattr(self, f'max_{name}')
      bounds.require(
        0 <= smallest <= largest,
        f'min_{name}',
        f'be in [0, max_{name}={largest}]',
        smallest,
      )


class Gsm8k(bounds.Options):
  """Word problems of GSM8K, or of a file in its format; graded by number."""

  # Which environment this is; fixed.
  type: str = 'gsm8k'
  # JSONL file of `question` and `answer`; the answer ends in a line `#### N`.
  path: bounds.File = ''
  # JSONL file of the evaluation split; None = no evaluation on this
  # environment.
  eval_path: bounds.FileOrNone = None
  # Text of the prompt after the question; '' = none.
  instruction: str = (
    'Reason step by step, and put the final answer in \\boxed{}.'
  )
  # Without a box and `#### N`, reads the last result in the text as the
  # answer, unless the turn was truncated; False = no answer then.
  lenient: bool = True


class Rows(bounds.Options):
  """Rows of a file: `prompt`, with `completion`; or `messages`. Not graded."""

  # Which environment this is; fixed.
  type: str = 'rows'
  # File of rows (.jsonl, .parquet, .arrow, .csv); or a TFDS data set in
  # ArrayRecord, its folder or tfds:NAME[/CONFIG][:VERSION][:SPLIT].
  path: RowsFile = ''
  # The data set of the evaluation split, as path; None = as eval_fraction says.
  eval_path: bounds.FileOrNone = None
  # Columns with other names: column -> 'prompt', 'completion', 'messages', or
  # any other name; {"question": "prompt", "solution": "completion"}.
  columns: dict[str, str] = dataclasses.field(default_factory=dict)
  # Fraction of the prompts of `path` that is held out for evaluation, by their
  # hash, one prompt at least; 0 = no evaluation on this environment.
  eval_fraction: bounds.Fraction = 0.0

  def __post_init__(self):
    super().__post_init__()
    bounds.require(
      self.eval_path is None or not self.eval_fraction,
      'eval_fraction',
      'be 0 with an eval_path',
      self.eval_fraction,
    )


class ReverseText(bounds.Options):
  """`Reverse: abcd`, answered with `dcba`."""

  # Which environment this is; fixed.
  type: str = 'reverse_text'
  # Length of the shortest text, in letters.
  min_length: int = 3
  # Length of the longest text, in letters, at most 64.
  max_length: Annotated[int, bounds.within(1, 64)] = 8
  # Letters of the texts: lower case, each once.
  alphabet: Annotated[str, bounds.some_of(*'abcdefghijklmnopqrstuvwxyz')] = (
    'abcdefghijklmnopqrstuvwxyz'
  )
  # Number of distinct texts in the training split.
  train_tasks: bounds.Count = 8000
  # Number of distinct texts in the evaluation split, none in training.
  eval_tasks: bounds.Count = 500

  def __post_init__(self):
    super().__post_init__()
    bounds.require(
      1 <= self.min_length <= self.max_length,
      'min_length',
      f'be in [1, max_length={self.max_length}]',
      self.min_length,
    )


class AlphabetSort(bounds.Options):
  """Names to sort, with further names every turn."""

  # Which environment this is; fixed.
  type: str = 'alphabet_sort'
  # Number of turns in an episode: 2 or 3.
  turns: Annotated[int, bounds.one_of(2, 3)] = 2
  # Number of names in the first turn.
  first: bounds.Count = 3
  # Number of names that each later turn adds.
  more: bounds.Count = 2
  # Role of the environment's messages between turns: 'user' or 'tool'.
  role: Annotated[str, bounds.one_of('user', 'tool')] = 'user'
  # Number of tasks in the training split, with distinct first names.
  train_tasks: bounds.Count = 8000
  # Number of tasks in the evaluation split; their first names are not in
  # training.
  eval_tasks: bounds.Count = 500


class Countdown(bounds.Options):
  """An expression of given numbers, from 1 to 99, that equals a target."""

  # Which environment this is; fixed.
  type: str = 'countdown'
  # How many numbers a task has; all are equally frequent.
  sizes: Annotated[tuple[int, ...], bounds.some_of(2, 3, 4, 5, 6)] = (3, 4)
  # Largest target; the smallest is 1.
  max_target: Annotated[int, bounds.within(99, 10_000)] = 100
  # The prompt, with {numbers} and {target}.
  prompt: Annotated[
    str,
    bounds.Rule(
      'hold {numbers} and {target}, each once',
      lambda x: x.count('{numbers}') == x.count('{target}') == 1,
    ),
  ] = (
    'Use each of the numbers {numbers} once, with + - * / and parentheses, to '
    'write an expression that equals {target}. Put it in \\boxed{}.'
  )
  # Demonstrations have the values of the expression's parts before it.
  worked: bool = True
  # Number of distinct multisets of numbers in the training split.
  train_tasks: bounds.Count = 20_000
  # Number of multisets in the evaluation split, none in training.
  eval_tasks: bounds.Count = 1000


class Wordle(bounds.Options):
  """A secret word of five letters, guessed turn by turn."""

  # Which environment this is; fixed.
  type: str = 'wordle'
  # File of words between white space, of which those of five letters are used;
  # None = 679 common words.
  path: bounds.FileOrNone = None
  # Largest number of guesses.
  guesses: Annotated[int, bounds.within(1, 20)] = 6
  # Style of the messages: 'compact' (`cXrYaGnXeX`, for small models), or
  # 'verbose' (the rules, and marks below letters, for language models).
  style: Annotated[str, bounds.one_of('compact', 'verbose')] = 'verbose'
  # 'solved' (1 for the secret, else 0), or 'published' (verifiers: 1 and 1 /
  # guesses for the secret, else 0.2 per G and 0.1 per Y of the last guess; 0.2
  # if every guess can be read).
  reward: Annotated[str, bounds.one_of('solved', 'published')] = 'solved'
  # Number of games in the training split; their secrets repeat.
  train_tasks: bounds.Count = 8000
  # Number of games in the evaluation split, each with a secret of its own.
  eval_tasks: bounds.Count = 100


class CustomEnv(bounds.Options):
  """An environment of yours: a class by import path, see `envs.registry`."""

  # Which environment this is; fixed.
  type: str = 'custom'
  # 'package.module:Class', built as Class(name, **kwargs).
  import_path: bounds.Function = ''
  # Keyword arguments of the class.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


Env = (
  Arithmetic
  | ReverseText
  | AlphabetSort
  | Countdown
  | Wordle
  | Gsm8k
  | Rows
  | Sql
  | OpenEnv
  | Trl
  | Verifiers
  | ReasoningGym
  | CustomEnv
)
