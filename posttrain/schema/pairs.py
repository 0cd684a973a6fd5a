"""Options of the sources of preference pairs."""

import dataclasses

from posttrain.schema import base


@dataclasses.dataclass(frozen=True)
class MadePairs:
  """Answers of the stage's initial model, graded by its environments.

  A pair is a correct answer (chosen) and an incorrect answer (rejected) to the
  same task. Pairs are sampled once and stored in WORKDIR/pairs/<stage>.jsonl,
  with a second file for the held-out pairs.
  """

  type: str = 'made'
  # Number of tasks of each environment whose ratio is not 0.
  prompts: int = 1000
  # Number of answers per task.
  samples: int = 8
  # Sampling temperature of the answers.
  temperature: float = 1.0
  # Longest answer (assistant turn), in tokens.
  max_tokens: int = 64
  # Largest number of pairs per task.
  per_prompt: int = 1
  # Number of further, held-out tasks, whose pairs are measured at every
  # evaluation; None = holds out a fraction of the prompts instead.
  eval_prompts: int | None = None
  # Fraction of the prompts that is held out if eval_prompts is None.
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
    base.require_fraction(self, 'eval_fraction')


@dataclasses.dataclass(frozen=True)
class PairFile:
  """A data set of pairs, see `posttrain.data.preferences`."""

  type: str = 'file'
  # File of pairs (.jsonl, .parquet, .arrow, .csv); or a TFDS data set in
  # ArrayRecord, its folder or tfds:NAME[/CONFIG][:VERSION][:SPLIT].
  path: base.File = ''
  # The data set of held-out pairs; None = holds out a fraction of `path`.
  eval_path: base.FileOrNone = None
  # Columns with other names: column -> 'prompt', 'chosen', 'rejected' and so
  # on; {"question": "prompt"}.
  columns: dict[str, str] = dataclasses.field(default_factory=dict)
  # Fraction of the prompts of `path` that is held out if eval_path is None, one
  # prompt at least; 0 = none.
  eval_fraction: float = 0.1
  # A pair longer than batch.row_tokens: 'error' = raises, 'drop' = is left out,
  # and the number of dropped pairs is logged.
  too_long: str = 'error'

  def __post_init__(self):
    base.require(bool(self.path), 'path', 'name a file', self.path)
    base.require_choice(self, 'too_long', ('error', 'drop'))
    base.require_fraction(self, 'eval_fraction')


Pairs = MadePairs | PairFile
