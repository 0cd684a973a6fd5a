"""Options of a run and of its stages."""

import dataclasses
import re
from typing import Annotated

from posttrain.schema import architecture, bounds, objective, signals, tasks


class MadePairs(bounds.Options):
  """Answers of the stage's initial model, graded by its environments.

  A pair is a correct answer (chosen) and an incorrect answer (rejected) to the
  same task. Pairs are sampled once and stored in WORKDIR/pairs/<stage>.jsonl,
  with a second file for the held-out pairs.
  """

  type: str = 'made'
  # Number of tasks of each environment whose ratio is not 0.
  prompts: bounds.Count = 1000
  # Number of answers per task.
  samples: Annotated[int, bounds.within(2, 1000)] = 8
  # Sampling temperature of the answers.
  temperature: bounds.Positive = 1.0
  # Longest answer (assistant turn), in tokens.
  max_tokens: bounds.Count = 64
  # Largest number of pairs per task.
  per_prompt: bounds.Count = 1
  # Number of further, held-out tasks, whose pairs are measured at every
  # evaluation; None = holds out a fraction of the prompts instead.
  eval_prompts: bounds.CountOrNone = None
  # Fraction of the prompts that is held out if eval_prompts is None.
  eval_fraction: bounds.Fraction = 0.1


class PairFile(bounds.Options):
  """A data set of pairs, see `posttrain.data.preferences`."""

  type: str = 'file'
  # File of pairs (.jsonl, .parquet, .arrow, .csv); or a TFDS data set in
  # ArrayRecord, its folder or tfds:NAME[/CONFIG][:VERSION][:SPLIT].
  path: bounds.File = ''
  # The data set of held-out pairs; None = holds out a fraction of `path`.
  eval_path: bounds.FileOrNone = None
  # Columns with other names: column -> 'prompt', 'chosen', 'rejected' and so
  # on; {"question": "prompt"}.
  columns: dict[str, str] = dataclasses.field(default_factory=dict)
  # Fraction of the prompts of `path` that is held out if eval_path is None, one
  # prompt at least; 0 = none.
  eval_fraction: bounds.Fraction = 0.1
  # A pair longer than batch.row_tokens: 'error' = raises, 'drop' = is left out,
  # and the number of dropped pairs is logged.
  too_long: Annotated[str, bounds.one_of('error', 'drop')] = 'error'


Pairs = MadePairs | PairFile


class Optim(bounds.Options):
  """AdamW with a schedule (Loshchilov and Hutter, arXiv 1711.05101)."""

  # Peak learning rate.
  lr: bounds.Positive = 3e-4
  # Learning rate after warm-up: 'constant', 'linear' or 'cosine' decay over the
  # stage.
  schedule: Annotated[str, bounds.one_of('constant', 'linear', 'cosine')] = (
    'cosine'
  )
  # Length of the linear warm-up from 0, in updates.
  warmup_steps: bounds.CountOrZero = 0
  # Learning rate at the end of the decay, as a fraction of lr.
  final_lr_fraction: bounds.Share = 0.0
  # Decay of the first moment (the mean gradient), in [0, 1).
  beta1: bounds.Fraction = 0.9
  # Decay of the second moment (the mean squared gradient), in [0, 1).
  beta2: bounds.Fraction = 0.95
  # Dtype in which both moments are stored: 'float32', or 'bfloat16', which
  # takes 4 bytes less per trained parameter and needs decays of at most 0.99.
  # Each update is computed in float32.
  moments_dtype: Annotated[str, bounds.one_of('float32', 'bfloat16')] = (
    'float32'
  )
  # Added to the root of the second moment.
  eps: bounds.Positive = 1e-8
  # Decoupled weight decay: weights shrink by lr times this per update.
  weight_decay: bounds.NonNegative = 0.1
  # Regex searched in parameter paths; a match is not decayed (scales, biases).
  no_decay: bounds.Regex = r'(scale|bias)$'
  # Largest global gradient norm; a larger gradient is scaled down to it.
  clip_norm: bounds.Positive = 1.0
  # Decay of a moving average of the weights, which evaluation uses; None = no
  # average.
  average: Annotated[
    float | None, bounds.Rule('be in (0, 1)', lambda x: 0 < x < 1)
  ] = None
  # Number of consecutive non-finite gradients after which the run aborts.
  max_skipped: bounds.Count = 5

  def __post_init__(self):
    super().__post_init__()
    for field in ('beta1', 'beta2'):
      bounds.require(
        getattr(self, field) <= 0.99 or self.moments_dtype != 'bfloat16',
        field,
        "be at most 0.99 with moments_dtype='bfloat16', which rounds smaller "
        'changes away',
        getattr(self, field),
      )


class Critic(bounds.Options):
  """The model of values that algorithm ppo needs, with its own optimizer.

  Options of the optimizer that are not here are those of `optim`.
  """

  # 'none', 'head' (a linear head on the policy's trunk) or 'model' (a
  # transformer of its own that begins as the policy, with such a head).
  kind: Annotated[str, bounds.one_of('none', 'head', 'model')] = 'none'
  # Peak learning rate.
  lr: bounds.Positive = 3e-4
  # Length of its linear warm-up, in updates.
  lr_warmup_steps: bounds.CountOrZero = 0
  # Largest norm of its gradient; a larger gradient is scaled down to it.
  clip_norm: bounds.Positive = 1.0
  # Number of updates at the start of the stage in which it alone learns, and
  # the policy does not move.
  warmup_steps: bounds.CountOrZero = 0


KINDS = ('tokens', 'preference', 'ranking')


class EnvEntry(bounds.Options):
  """One environment of a stage, with its algorithm and sampler."""

  # Source of tasks, and their grader. `env`, `algorithm` and `sampler` are
  # nodes with a `type`: another type replaces the whole node.
  env: tasks.Env = tasks.Arithmetic()
  # Turns rollouts into a training signal.
  algorithm: signals.Algorithm = signals.Sft()
  # Source of the rollouts.
  sampler: signals.Sampler = signals.Dataset()
  # Order of the tasks: by recent pass rates ('pass_rate'); None = shuffled.
  curriculum: signals.Curriculum | None = None
  # Trains on recent groups again ('groups'), with an algorithm on rewards; None
  # = never.
  replay: signals.Replay | None = None
  # Name -> summand of the reward; {} = the environment's own grade.
  rewards: dict[str, signals.RewardFn] = dataclasses.field(default_factory=dict)
  # Model that the environment grades with, if it supports one; None = none.
  judge: signals.FrozenOrNone = None
  # Number of rollouts per task.
  group_size: bounds.Count = 1
  # Share of the groups, relative to the other environments' ratios; 0 = only
  # evaluated, not trained on.
  ratio: bounds.NonNegative = 1.0

  def __post_init__(self):
    super().__post_init__()
    for name, reward in self.rewards.items():
      bounds.require(
        (reward.fn is None and reward.model is None) == (name == 'env'),
        'rewards',
        "name a function, or a model, for each but 'env', the own grade",
        name,
        f'set rewards.{name}.fn',
      )


class Batch(bounds.Options):
  """Size and shape of a step."""

  # Number of tasks (groups), or pairs, per step, over all environments and
  # devices.
  prompts_per_step: bounds.Count = 64
  # Dynamic sampling: where an algorithm trains on rewards (grpo, rloo, max_rl,
  # echo, reward, custom), a group all of whose advantages are 0 is replaced by
  # another task of its environment, played within the same step, until none is
  # left or so many tasks are drawn (Yu et al., DAPO, arXiv 2503.14476). With a
  # critic all groups train. None = never.
  max_draws: int | None = None
  # Length of a row, in tokens: of the longest sample that can train, or the
  # longest pair, which repeats the prompt before each of its answers.
  row_tokens: bounds.Count = 256
  # Number of rows that are packed as one: samples longer than half of a row
  # leave less of it empty.
  joined_rows: bounds.Count = 1
  # Size of a micro-batch over all devices, in tokens; gradients accumulate over
  # micro-batches. Empty rows cost as much as full ones, empty micro-batches
  # nothing. None = as many rows per device of data x fsdp x expert as
  # 2,048 tokens hold, at least one.
  micro_batch_tokens: bounds.CountOrNone = None
  # Micro-batches are only as wide as a step's samples need: one row per device,
  # in a few widths, each of which is compiled, of at most micro_batch_tokens.
  # None = where computing is slow (a CPU, 100M parameters or more) and
  # micro_batch_tokens is None; and with trees below 100M parameters.
  fit: bool | None = None
  # Samples that begin with the same tokens, as those of a group and the answers
  # of a pair do, share the ones that no loss reads, and those that train alike:
  # a row is a prefix tree, in training and scoring, and the numbers of every
  # token are the same to rounding. Rows are joined to one per device. None =
  # for pairs, except with kto; and where a policy or a frozen model samples
  # groups of several, of which the prompt may have an eighth of row_tokens or
  # more; never with model.attention=cudnn, which attends in rows of whole
  # samples, nor with mesh.sequence above 1, where a token's parent may lie on
  # another device.
  trees: bool | None = None
  # How often devices add up their gradients: at every 'micro_batch', each layer
  # gathered over the mesh's fsdp axis as it is needed; or once per 'update',
  # which saves communication and costs memory: every device then holds all
  # layers in the compute dtype, and its own float32 gradient of all weights.
  # Needs a mesh of data and fsdp alone.
  reduce_gradients: Annotated[str, bounds.one_of('micro_batch', 'update')] = (
    'micro_batch'
  )

  def __post_init__(self):
    super().__post_init__()
    bounds.require(
      self.max_draws is None or self.max_draws >= self.prompts_per_step,
      'max_draws',
      f'be None or >= prompts_per_step={self.prompts_per_step}',
      self.max_draws,
    )
    tokens, size = self.micro_batch_tokens or 0, self.packed_tokens
    bounds.require(
      tokens % size == 0,
      'micro_batch_tokens',
      f'be a multiple of joined_rows={self.joined_rows} * '
      f'row_tokens={self.row_tokens}, such as {tokens // size * size + size}',
      tokens,
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
  def bins(self) -> int:
    """Samples that a micro-batch of the largest size holds, however long."""
    return self.packed_rows if self.fit and not self.trees else self.rows

  @property
  def tokens_per_micro_batch(self) -> int:
    """`micro_batch_tokens`, once it is resolved (`stage.preflight`)."""
    assert self.micro_batch_tokens is not None, 'a size that is resolved'
    return self.micro_batch_tokens


class Rollout(bounds.Options):
  """The decode engine, for training and evaluation."""

  # Number of sequences decoded at a time, over all devices; empty slots cost as
  # much as full ones. None = as many as a step has samples, at most 256 per
  # device of data x sequence x fsdp x expert.
  slots: bounds.CountOrNone = 128
  # Number of tokens decoded between two checks of the slots, while episodes
  # wait for a slot or have further turns.
  chunk: bounds.Count = 16
  # Largest number of prompts prefilled at a time, and between two chunks; of
  # episodes more, while more slots are fed than decode.
  prefill_rows: bounds.Count = 32
  # Number of tokens of a prompt prefilled at a time.
  prefill_tokens: bounds.Count = 32
  # Copies the KV of whole chunks of prefill_tokens from a slot whose prompt
  # begins with the same tokens, instead of computing it again: a system
  # message, examples, the history of an episode that was rewritten. The slots
  # keep it until they are used again or the weights change: no further memory.
  # A prompt may then be fed by a program of another shape, which rounds
  # differently: a run that is resumed is not bitwise the uninterrupted one.
  prefix_cache: bool = False
  # The prompt of a group is stored and read once for all its samples: for
  # groups with long prompts, of stages on tokens. A slot holds prefill_tokens
  # and what follows a prompt: max_tokens of the samplers and of eval, or with
  # several turns their max_episode_tokens, which must be set. The prompts take
  # 2 / group_size of what they took, and up to as much again while decoding
  # reads a copy: less memory in groups of 5 or more, more in smaller ones.
  # Single prompts (an evaluation with one answer per task) are answered in
  # 2 / group_size of the slots at a time, unless they have one turn and at most
  # prefill_tokens.
  shared_prompts: bool = False
  # Keys and values in the cache: 'auto' = in the compute dtype; 'int8', with a
  # scale per token and kv head. The policy then samples by other numbers than
  # it is trained with: `mismatch/*` shows how far.
  cache_dtype: Annotated[str, bounds.one_of('auto', 'int8')] = 'auto'
  # Largest share of the rollouts of a step (or of an evaluation) that fail, in
  # their episode or in a reward; more stop the run. They leave their groups,
  # which is not a reward of 0. 1 = never stop.
  max_error_share: bounds.Share = 0.5
  # Number of threads for blocking environments, which wait for a network or a
  # process.
  env_threads: bounds.Count = 32
  # Time limit of a call into an environment, in seconds, without its judge's
  # time. A call that exceeds it is an error of its episode.
  env_timeout: bounds.Seconds = 300.0
  # Where blocking environments, and reward functions without a judge, are
  # called: 'threads' (and the functions' own processes), or processes of 'ray',
  # on this machine or in the cluster of RAY_ADDRESS. The numbers are the same.
  workers: Annotated[str, bounds.one_of('threads', 'ray')] = 'threads'
  # Number of Ray workers for the environments of a stage; each plays several
  # episodes at a time, in threads. As many as env_threads: one or a few each.
  num_workers: bounds.Count = 4
  # A blocking environment's reply is read this many chunks after the turn, if
  # other episodes decode meanwhile; a later reply is waited for.
  env_chunks: bounds.Count = 4
  # The other environments reply while the device decodes the next chunk,
  # instead of before it.
  overlap: bool = False
  # Frees the KV cache during the update, and allocates it anew to sample.
  sleep: bool = False
  # The lag of the sampling weights, in steps: batch n is sampled under the
  # weights after step max(0, n - 1 - max_lag), beside earlier updates. 0 =
  # sampling and training wait for each other.
  max_lag: bounds.CountOrZero = 0
  # Samples and trains in turns with max_lag > 0, too; the numbers are the same.
  in_turns: bool = False
  # Episodes may take several batches: a batch is made as soon as it has
  # prompts_per_step whole groups; the other episodes are held, and go on under
  # the weights of the next batch, in slots beside those of new groups. Each
  # token has its version. The numbers are the same on every run, but not after
  # a resume, which begins held episodes again.
  in_flight: bool = False
  # Where an episode can be held: before each turn, and within a turn after so
  # many sampled tokens; None = before turns alone.
  hold_tokens: bounds.CountOrNone = None
  # A group is in a batch at most so many batches after the one it began in.
  max_hold: bounds.Count = 2
  # A held episode keeps its KV cache, which is that of the older weights; False
  # = its history is prefilled again, under the new ones.
  keep_cache: bool = False
  # With max_lag > 0: the share of a step's samples that are also scored under
  # the weights that sampled them, for mismatch/rounding/*.
  rounding_share: bounds.Share = 0.05

  def __post_init__(self):
    super().__post_init__()
    bounds.require(
      not (self.keep_cache and self.sleep),
      'keep_cache',
      'be False with sleep, which frees the cache',
      self.keep_cache,
    )
    bounds.require(
      not (self.shared_prompts and (self.prefix_cache or self.in_flight)),
      'shared_prompts',
      'be False with prefix_cache or in_flight',
      self.shared_prompts,
    )

  @property
  def slot_count(self) -> int:
    """`slots`, once it is resolved (`stage.preflight`)."""
    assert self.slots is not None, 'a size that is resolved'
    return self.slots


class Eval(bounds.Options):
  """Answers to held-out tasks, at a stage's start and end."""

  # Steps between further evaluations; None = only at the start and the end.
  every: bounds.CountOrNone = None
  # Number of held-out tasks per environment (at most all that it has).
  prompts: bounds.Count = 500
  # Number of answers per task at temperature 1, besides the greedy answer; 0 =
  # none. Tasks have none that nothing grades.
  samples: Annotated[int, bounds.within(0, 1000)] = 8
  # Number of held-out tasks that are left out, before the reported ones: those
  # by which options or weights were chosen.
  skip: Annotated[int, bounds.within(0, 10**9)] = 0
  # Values of k for pass@k and maj@k, from all subsets of k answers at
  # temperature 1; k = samples is always measured.
  ks: tuple[int, ...] = ()
  # Further prompts (user messages), answered greedily in one turn without an
  # environment; the answers are shown before and after, and measured without
  # an expected answer: repetition, broken characters, refusals, syntax of code.
  suite: Annotated[
    tuple[str, ...],
    bounds.Rule(
      'hold prompts with text, each once',
      lambda x: all(map(str.strip, x)) and len(set(x)) == len(x),
    ),
  ] = ()
  # The data set of further prompts of the suite, rows as of data; a column
  # `refusal`, true or false, says whether it is right to refuse the prompt.
  suite_path: bounds.FileOrNone = None
  # Measures the KL of the policy to the stage's initial parameters, on one
  # sampled answer per task; keeps a copy of those parameters on the devices.
  kl: bool = False
  # Measures the KL of the policy to the teacher of environments with opd, on
  # the same answers.
  teacher_kl: bool = False
  # Longest answer (assistant turn), in tokens.
  max_tokens: bounds.Count = 64
  # About the most tokens that an evaluation samples of an environment: it plays
  # as many of `prompts` as fit, at least one. The evaluation before training
  # then leaves out the suite, answers that nothing grades, and those at
  # temperature 1; later ones cut answers of the suite at a 32nd of it. None =
  # no bound, but 2,048 where computing is slow (a CPU, 100M parameters).
  max_sampled_tokens: bounds.CountOrNone = None
  # Largest number of tokens after an episode's prompt, the environment's
  # messages included; None = max_tokens times the number of turns, so the
  # environment's messages leave fewer tokens to the answers.
  max_episode_tokens: bounds.CountOrNone = None
  # Number of latest exchanges that the policy's context keeps after the prompt;
  # None = all.
  keep_exchanges: bounds.CountOrNone = None
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
  best_prompts: bounds.Count = 200
  # Number of evaluations in a row without a new best after which the stage
  # ends; None = it lasts `steps`.
  patience: bounds.CountOrNone = None
  # The value of `best` at whose first evaluation the stage ends, as where a
  # start for RL should solve a given share; None = no such value.
  stop_at: float | None = None

  def __post_init__(self):
    super().__post_init__()
    bounds.require(
      all(1 < k <= self.samples for k in self.ks),
      'ks',
      f'hold numbers above 1, up to samples={self.samples}',
      self.ks,
      'k = 1 is sampled_pass_rate',
    )
    bounds.require(
      self.best is None or self.selects_pairs or self.selects is not None,
      'best',
      "be None or a metric of an environment, as 'eval/pass_rate/ENV'",
      self.best,
    )
    for name in ('patience', 'stop_at'):
      value = getattr(self, name)
      bounds.require(
        value is None or None not in (self.best, self.every),
        name,
        'be None',
        value,
        'set best and every, too',
      )

  @property
  def selects(self) -> tuple[str, str] | None:
    """(metric, environment) of `best`; None = it is not of an environment."""
    match = re.fullmatch('eval/(.+)/([^/]+)', self.best or '')
    return (match[1], match[2]) if match and not self.selects_pairs else None

  def reports(self, first: int, count: int) -> bool:
    """Returns whether any of the held-out tasks from `first` on is reported."""
    return self.skip < first + count and first < self.skip + self.prompts

  @property
  def selects_pairs(self) -> bool:
    """Whether `best` is measured on held-out pairs."""
    return bool(self.best and self.best.startswith('eval/pairs/'))


Start = Annotated[
  bounds.Folder,
  bounds.Rule("be 'random', 'stage:NAME' or a path", lambda x: x != 'stage:'),
]


class Stage(bounds.Options):
  """One stage of a run."""

  # Type of the training examples: 'tokens' (streams per token), 'preference'
  # (two answers to a prompt, for DPO and similar losses), or 'ranking' (two
  # answers to a prompt, for a reward model).
  kind: Annotated[str, bounds.one_of(*KINDS)] = 'tokens'
  # Initial weights: 'random', 'stage:NAME', or the path of a workdir, a
  # checkpoint or a HuggingFace directory.
  init: Start = 'random'
  # Architecture of this stage's model; None = the run's.
  model: architecture.Model | None = None
  # Low-rank adaptation: trains a correction, and freezes the initial weights.
  lora: architecture.Lora = architecture.Lora()
  # Number of batches to train on.
  steps: bounds.Count = 1000
  # Name -> environment; every batch mixes them by their ratios. A stage on
  # pairs takes the tasks of sampled pairs from them, and evaluates on them.
  envs: dict[str, EnvEntry] = dataclasses.field(default_factory=dict)
  # Source of the pairs of a 'preference' or 'ranking' stage.
  pairs: Pairs = MadePairs()
  # Size and shape of a step.
  batch: Batch = Batch()
  # The decode engine, for rollouts and answers.
  rollout: Rollout = Rollout()
  # Options of the losses.
  loss: objective.Loss = objective.Loss()
  # Number of optimizer updates per batch, each a pass over the whole batch.
  updates_per_rollout: bounds.Count = 1
  # The optimizer, which has a new state in every stage.
  optim: Optim = Optim()
  # The critic of algorithm ppo.
  critic: Critic = Critic()
  # Evaluation on held-out tasks.
  eval: Eval = Eval()

  def __post_init__(self):
    super().__post_init__()
    bounds.require(
      self.kind != 'tokens' or self.has_tasks,
      'envs',
      'hold an environment with a ratio > 0',
      sorted(self.envs),
    )
    frozen = [
      name
      for name, entry in self.envs.items()
      if isinstance(entry.sampler, signals.Frozen)
    ]
    bounds.require(
      not (self.rollout.in_flight and (frozen or self.batch.max_draws)),
      'rollout.in_flight',
      'be False with batch.max_draws or a frozen sampler',
      self.rollout.in_flight,
    )

  @property
  def has_tasks(self) -> bool:
    """Whether there are tasks to train on, or to make pairs of.

    A stage on pairs needs none to answer `eval.suite`; `config.checks` refuses
    to train it.
    """
    return any(entry.ratio for entry in self.envs.values())


TRACKERS = ('tensorboard', 'wandb', 'trackio')


Devices = Annotated[
  int, bounds.Rule('be -1 or > 0', lambda x: x == -1 or x > 0)
]


class SamplerMesh(bounds.Options):
  """Number of devices per axis, for the models that sample and score."""

  # Devices of the axis that splits slots and rows.
  data: bounds.Count = 1
  # Devices of the axis that splits slots, rows and the weights that score.
  fsdp: bounds.Count = 1
  # Devices of the axis that splits heads, MLP width and vocabulary.
  tensor: bounds.Count = 1
  # Devices of the axis that splits slots, rows and experts.
  expert: bounds.Count = 1
  # Devices of the axis that splits slots, and the tokens of rows.
  sequence: bounds.Count = 1


class Mesh(bounds.Options):
  """Number of devices per axis; -1 (at most once) = all remaining devices."""

  # Devices of the axis that splits only the batch.
  data: Devices = -1
  # Devices of the axis that splits the batch, weights and optimizer state.
  fsdp: Devices = 1
  # Devices of the axis that splits heads, MLP width and vocabulary.
  tensor: Devices = 1
  # Devices of the axis that splits the batch and the experts.
  expert: Devices = 1
  # Devices of the axis that splits the tokens of a row, in training and in
  # scoring, for rows whose activations do not fit on one device; in decoding it
  # splits slots as data does. Rows are then no trees (batch.trees).
  sequence: Devices = 1
  # Devices of their own, the last ones, for the models that sample, score and
  # judge; the axes above then split the others. None = they share those.
  sampler: SamplerMesh | None = None

  def __post_init__(self):
    super().__post_init__()
    sizes = self.data, self.fsdp, self.expert, self.sequence, self.tensor
    bounds.require(
      sizes.count(-1) <= 1, 'data', 'be -1 on one axis at most', sizes
    )


class Checkpoint(bounds.Options):
  """When to save, and what to keep. A stage's last step is always saved."""

  # Steps between saves.
  every: bounds.Count = 100
  # Number of newest checkpoints to keep.
  keep_last: bounds.Count = 2
  # Also keeps the steps that are multiples of this; None = none.
  keep_every: bounds.CountOrNone = None


Trackers = Annotated[
  tuple[bounds.FunctionOrWord, ...],
  bounds.Rule(
    f"hold names of {TRACKERS}, or import paths 'package.module:Class', each "
    'once',
    lambda x: (
      all(y in TRACKERS or all(y.partition(':')) for y in x)
      and len(set(x)) == len(x)
    ),
  ),
]


class Metrics(bounds.Options):
  """Outputs of metrics besides metrics.jsonl."""

  # Other tools that get each row: 'tensorboard', 'wandb', 'trackio' (extras of
  # these names), or the class of one as 'package.module:Class'.
  trackers: Trackers = ()
  # Shows a bar on stderr, or lines where there is no terminal.
  progress: bool = True
  # Seconds between those lines.
  log_seconds: bounds.Seconds = 60.0
  # Steps between files of a step's rollouts, prompts, texts and rewards,
  # WORKDIR/rollouts/<stage>_train_<step>.jsonl; the first step has one too.
  # None = no files.
  rollouts_every: bounds.CountOrNone = 10
  # Steps between exports of each packed sequence, with every stream of its
  # tokens, to WORKDIR/token_exports; None = no exports.
  export_tokens: bounds.CountOrNone = None


Limit = Annotated[float, bounds.within(0, bounds.LONGEST)]


class Watchdog(bounds.Options):
  """Limits of the time without progress."""

  # Seconds without progress before a line on stderr names the phase and what it
  # waits for; 0 = no watchdog.
  seconds: Limit = 600.0
  # The least of both limits in the first rollout, update, save and so on of a
  # stage, which compile.
  first_seconds: Limit = 3600.0
  # Seconds without progress before the run writes the stacks of its threads to
  # stderr and ends with exit code 4, so that a scheduler starts it again; None
  # = never. One update, one save and one call of a reward function or
  # environment must take less.
  exit_seconds: Annotated[float | None, bounds.within(0, bounds.LONGEST)] = None

  def __post_init__(self):
    super().__post_init__()
    bounds.require(
      self.exit_seconds is None or self.exit_seconds >= self.seconds > 0,
      'exit_seconds',
      f'be None or >= the {self.seconds:g} of seconds, which are > 0',
      self.exit_seconds,
    )


class Run(bounds.Options):
  """The whole config: shared keys, and one subtree per stage."""

  # Seed of the initial weights, the tasks, their order, and sampling.
  seed: bounds.CountOrZero = 0
  # Folder of the persistent compilation cache; None = no cache.
  compilation_cache: bounds.Compiled = '~/.cache/posttrain/compiled'
  # Architecture of the policy, unless a stage sets its own.
  model: architecture.Model = architecture.Model()
  # Tokenizer of all stages.
  tokenizer: architecture.Tokenizer = architecture.Tokenizer()
  # Layout of the devices.
  mesh: Mesh = Mesh()
  # When checkpoints are saved and deleted.
  checkpoint: Checkpoint = Checkpoint()
  # Outputs of metrics.
  metrics: Metrics = Metrics()
  # What happens without progress.
  watchdog: Watchdog = Watchdog()
  # Name -> stage, in running order.
  stages: Annotated[dict[str, Stage], bounds.Rule('name a stage', bool)] = (
    dataclasses.field(default_factory=dict)
  )
