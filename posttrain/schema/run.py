"""Options of a run: what its stages share."""

import dataclasses

from posttrain.schema import base, stage
from posttrain.schema import model as models


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Devices per axis; -1 (at most once) = all that remain."""

  # Axis over which only the batch is split.
  data: int = -1
  # Axis over which the batch, the weights and the optimizer are split.
  fsdp: int = 1
  # Axis over which heads and MLP width are split.
  tensor: int = 1

  def __post_init__(self):
    sizes = dataclasses.astuple(self)
    for field, size in zip(('data', 'fsdp', 'tensor'), sizes, strict=True):
      base.require(size == -1 or size > 0, field, 'be -1 or > 0', size)
    base.require(
      sizes.count(-1) <= 1, 'data', 'be -1 on one axis at most', sizes
    )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """When to save, and what to keep. A stage's last step is always saved."""

  # Steps between saves.
  every: int = 100
  # How many of the newest to keep.
  keep_last: int = 2
  # Also keep every step that is a multiple of this; None = none.
  keep_every: int | None = None

  def __post_init__(self):
    base.require_positive(self, 'every', 'keep_last')
    base.require(
      self.keep_every is None or self.keep_every > 0,
      'keep_every',
      'be None or > 0',
      self.keep_every,
    )


@dataclasses.dataclass(frozen=True)
class Metrics:
  """Where numbers go besides metrics.jsonl."""

  # Also write TensorBoard files (extra `tensorboard`).
  tensorboard: bool = False
  # Show a progress bar on stderr.
  progress: bool = True
  # Every so many steps, also write each packed sequence with every stream of
  # its tokens to WORKDIR/token_exports; None = never.
  export_tokens: int | None = None

  def __post_init__(self):
    base.require(
      self.export_tokens is None or self.export_tokens > 0,
      'export_tokens',
      'be None or > 0',
      self.export_tokens,
    )


@dataclasses.dataclass(frozen=True)
class Run:
  """The whole tree: shared keys, and one subtree per stage."""

  # Of the weights, the tasks and their order.
  seed: int = 0
  # Folder of the persistent compilation cache; None = off.
  compilation_cache: str | None = '~/.cache/posttrain/compiled'
  # What is trained, unless a stage names its own.
  model: models.Model = models.Model()
  # Text to tokens, the same in every stage.
  tokenizer: models.Tokenizer = models.Tokenizer()
  # How the devices are laid out.
  mesh: Mesh = Mesh()
  # When state is saved.
  checkpoint: Checkpoint = Checkpoint()
  # Where numbers are shown.
  metrics: Metrics = Metrics()
  # Name -> stage, in the order in which they run.
  stages: dict[str, stage.Stage] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    base.require(self.seed >= 0, 'seed', 'be >= 0', self.seed)
    base.require(bool(self.stages), 'stages', 'name a stage', ())
