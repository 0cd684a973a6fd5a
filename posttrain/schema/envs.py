"""Options of the environments, one dataclass per type."""

import dataclasses
from typing import Any

from posttrain.schema import adapters, base, sql


@dataclasses.dataclass(frozen=True)
class Arithmetic:
  """`What is A op B?`, answered with `\\boxed{N}`."""

  # Which environment this is; fixed.
  type: str = 'arithmetic'
  # Operators of the questions: '+', '-', 'x'.
  ops: tuple[str, ...] = ('+', '-')
  # Smallest operand of + and -.
  min_operand: int = 0
  # Largest operand of + and -, at most 999.
  max_operand: int = 99
  # Smallest factor of x.
  min_factor: int = 0
  # Largest factor of x, at most 99.
  max_factor: int = 9
  # Demonstrations have the intermediate steps (tens, then units) before the
  # boxed answer.
  worked: bool = True
  # Fraction of the demonstrations with a wrong step and so a wrong answer.
  # Grading uses the correct answer.
  mistakes: float = 0.0
  # System message before the question, which must contain {demonstration}, as
  # the hint of opsd does; '' = none.
  hint: str = ''
  # Number of distinct questions in the training split.
  train_tasks: int = 8000
  # Number of distinct questions in the evaluation split, none in training.
  eval_tasks: int = 500

  def __post_init__(self):
    base.require(
      bool(self.ops)
      and all(op in ('+', '-', 'x') for op in self.ops)
      and len(set(self.ops)) == len(self.ops),
      'ops',
      "hold one or more of '+', '-', 'x', each once",
      self.ops,
    )
    base.require(
      1 <= self.max_operand <= 999,
      'max_operand',
      'be in [1, 999]',
      self.max_operand,
    )
    base.require(
      1 <= self.max_factor <= 99, 'max_factor', 'be in [1, 99]', self.max_factor
    )
    for name in ('operand', 'factor'):
      smallest = getattr(self, f'min_{name}')
      largest = getattr(self, f'max_{name}')
      base.require(
        0 <= smallest <= largest,
        f'min_{name}',
        f'be in [0, max_{name}={largest}]',
        smallest,
      )
    base.require(
      0 <= self.mistakes <= 1, 'mistakes', 'be in [0, 1]', self.mistakes
    )
    base.require_positive(self, 'train_tasks', 'eval_tasks')
    base.require(
      self.hint.count('{demonstration}') == bool(self.hint),
      'hint',
      "be '' or hold {demonstration} once",
      self.hint,
    )


@dataclasses.dataclass(frozen=True)
class Gsm8k:
  """Word problems of GSM8K, or of a file in its format; graded by number."""

  # Which environment this is; fixed.
  type: str = 'gsm8k'
  # JSONL file of `question` and `answer`; the answer ends in a line `#### N`.
  path: base.File = ''
  # JSONL file of the evaluation split; None = no evaluation on this
  # environment.
  eval_path: base.FileOrNone = None
  # Text of the prompt after the question; '' = none.
  instruction: str = (
    'Reason step by step, and put the final answer in \\boxed{}.'
  )
  # Without a box and `#### N`, reads the last result in the text as the
  # answer, unless the turn was truncated; False = no answer then.
  lenient: bool = True

  def __post_init__(self):
    base.require(bool(self.path), 'path', 'name a file', self.path)
    base.require(
      self.eval_path != '',
      'eval_path',
      'be None or name a file',
      self.eval_path,
    )


@dataclasses.dataclass(frozen=True)
class Rows:
  """Rows of a file: `prompt`, with `completion`; or `messages`. Not graded."""

  # Which environment this is; fixed.
  type: str = 'rows'
  # File of rows (.jsonl, .parquet, .arrow, .csv); or a TFDS data set in
  # ArrayRecord, its folder or tfds:NAME[/CONFIG][:VERSION][:SPLIT].
  path: base.File = ''
  # The data set of the evaluation split, as path; None = as eval_fraction says.
  eval_path: base.FileOrNone = None
  # Columns with other names: column -> 'prompt', 'completion', 'messages', or
  # any other name; {"question": "prompt", "solution": "completion"}.
  columns: dict[str, str] = dataclasses.field(default_factory=dict)
  # Fraction of the prompts of `path` that is held out for evaluation, by their
  # hash, one prompt at least; 0 = no evaluation on this environment.
  eval_fraction: float = 0.0

  def __post_init__(self):
    base.require(
      bool(self.path),
      'path',
      'name a file or folder',
      self.path,
      'as {"type": "rows", "path": "FILE.jsonl"}, or after the name of a '
      'recipe for own data, as grpo:DIR,FILE.jsonl,MODULE:REWARD; or set the '
      "stage's `envs` to another environment",
    )
    base.require(
      0 <= self.eval_fraction < 1,
      'eval_fraction',
      'be in [0, 1)',
      self.eval_fraction,
    )
    base.require(
      self.eval_path is None or not self.eval_fraction,
      'eval_fraction',
      'be 0 with an eval_path',
      self.eval_fraction,
      'the rows of eval_path are held out',
    )


@dataclasses.dataclass(frozen=True)
class ReverseText:
  """`Reverse: abcd`, answered with `dcba`."""

  # Which environment this is; fixed.
  type: str = 'reverse_text'
  # Length of the shortest text, in letters.
  min_length: int = 3
  # Length of the longest text, in letters, at most 64.
  max_length: int = 8
  # Letters of the texts: lower case, each once.
  alphabet: str = 'abcdefghijklmnopqrstuvwxyz'
  # Number of distinct texts in the training split.
  train_tasks: int = 8000
  # Number of distinct texts in the evaluation split, none in training.
  eval_tasks: int = 500

  def __post_init__(self):
    base.require(
      1 <= self.max_length <= 64, 'max_length', 'be in [1, 64]', self.max_length
    )
    base.require(
      1 <= self.min_length <= self.max_length,
      'min_length',
      f'be in [1, max_length={self.max_length}]',
      self.min_length,
    )
    base.require(
      bool(self.alphabet)
      and all('a' <= letter <= 'z' for letter in self.alphabet)
      and len(set(self.alphabet)) == len(self.alphabet),
      'alphabet',
      'hold letters of a to z, each once',
      self.alphabet,
    )
    base.require_positive(self, 'train_tasks', 'eval_tasks')


@dataclasses.dataclass(frozen=True)
class AlphabetSort:
  """Names to sort, with further names every turn."""

  # Which environment this is; fixed.
  type: str = 'alphabet_sort'
  # Number of turns in an episode: 2 or 3.
  turns: int = 2
  # Number of names in the first turn.
  first: int = 3
  # Number of names that each later turn adds.
  more: int = 2
  # Role of the environment's messages between turns: 'user' or 'tool'.
  role: str = 'user'
  # Number of tasks in the training split, with distinct first names.
  train_tasks: int = 8000
  # Number of tasks in the evaluation split; their first names are not in
  # training.
  eval_tasks: int = 500

  def __post_init__(self):
    base.require_choice(self, 'turns', (2, 3))
    base.require_choice(self, 'role', ('user', 'tool'))
    base.require_positive(self, 'first', 'more', 'train_tasks', 'eval_tasks')


@dataclasses.dataclass(frozen=True)
class CustomEnv:
  """An environment of yours: a class by import path, see `envs.custom`."""

  # Which environment this is; fixed.
  type: str = 'custom'
  # 'package.module:Class', built as Class(name, **kwargs).
  import_path: base.Function = ''
  # Keyword arguments of the class.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    base.require_import_path(self, 'import_path')


Env = (
  Arithmetic
  | ReverseText
  | AlphabetSort
  | Gsm8k
  | Rows
  | sql.Sql
  | adapters.OpenEnv
  | adapters.Trl
  | adapters.Verifiers
  | CustomEnv
)
