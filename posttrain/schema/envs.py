"""Options of the environments, one dataclass per type."""

import dataclasses

from posttrain.schema import base


@dataclasses.dataclass(frozen=True)
class Arithmetic:
  """`What is A op B?`, answered with `\\boxed{N}`."""

  type: str = 'arithmetic'
  # Operators to draw from: '+', '-', 'x'.
  ops: tuple[str, ...] = ('+', '-')
  # Largest operand of + and -, at most 999; of x, at most 99.
  max_operand: int = 99
  max_factor: int = 9
  # Demonstrations show the work (tens, then units) before the boxed answer.
  worked: bool = True
  # Distinct questions of the training split and of the evaluation split.
  train_tasks: int = 8000
  eval_tasks: int = 500

  def __post_init__(self):
    base.require(
        self.ops and set(self.ops) <= {'+', '-', 'x'}
        and len(set(self.ops)) == len(self.ops),
        'ops', "hold one or more of '+', '-', 'x', each once", self.ops,
    )
    base.require(
        1 <= self.max_operand <= 999, 'max_operand', 'be in [1, 999]',
        self.max_operand,
    )
    base.require(
        1 <= self.max_factor <= 99, 'max_factor', 'be in [1, 99]',
        self.max_factor,
    )
    base.require_positive(self, 'train_tasks', 'eval_tasks')


@dataclasses.dataclass(frozen=True)
class Rows:
  """Rows of a file: `prompt` + `completion`, or `messages`. Not graded."""

  type: str = 'rows'
  # A JSONL file, or the folder of a TFDS data set in ArrayRecord.
  path: str = ''
  # The same for evaluation; None = no evaluation on this environment.
  eval_path: str | None = None

  def __post_init__(self):
    base.require(bool(self.path), 'path', 'name a file or folder', self.path)


TYPES = {'arithmetic': Arithmetic, 'rows': Rows}
