"""Options of where preferences come from."""

import dataclasses

from posttrain.schema import base


@dataclasses.dataclass(frozen=True)
class MadePairs:
  """Answers of what the stage begins with, told apart by environments.

  Of each answered task a correct answer is chosen, an incorrect one rejected.
  They are made once, and kept in WORKDIR/pairs/<stage>.jsonl, those that are
  held out beside it.
  """

  type: str = 'made'
  # Tasks that are asked, of each environment whose ratio is not 0.
  prompts: int = 1000
  # Answers to each of them.
  samples: int = 8
  # Of those answers.
  temperature: float = 1.0
  # Longest answer (assistant turn), in tokens.
  max_tokens: int = 64
  # Pairs of a task, at most.
  per_prompt: int = 1
  # Held-out tasks that are asked as well; their pairs are measured at every
  # evaluation. None = those of a share of the prompts are held out instead.
  eval_prompts: int | None = None
  # That share, where eval_prompts is None.
  eval_fraction: float = 0.1

  def __post_init__(self):
    base.require_positive(
      self, 'prompts', 'temperature', 'max_tokens', 'per_prompt'
    )
    base.require(
      self.eval_prompts is None or self.eval_prompts > 0,
      'eval_prompts',
      'be > 0 or None',
      self.eval_prompts,
    )
    base.require(
      2 <= self.samples <= 1000, 'samples', 'be in [2, 1000]', self.samples
    )
    _require_fraction(self, 'eval_prompts')


@dataclasses.dataclass(frozen=True)
class PairFile:
  """A JSONL file of them, see `posttrain.data.pairs`."""

  type: str = 'file'
  # The file.
  path: str = ''
  # A file of those that are held out; None = a share of `path`.
  eval_path: str | None = None
  # Share of the prompts of `path` that is held out, where eval_path is None.
  eval_fraction: float = 0.1
  # What to do with a pair longer than batch.row_tokens: 'error', or 'drop' it
  # and say how many there were.
  too_long: str = 'error'

  def __post_init__(self):
    base.require(bool(self.path), 'path', 'name a file', self.path)
    base.require_choice(self, 'too_long', ('error', 'drop'))
    _require_fraction(self, 'eval_path')


def _require_fraction(node: 'Pairs', instead: str) -> None:
  """Checks the share, which nothing reads where `instead` is set."""
  base.require(
    0 <= node.eval_fraction < 1,
    'eval_fraction',
    'be in [0, 1)',
    node.eval_fraction,
  )
  default = type(node).eval_fraction
  base.require(
    node.eval_fraction == default or getattr(node, instead) is None,
    'eval_fraction',
    f'be left at {default!r}',
    node.eval_fraction,
    f'nothing reads it where {instead} is set',
  )


Pairs = MadePairs | PairFile
