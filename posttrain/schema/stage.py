"""Options of one stage: its environments, batch, optimizer, evaluation."""

import dataclasses
import re

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
  """One environment of a stage, with its algorithm and sampler."""

  # Source of tasks, and their grader. `env`, `algorithm` and `sampler` are
  # nodes with a `type`: another type replaces the whole node.
  env: env_types.Env = env_types.Arithmetic()
  # Turns rollouts into a training signal.
  algorithm: algorithms.Algorithm = algorithms.Sft()
  # Source of the rollouts.
  sampler: samplers.Sampler = samplers.Dataset()
  # Name -> summand of the reward; {} = the environment's own grade.
  rewards: dict[str, reward_fns.RewardFn] = dataclasses.field(
    default_factory=dict
  )
  # Model that the environment grades with, if it supports one; None = none.
  judge: references.ReferenceOrNone = None
  # Number of rollouts per task.
  group_size: int = 1
  # Share of the groups, relative to the other environments' ratios; 0 = only
  # evaluated, not trained on.
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
  """Size and shape of a step."""

  # Number of tasks (groups), or pairs, per step, over all environments and
  # devices.
  prompts_per_step: int = 64
  # Dynamic sampling: where an algorithm trains on rewards (grpo, rloo, max_rl,
  # echo, reward, custom), a group all of whose advantages are 0 is replaced by
  # another task of its environment, played within the same step, until none is
  # left or so many tasks are drawn (Yu et al., DAPO, arXiv 2503.14476). None =
  # never.
  max_draws: int | None = None
  # Length of a row, in tokens: of the longest sample that can train, or the
  # longest pair, which repeats the prompt before each of its answers.
  row_tokens: int = 256
  # Number of rows that are packed as one: samples longer than half of a row
  # leave less of it empty.
  joined_rows: int = 1
  # Size of a micro-batch over all devices, in tokens; gradients accumulate over
  # micro-batches. Empty rows cost as much as full ones, empty micro-batches
  # nothing. None = as many rows per device of data x fsdp as 2,048 tokens
  # hold, at least one.
  micro_batch_tokens: int | None = None
  # How often devices add up their gradients: at every 'micro_batch', each layer
  # gathered over the mesh's fsdp axis as it is needed; or once per 'update',
  # which saves communication and costs memory: every device then holds all
  # layers in the compute dtype, and its own float32 gradient of all weights.
  # Needs mesh.tensor=1.
  reduce_gradients: str = 'micro_batch'

  def __post_init__(self):
    base.require_choice(self, 'reduce_gradients', ('micro_batch', 'update'))
    base.require_positive(self, 'prompts_per_step', 'row_tokens', 'joined_rows')
    base.require(
      self.max_draws is None or self.max_draws >= self.prompts_per_step,
      'max_draws',
      f'be None or >= prompts_per_step={self.prompts_per_step}',
      self.max_draws,
    )
    if self.micro_batch_tokens is None:
      return
    base.require_positive(self, 'micro_batch_tokens')
    joined = (
      f' * joined_rows={self.joined_rows}' if self.joined_rows > 1 else ''
    )
    base.require(
      self.micro_batch_tokens % self.packed_tokens == 0,
      'micro_batch_tokens',
      f'be a multiple of row_tokens={self.row_tokens}{joined}',
      self.micro_batch_tokens,
      f'{self.packed_tokens} is one row, the least',
    )

  @property
  def packed_tokens(self) -> int:
    """Tokens of a packed row."""
    return self.row_tokens * self.joined_rows

  @property
  def rows(self) -> int:
    """Rows of a micro-batch before they are joined, over all devices."""
    return self.packed_rows * self.joined_rows

  @property
  def packed_rows(self) -> int:
    """Packed rows of a micro-batch, over all devices."""
    return self.tokens_per_micro_batch // self.packed_tokens

  @property
  def tokens_per_micro_batch(self) -> int:
    """`micro_batch_tokens`, once it is resolved (`stage.sizes`)."""
    assert self.micro_batch_tokens is not None, 'a size that is resolved'
    return self.micro_batch_tokens


@dataclasses.dataclass(frozen=True)
class Rollout:
  """The decode engine, for training and evaluation."""

  # Number of sequences decoded at a time, over all devices; empty slots cost as
  # much as full ones. None = as many as a step has samples, at most 256 per
  # device of data x fsdp.
  slots: int | None = 128
  # Number of tokens decoded between two checks of the slots, while episodes
  # wait for a slot or have further turns.
  chunk: int = 16
  # Largest number of prompts prefilled at a time, and between two chunks.
  prefill_rows: int = 32
  # Number of tokens of a prompt prefilled at a time.
  prefill_tokens: int = 32
  # Largest number of environment errors in one step, or one evaluation; one
  # more stops the run. An error drops its episode and is never a reward.
  max_errors: int = 10
  # Number of threads for blocking environments, which wait for a network or a
  # process.
  env_threads: int = 32
  # Time limit of a call into an environment, in seconds, without its judge's
  # time. A call that exceeds it is an error of its episode.
  env_timeout: float = 300.0
  # Where blocking environments, and reward functions without a judge, are
  # called: 'threads' (and the functions' own processes), or processes of 'ray',
  # on this machine or in the cluster of RAY_ADDRESS. The numbers are the same.
  workers: str = 'threads'
  # Number of Ray workers for the environments of a stage; each plays several
  # episodes at a time, in threads. As many as env_threads: one or a few each.
  num_workers: int = 4
  # A blocking environment's reply is read this many chunks after the turn, if
  # other episodes decode meanwhile; a later reply is waited for.
  env_chunks: int = 4
  # The other environments reply while the device decodes the next chunk,
  # instead of before it.
  overlap: bool = False
  # Frees the KV cache during the update, and allocates it anew to sample.
  sleep: bool = False

  def __post_init__(self):
    base.require_positive(
      self,
      'chunk',
      'prefill_rows',
      'prefill_tokens',
      'env_threads',
      'num_workers',
      'env_chunks',
    )
    base.require_choice(self, 'workers', ('threads', 'ray'))
    base.require_seconds(self, 'env_timeout')
    base.require_non_negative(self, 'max_errors')
    if self.slots is None:
      return
    base.require_positive(self, 'slots')

  @property
  def slot_count(self) -> int:
    """`slots`, once it is resolved (`stage.sizes`)."""
    assert self.slots is not None, 'a size that is resolved'
    return self.slots


@dataclasses.dataclass(frozen=True)
class Eval:
  """Answers to held-out tasks, at a stage's start and end."""

  # Steps between further evaluations; None = only at the start and the end.
  every: int | None = None
  # Number of held-out tasks per environment (at most all that it has).
  prompts: int = 500
  # Number of answers per task at temperature 1, besides the greedy answer; 0 =
  # none. Tasks have none that nothing grades, or only a judge.
  samples: int = 8
  # Values of k for pass@k and maj@k, from all subsets of k answers at
  # temperature 1; k = samples is always measured.
  ks: tuple[int, ...] = ()
  # Further prompts (user messages), answered greedily in one turn without an
  # environment; the answers are shown before and after, and measured without
  # an expected answer: repetition, broken characters, refusals, syntax of code.
  suite: tuple[str, ...] = ()
  # Measures the KL of the policy to the stage's initial parameters, on one
  # sampled answer per task; keeps a copy of those parameters on the devices.
  kl: bool = False
  # Longest answer (assistant turn), in tokens.
  max_tokens: int = 64
  # Largest number of tokens after an episode's prompt, the environment's
  # messages included; None = max_tokens times the number of turns, so the
  # environment's messages leave fewer tokens to the answers.
  max_episode_tokens: int | None = None
  # Number of latest exchanges that the policy's context keeps after the prompt;
  # None = all.
  keep_exchanges: int | None = None
  # The metric whose largest value (of 'eval/nll/ENV' the smallest) chooses the
  # weights that the stage hands on, as 'eval/pass_rate/ENV',
  # 'eval/reward/NAME/ENV' or 'eval/pairs/rewards/accuracies'; None = the last
  # weights. Pass rates, format rates, rewards, nll and token_accuracy select;
  # KL, entropy, lengths, errors and stops do not. It is measured at every
  # evaluation, on tasks of its own that are not reported: the environment's
  # next `best_prompts`, after `prompts`; or the pairs of half of the held-out
  # prompts. Later stages must not report these tasks.
  best: str | None = None
  # Number of those tasks, at most all that are left.
  best_prompts: int = 200
  # Number of evaluations in a row without a new best after which the stage
  # ends; None = it lasts `steps`.
  patience: int | None = None

  def __post_init__(self):
    base.require_positive(self, 'prompts', 'max_tokens', 'best_prompts')
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
    self._require_selection()

  def _require_selection(self):
    base.require(
      self.best is None or self.selects_pairs or self.selects is not None,
      'best',
      "be None or a metric of an environment, as 'eval/pass_rate/ENV'",
      self.best,
    )
    base.require(
      self.patience is None or self.patience > 0,
      'patience',
      'be None or > 0',
      self.patience,
    )
    base.require(
      self.patience is None or None not in (self.best, self.every),
      'patience',
      'be None',
      self.patience,
      'set best and every, too',
    )

  @property
  def selects(self) -> tuple[str, str] | None:
    """(metric, environment) of `best`; None = it is not of an environment."""
    match = re.fullmatch('eval/(.+)/([^/]+)', self.best or '')
    return (match[1], match[2]) if match and not self.selects_pairs else None

  @property
  def lowest_is_best(self) -> bool:
    """Whether `best` falls as the policy improves."""
    return self.selects is not None and self.selects[0] == 'nll'

  @property
  def selects_pairs(self) -> bool:
    """Whether `best` is measured on held-out pairs."""
    return bool(self.best and self.best.startswith('eval/pairs/'))


@dataclasses.dataclass(frozen=True)
class Stage:
  """One stage of a run."""

  # Type of the training examples: 'tokens' (streams per token), 'preference'
  # (two answers to a prompt, for DPO and similar losses), or 'ranking' (two
  # answers to a prompt, for a reward model).
  kind: str = 'tokens'
  # Initial weights: 'random', 'stage:NAME', or the path of a workdir, a
  # checkpoint or a HuggingFace directory.
  init: base.Folder = 'random'
  # Architecture of this stage's model; None = the run's.
  model: models.Model | None = None
  # Low-rank adaptation: trains a correction, and freezes the initial weights.
  lora: adapters.Lora = adapters.Lora()
  # Number of batches to train on.
  steps: int = 1000
  # Name -> environment; every batch mixes them by their ratios. A stage on
  # pairs takes the tasks of sampled pairs from them, and evaluates on them.
  envs: dict[str, EnvEntry] = dataclasses.field(default_factory=dict)
  # Source of the pairs of a 'preference' or 'ranking' stage.
  pairs: pair_sources.Pairs = pair_sources.MadePairs()
  # Size and shape of a step.
  batch: Batch = Batch()
  # The decode engine, for rollouts and answers.
  rollout: Rollout = Rollout()
  # Options of the losses.
  loss: losses.Loss = losses.Loss()
  # Number of optimizer updates per batch, each a pass over the whole batch.
  updates_per_rollout: int = 1
  # The optimizer, which has a new state in every stage.
  optim: optimizer.Optim = optimizer.Optim()
  # Evaluation on held-out tasks.
  eval: Eval = Eval()

  def __post_init__(self):
    base.require_choice(self, 'kind', KINDS)
    base.require_positive(self, 'steps', 'updates_per_rollout')
    if self.kind == 'tokens':
      self.require_envs()
    base.require(
      self.init == 'random' or self.init[:6] != 'stage:' or len(self.init) > 6,
      'init',
      "be 'random', 'stage:NAME' or a path",
      self.init,
    )

  def require_envs(self):
    """Checks that there is an environment to train on, or to make pairs of.

    A stage on pairs is checked before it trains, see `config.checks`: with none
    it can still answer `eval.suite`.

    Raises:
      FieldError: there is none.
    """
    base.require(bool(self.envs), 'envs', 'hold an environment', self.envs)
    base.require(
      any(entry.ratio for entry in self.envs.values()),
      'envs',
      'hold an environment with a ratio > 0',
      sorted(self.envs),
    )
