"""Options of one stage: its environments, batch, optimizer, evaluation."""

import dataclasses

from posttrain.schema import algorithms, base, losses, references, samplers
from posttrain.schema import envs as env_types
from posttrain.schema import lora as adapters
from posttrain.schema import model as models
from posttrain.schema import optim as optimizer
from posttrain.schema import pairs as pair_sources
from posttrain.schema import rewards as reward_fns

KINDS = ('tokens', 'preference', 'ranking')


@dataclasses.dataclass(frozen=True)
class EnvEntry:
  """One environment of a stage, with the algorithm and sampler it trains by."""

  # Tasks and their grader. This and the next two are nodes with a `type`:
  # another type replaces the whole node.
  env: env_types.Env = env_types.Arithmetic()
  # What turns rollouts into a training signal.
  algorithm: algorithms.Algorithm = algorithms.Sft()
  # Where rollouts come from.
  sampler: samplers.Sampler = samplers.Dataset()
  # Name -> what is added up to the reward; {} = the environment's own grade.
  rewards: dict[str, reward_fns.RewardFn] = dataclasses.field(
    default_factory=dict
  )
  # A model that the environment grades with, where it can; None = none.
  judge: references.Reference | None = None
  # Rollouts per task.
  group_size: int = 1
  # Share of the groups, relative to the other environments' ratios; 0 = it is
  # evaluated, and not trained on.
  ratio: float = 1.0

  def __post_init__(self):
    base.require_positive(self, 'group_size')
    base.require_non_negative(self, 'ratio')
    for name, reward in self.rewards.items():
      base.require(
        (reward.fn is None and reward.model is None) == (name == 'env'),
        'rewards',
        "name a function, or a model, for each but 'env', the "
        "environment's own grade",
        name,
        f'set rewards.{name}.fn',
      )
    if self.judge is not None:
      references.require_frozen(self, 'judge')


@dataclasses.dataclass(frozen=True)
class Batch:
  """How much goes into a step, and in which shape."""

  # Tasks (groups), or pairs, per step, over all environments and devices.
  prompts_per_step: int = 64
  # Tokens of one packed row: the longest sample that can train; or the longest
  # pair, the prompt before each of its answers.
  row_tokens: int = 256
  # Tokens of a micro-batch, over all devices; gradients accumulate over them.
  micro_batch_tokens: int = 1024

  def __post_init__(self):
    base.require_positive(
      self, 'prompts_per_step', 'row_tokens', 'micro_batch_tokens'
    )
    base.require(
      self.micro_batch_tokens % self.row_tokens == 0,
      'micro_batch_tokens',
      f'be a multiple of row_tokens={self.row_tokens}',
      self.micro_batch_tokens,
    )


@dataclasses.dataclass(frozen=True)
class Rollout:
  """The decode engine, for training and evaluation alike."""

  # Sequences decoded at a time, over all devices.
  slots: int = 128
  # Tokens between two looks at the slots, while an episode waits for one or
  # has turns to come.
  chunk: int = 16
  # Prompts prefilled at a time.
  prefill_rows: int = 32
  # Tokens of a prompt that are prefilled at a time.
  prefill_tokens: int = 32
  # Environment errors in one step, or one evaluation, above which the run
  # stops. Each one drops its episode; it is never a reward.
  max_errors: int = 10
  # Threads for environments that wait for something: a network, a process.
  env_threads: int = 32
  # Chunks that are decoded between a turn and their answer to it, if others
  # decode. What takes longer is waited for.
  env_chunks: int = 4
  # Whether the other environments answer while the device decodes the next
  # chunk of those that still speak, rather than before.
  overlap: bool = False

  def __post_init__(self):
    base.require_positive(
      self,
      'slots',
      'chunk',
      'prefill_rows',
      'prefill_tokens',
      'env_threads',
      'env_chunks',
    )
    base.require_non_negative(self, 'max_errors')


@dataclasses.dataclass(frozen=True)
class Eval:
  """Answers to held-out tasks, at a stage's start and end."""

  # Also every so many steps; None = only at the start and the end.
  every: int | None = None
  # Held-out tasks per environment (at most as many as it has).
  prompts: int = 500
  # Answers to each of them at temperature 1, beside the greedy one; 0 = none.
  samples: int = 8
  # Also measure pass@k and maj@k for these k, by all subsets of k of the
  # answers at temperature 1; k = samples is measured anyway.
  ks: tuple[int, ...] = ()
  # Also answer these prompts (user messages) greedily in one turn, whatever the
  # environments; shown before and after, and not graded.
  suite: tuple[str, ...] = ()
  # Also measure the KL of the policy to the stage's initial parameters, on one
  # sampled answer per task; keeps a copy of those parameters on the devices.
  kl: bool = False
  # Longest answer (assistant turn), in tokens.
  max_tokens: int = 64
  # Tokens that an episode may add to its prompt, the environment's words
  # included; None = as many as its answers alone may have, so that what an
  # environment says between them is at their cost.
  max_episode_tokens: int | None = None
  # Behind the prompt the policy sees at most so many of the last exchanges;
  # None = all.
  keep_exchanges: int | None = None

  def __post_init__(self):
    base.require_positive(self, 'prompts', 'max_tokens')
    samplers.require_budgets(self)
    base.require(
      0 <= self.samples <= 1000, 'samples', 'be in [0, 1000]', self.samples
    )
    base.require(
      all(1 < k <= self.samples for k in self.ks),
      'ks',
      f'hold numbers above 1, up to samples={self.samples}',
      self.ks,
      'k = 1 is sampled_pass_rate',
    )
    base.require(
      all(prompt.strip() for prompt in self.suite)
      and len(set(self.suite)) == len(self.suite),
      'suite',
      'hold prompts with text, each once',
      self.suite,
    )
    base.require(
      self.every is None or self.every > 0,
      'every',
      'be None or > 0',
      self.every,
    )


@dataclasses.dataclass(frozen=True)
class Stage:
  """One stage of a run."""

  # What a training example is: 'tokens' (streams per token), 'preference' (two
  # answers to a prompt: DPO and its kin), or 'ranking' (the same, for a reward
  # model).
  kind: str = 'tokens'
  # 'random', 'stage:NAME', or the path of a workdir, a checkpoint or a
  # HuggingFace directory.
  init: str = 'random'
  # Another model than the run's; None = the run's.
  model: models.Model | None = None
  # Trains a correction of what `init` says, and leaves that as it is.
  lora: adapters.Lora = adapters.Lora()
  # Batches to train on.
  steps: int = 1000
  # Name -> environment; every batch mixes them by their ratios. Of a stage on
  # pairs: who asks for them where they are made, and what is evaluated.
  envs: dict[str, EnvEntry] = dataclasses.field(default_factory=dict)
  # What a stage of another kind than 'tokens' trains on.
  pairs: pair_sources.Pairs = pair_sources.MadePairs()
  # Size and shape of a step.
  batch: Batch = Batch()
  # How rollouts and answers are decoded.
  rollout: Rollout = Rollout()
  # The loss components' own options.
  loss: losses.Loss = losses.Loss()
  # Optimizer updates per batch, each a pass over all of it.
  updates_per_rollout: int = 1
  # The optimizer, made anew for every stage.
  optim: optimizer.Optim = optimizer.Optim()
  # The held-out measurement.
  eval: Eval = Eval()

  def __post_init__(self):
    base.require_choice(self, 'kind', KINDS)
    base.require_positive(self, 'steps', 'updates_per_rollout')
    if self.kind == 'tokens' or self.pairs.type == 'made':
      self._require_envs()
    base.require(
      self.init == 'random' or self.init[:6] != 'stage:' or len(self.init) > 6,
      'init',
      "be 'random', 'stage:NAME' or a path",
      self.init,
    )

  def _require_envs(self):
    base.require(bool(self.envs), 'envs', 'hold an environment', self.envs)
    base.require(
      any(entry.ratio for entry in self.envs.values()),
      'envs',
      'hold an environment with a ratio > 0',
      sorted(self.envs),
    )
