"""Options of a run, which its stages share."""

import dataclasses

from posttrain.schema import base, stage
from posttrain.schema import model as models

TRACKERS = ('tensorboard', 'wandb', 'trackio')


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Number of devices per axis; -1 (at most once) = all remaining devices."""

  # Devices of the axis that splits only the batch.
  data: int = -1
  # Devices of the axis that splits the batch, weights and optimizer state.
  fsdp: int = 1
  # Devices of the axis that splits heads, MLP width and vocabulary.
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
  # Number of newest checkpoints to keep.
  keep_last: int = 2
  # Also keeps the steps that are multiples of this; None = none.
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
  """Outputs of metrics besides metrics.jsonl."""

  # Other tools that get each row: 'tensorboard', 'wandb', 'trackio' (extras of
  # these names), or the class of one as 'package.module:Class'.
  trackers: tuple[base.Function, ...] = ()
  # Shows a bar on stderr, or lines where there is no terminal.
  progress: bool = True
  # Seconds between those lines.
  log_seconds: float = 60.0
  # Steps between files of a step's rollouts, prompts, texts and rewards,
  # WORKDIR/rollouts/<stage>_train_<step>.jsonl; the first step has one too.
  # None = no files.
  rollouts_every: int | None = 10
  # Steps between exports of each packed sequence, with every stream of its
  # tokens, to WORKDIR/token_exports; None = no exports.
  export_tokens: int | None = None

  def __post_init__(self):
    for name in self.trackers:
      base.require(
        name in TRACKERS or all(name.partition(':')),
        'trackers',
        f"hold names of {TRACKERS}, or import paths 'package.module:Class'",
        name,
      )
    base.require(
      len(set(self.trackers)) == len(self.trackers),
      'trackers',
      'name each one once',
      self.trackers,
    )
    base.require_seconds(self, 'log_seconds')
    base.require(
      self.rollouts_every is None or self.rollouts_every > 0,
      'rollouts_every',
      'be None or > 0',
      self.rollouts_every,
    )
    base.require(
      self.export_tokens is None or self.export_tokens > 0,
      'export_tokens',
      'be None or > 0',
      self.export_tokens,
    )


@dataclasses.dataclass(frozen=True)
class Watchdog:
  """Limits of the time without progress."""

  # Seconds without progress before a line on stderr names the phase and what it
  # waits for; 0 = no watchdog.
  seconds: float = 600.0
  # The least of both limits in the first rollout, update, save and so on of a
  # stage, which compile.
  first_seconds: float = 3600.0
  # Seconds without progress before the run writes the stacks of its threads to
  # stderr and ends with exit code 4, so that a scheduler starts it again; None
  # = never. One update, one save and one call of a reward function or
  # environment must take less.
  exit_seconds: float | None = None

  def __post_init__(self):
    names = 'seconds', 'first_seconds', 'exit_seconds'
    base.require_within(self, 0, base.LONGEST, *names)
    base.require(
      self.exit_seconds is None or self.exit_seconds >= self.seconds > 0,
      'exit_seconds',
      f'be None or >= the {self.seconds:g} of seconds, which are > 0',
      self.exit_seconds,
    )


@dataclasses.dataclass(frozen=True)
class Run:
  """The whole config: shared keys, and one subtree per stage."""

  # Seed of the initial weights, the tasks, their order, and sampling.
  seed: int = 0
  # Folder of the persistent compilation cache; None = no cache.
  compilation_cache: base.Compiled = '~/.cache/posttrain/compiled'
  # Architecture of the policy, unless a stage sets its own.
  model: models.Model = models.Model()
  # Tokenizer of all stages.
  tokenizer: models.Tokenizer = models.Tokenizer()
  # Layout of the devices.
  mesh: Mesh = Mesh()
  # When checkpoints are saved and deleted.
  checkpoint: Checkpoint = Checkpoint()
  # Outputs of metrics.
  metrics: Metrics = Metrics()
  # What happens without progress.
  watchdog: Watchdog = Watchdog()
  # Name -> stage, in running order.
  stages: dict[str, stage.Stage] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    base.require(self.seed >= 0, 'seed', 'be >= 0', self.seed)
    base.require(bool(self.stages), 'stages', 'name a stage', ())
