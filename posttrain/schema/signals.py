"""Options of where rollouts and their training signal come from.

References (models that are used and not trained), samplers, rewards, and the
algorithms, one dataclass per type.
"""

import dataclasses
import math
import re
from typing import Annotated, Any

from posttrain.schema import bounds

Address = Annotated[
  str,
  'server',
  bounds.Rule(
    "begin with 'http://' or 'https://' and a host",
    lambda x: re.match('https?://[^/]', x) is not None,
  ),
]


class Endpoint(bounds.Options):
  """A model on an OpenAI-compatible server."""

  # Which kind of reference this is; fixed.
  type: str = 'endpoint'
  # The model's name on the server; '' = the only one that it serves.
  name: str = ''
  # Base URL of the API, such as 'http://127.0.0.1:8000/v1'.
  base_url: Address = ''
  # Name of the environment variable with the API key; '' = no key.
  api_key_env: bounds.Variable = ''
  # Time limit of a whole answer, from the request to its last byte, in seconds.
  timeout: bounds.Seconds = 120.0
  # Number of attempts at a request, for a busy server, a server error or a
  # timeout; the pauses between them grow from 1 to 30 seconds, or are those of
  # the server's Retry-After, at most 600.
  tries: bounds.Count = 10
  # Largest number of concurrent requests.
  concurrency: bounds.Count = 16

  @property
  def address(self) -> str:
    """`base_url` without its user and password, and without a last slash."""
    return re.sub(r'(?<=//)[^?#]*@', '', self.base_url).rstrip('/')

  def __str__(self) -> str:
    return f'{self.name} at {self.address}'.removeprefix(' at ')


# Kind -> regex of its number: a decay in (0, 1), or at least 2 steps.
_EMA_AND_SNAPSHOT = {'ema': r'0\.\d*[1-9]\d*', 'snapshot': r'[2-9]|[1-9]\d+'}


def ema_or_snapshot(reference: str | Endpoint) -> tuple[str, float] | None:
  """Parses 'ema:DECAY' and 'snapshot:STEPS', copies of the policy in the state.

  Returns:
    The kind and its number; None for other references.
  """
  if not isinstance(reference, str):
    return None
  kind, _, number = reference.partition(':')
  if kind not in _EMA_AND_SNAPSHOT or not re.fullmatch(
    _EMA_AND_SNAPSHOT[kind], number
  ):
    return None
  return kind, float(number)


def stage_of(name: str) -> str | None:
  """Returns NAME of 'stage:NAME', None for other references."""
  kind, _, stage = name.partition(':')
  return stage if kind == 'stage' else None


def is_path(name: str) -> bool:
  """Returns whether a reference, or an `init`, is a path."""
  known = name in ('init', 'policy', 'random') or stage_of(name) is not None
  return not known and ema_or_snapshot(name) is None


def _is_reference(value: Any) -> bool:
  """Returns whether a value is in the grammar of references."""
  if isinstance(value, Endpoint):
    return True
  kind = value.partition(':')[0]
  if kind in _EMA_AND_SNAPSHOT:
    return ema_or_snapshot(value) is not None
  return not (value in ('', 'random', 'stage:') or kind in ('http', 'https'))


_IN_GRAMMAR = bounds.Rule(
  "be 'init', 'policy', 'ema:0.99', 'snapshot:50', 'stage:NAME', a path, or a "
  'node {"type": "endpoint", "name": ..., "base_url": ...} (a teacher: '
  '--config=opd:DIR,PROMPTS.jsonl,teacher=DIR)',
  _is_reference,
)
_FROZEN = bounds.Rule(
  "be frozen ('init', 'stage:NAME', a path or an endpoint)",
  lambda x: x != 'policy' and ema_or_snapshot(x) is None,
)
Reference = Annotated[str | Endpoint, 'folder', _IN_GRAMMAR]
FrozenReference = Annotated[Reference, _FROZEN]
FrozenOrNone = Annotated[str | Endpoint | None, 'folder', _IN_GRAMMAR, _FROZEN]
RewardModel = Annotated[
  str | None,
  'folder',
  bounds.Rule(
    "be 'stage:NAME' or a path",
    lambda x: x != 'init' and _is_reference(x) and _FROZEN.allows(x),
  ),
]


class Dataset(bounds.Options):
  """Replays the demonstrations of the environment's tasks."""

  # Which sampler this is; fixed.
  type: str = 'dataset'
  # A sample longer than a row: 'error' = raises, 'truncate' = is cut on the
  # right and loses its end of turn, 'drop' = is left out. They are counted.
  too_long: Annotated[str, bounds.one_of('error', 'truncate', 'drop')] = 'error'


class _Episodes(bounds.Options):
  """Options of every sampler of episodes. Abstract."""

  # Longest turn, in tokens; an episode may have several turns.
  max_tokens: bounds.Count = 64
  # Largest number of tokens after an episode's prompt, the environment's
  # messages included; None = as many as fit into a row.
  max_episode_tokens: bounds.CountOrNone = None
  # Number of latest exchanges (a turn and the environment's reply) that the
  # model's context keeps after the prompt; None = all. A turn whose context
  # lost an exchange is a separate sample.
  keep_exchanges: bounds.CountOrNone = None
  # A prompt that leaves no token of a row for an answer: 'error' = raises,
  # 'drop' = its task is left out. They are counted.
  too_long: Annotated[str, bounds.one_of('error', 'drop')] = 'error'


class Policy(_Episodes):
  """Samples from the trained policy.

  There is no top-p, top-k or min-p: `sampler_logprobs` are those of the
  untruncated distribution, and are wrong for tokens from a truncated one.
  Evaluation and serving have these options.
  """

  # Which sampler this is; fixed.
  type: str = 'policy'
  # Divisor of the logits; the losses use the same temperature.
  temperature: bounds.Positive = 1.0


class Frozen(_Episodes):
  """Samples from a frozen model, for the policy to imitate."""

  # Which sampler this is; fixed.
  type: str = 'frozen'
  # The model: 'init', 'stage:NAME', a path, or an endpoint.
  model: FrozenReference = ''
  # Divisor of the logits; 0 = greedy decoding.
  temperature: bounds.NonNegative = 1.0


Sampler = Dataset | Policy | Frozen


class Curriculum(bounds.Options):
  """Draws tasks by their recent pass rates, see `posttrain.data.curricula`."""

  # Which curriculum this is; fixed.
  type: str = 'pass_rate'
  # Key of the tasks' `info` whose values are the pools, each with a pass rate,
  # as 'length' of reverse_text or 'difficulty' of sql. None = each task has its
  # own.
  pool: str | None = None
  # Smallest pass rate of the target band, which is drawn most. A pool below it
  # is drawn in proportion to its pass rate.
  low: bounds.Share = 0.2
  # Largest pass rate of the band. A pool above it is drawn in proportion to its
  # rate of failures.
  high: bounds.Share = 0.8
  # Share of the draws that are uniform over all tasks, so that solved ones are
  # retained, and unsolved ones are tried again.
  floor: bounds.Share = 0.1
  # Share of the draws among tasks that were solved, but have a pass rate below
  # `low`.
  rare: bounds.Share = 0.0
  # Number of latest groups of a task, or pool, that its pass rate is about the
  # mean of; 1 = the latest group alone.
  memory: bounds.Count = 8

  def __post_init__(self):
    super().__post_init__()
    bounds.require(
      self.low <= self.high, 'low', f'be <= high={self.high}', self.low
    )
    bounds.require(
      self.floor + self.rare <= 1,
      'rare',
      f'be at most 1 - floor={1 - self.floor:g}',
      self.rare,
    )


class Replay(bounds.Options):
  """Trains on recent groups again, see `posttrain.pipeline.replay`."""

  # Which replay this is; fixed.
  type: str = 'groups'
  # Share of the environment's groups that are taken from earlier steps, and not
  # sampled; fewer where no group is left.
  share: Annotated[float, bounds.Rule('be in (0, 1)', lambda x: 0 < x < 1)] = (
    0.25
  )
  # A group is trained again at most so many steps after its own, and once.
  max_age: bounds.Count = 4


class RewardFn(bounds.Options):
  """One summand: a function, or a reward model.

  The summand named `env` is the environment's grade, and has neither.
  """

  # 'package.module:function', with TRL's signature, see
  # `rollout.grading`.
  fn: bounds.FunctionOrNone = None
  # A reward model: 'stage:NAME', or the path of a stage of kind 'ranking'.
  model: RewardModel = None
  # Factor in the sum.
  weight: Annotated[
    float, bounds.Rule('be finite and not 0', lambda x: 0 < abs(x) < math.inf)
  ] = 1.0
  # Keyword arguments of the function.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
  # Model that the function gets as `judge`; None = none.
  judge: FrozenOrNone = None
  # Time limit of a call of the function, in seconds, without its judge's time.
  timeout: bounds.Seconds = 60.0
  # Whether the function is called for each group as soon as the last episode of
  # the group has ended, while others still play, instead of once per step with
  # all groups. Calls may overlap if it has a judge. None = if its judge is on a
  # server.
  per_group: bool | None = None
  # Whether the function runs in a process of its own, which is killed after
  # the timeout; False = a thread. One of posttrain, a Python callable and one
  # with a judge run in a thread anyway; with rollout.workers='ray' Ray has the
  # process.
  isolate: bool = True
  # Memory that an isolated function may allocate after its import, in MiB of
  # address space, which libraries of GPUs reserve as well; None = no limit.
  memory: Annotated[int | None, bounds.within(1, 2**24)] = None
  # Whether the function is called once before anything is compiled, on invented
  # completions, so that a wrong result is an error at once; never with a judge.
  probe: bool = True

  def __post_init__(self):
    super().__post_init__()
    bounds.require(
      None in (self.fn, self.model), 'fn', 'be None if model is set', self.fn
    )
    bounds.require(
      not self.per_group
      or (self.fn is not None and not isinstance(self.judge, str)),
      'per_group',
      'be False or None without a function or with a judge in this process',
      self.per_group,
    )


ROLES = ('system', 'user', 'assistant', 'tool')
# Placeholder of the demonstration in a hint's template.
PLACEHOLDER = '{demonstration}'


class Sft(bounds.Options):
  """Supervised fine-tuning: cross-entropy on the completion tokens."""

  # Which algorithm this is; fixed.
  type: str = 'sft'
  # Factor of the loss. Values below 1 preserve behaviour that training on other
  # environments would change.
  weight: bounds.Positive = 1.0
  # Leaves rollouts that a token budget cut off out of the loss.
  mask_truncated: bool = False


class _Penalty(bounds.Options):
  """A penalty with weights, one of which is not 0. Abstract."""

  def __post_init__(self):
    super().__post_init__()
    weights = [x.name for x in dataclasses.fields(self) if 'weight' in x.name]
    bounds.require(
      any(getattr(self, x) for x in weights),
      weights[0],
      'be > 0, or another of the weights',
      0.0,
      'set length_penalty to None for no penalty',
    )


class Efficiency(_Penalty):
  """A bonus of up to 100% on the group's best reward for a low cost."""

  # Which penalty this is; fixed.
  type: str = 'efficiency'
  # Cost per sampled token.
  completion_weight: bounds.NonNegative = 1.0
  # Cost per token of tool messages.
  tool_weight: bounds.NonNegative = 1.0
  # Cost per assistant turn.
  turn_weight: bounds.NonNegative = 0.0


class Linear(_Penalty):
  """A penalty on length that grows with the group's mean reward."""

  # Which penalty this is; fixed.
  type: str = 'linear'
  # Factor of the number of sampled tokens, relative to the group's largest.
  output_weight: bounds.NonNegative = 0.25
  # Factor of the number of all other tokens of the episode, likewise.
  input_weight: bounds.NonNegative = 0.1
  # Factor of the number of assistant turns, likewise.
  turn_weight: bounds.NonNegative = 0.1


class Overlong(bounds.Options):
  """A penalty on episodes that come close to their limit of tokens.

  Soft overlong punishment (Yu et al., DAPO, arXiv 2503.14476, eq. 13).
  """

  # Which penalty this is; fixed.
  type: str = 'overlong'
  # Number of sampled tokens in an episode at which the penalty is largest: set
  # it to the sampler's limit.
  max_tokens: bounds.Count = 64
  # Number of tokens over which the penalty grows linearly from 0, before that.
  buffer: bounds.Count = 16
  # The largest penalty, on the scale of the rewards.
  weight: bounds.Positive = 1.0

  def __post_init__(self):
    super().__post_init__()
    bounds.require(
      self.buffer <= self.max_tokens,
      'buffer',
      f'be <= max_tokens={self.max_tokens}',
      self.buffer,
    )


LengthPenalty = Efficiency | Linear | Overlong


class _PolicyGradient(bounds.Options):
  """Options of every algorithm that trains the rl component. Abstract."""

  # Weight of the KL to `reference`, on every sampled token; 0 = no reference.
  kl_beta: bounds.NonNegative = 0.0
  # Reference model of the KL: 'init' (the stage's initial parameters),
  # 'policy', 'ema:DECAY' or 'snapshot:STEPS' (a moving average, or an earlier
  # copy, of the policy), 'stage:NAME', the path of a workdir, a checkpoint or a
  # HuggingFace directory, or an endpoint.
  reference: Reference = 'init'
  # Leaves tokens with an advantage of exactly 0 out of the rl loss and its
  # denominator.
  prune_zero_advantage: bool = True
  # Leaves rollouts that a token budget cut off out of the loss; their rewards
  # stay in the baseline of their group.
  mask_truncated: bool = False


Divisor = Annotated[str, bounds.one_of('none', 'group', 'batch')]


class Grpo(_PolicyGradient):
  """Policy gradient with the group's mean reward as the baseline."""

  # Which algorithm this is; fixed.
  type: str = 'grpo'
  # Divisor of the advantages: 'none', 'group' (standard deviation of the
  # group's rewards) or 'batch' (standard deviation of all rewards of the
  # environment in the step).
  scale_rewards: Divisor = 'none'
  # Adjusts rewards by length: 'efficiency', 'linear' or 'overlong'; None = no
  # adjustment.
  length_penalty: LengthPenalty | None = None


class MaxRl(_PolicyGradient):
  """Rewards relative to the group's mean: more weight on hard tasks."""

  # Which algorithm this is; fixed.
  type: str = 'max_rl'
  # Subtracts the mean reward before dividing by it: less variance, and one
  # term less of the series.
  baseline: bool = True


class Rloo(_PolicyGradient):
  """Policy gradient with a leave-one-out baseline."""

  # Which algorithm this is; fixed.
  type: str = 'rloo'
  # Adjusts rewards by length: 'efficiency', 'linear' or 'overlong'; None = no
  # adjustment.
  length_penalty: LengthPenalty | None = None


class Reward(_PolicyGradient):
  """Policy gradient of the reward, without a baseline."""

  # Which algorithm this is; fixed.
  type: str = 'reward'


class Ppo(bounds.Options):
  """Policy gradient with a critic (PPO); its options are `loss.value`."""

  # Which algorithm this is; fixed.
  type: str = 'ppo'
  # Weight of the KL to `reference`, see `Grpo`.
  kl_beta: bounds.NonNegative = 0.0
  # Reference model of the KL, see `Grpo`.
  reference: Reference = 'init'
  # Leaves rollouts that a token budget cut off out of the loss.
  mask_truncated: bool = False
  # Whether the critic's value stands for what would follow a rollout that a
  # token budget cut off. False = its end counts as the episode's end, because
  # its reward is for the text as it is.
  bootstrap: bool = False


class Custom(_PolicyGradient):
  """Advantages of the user's function, or all hooks of the user's class."""

  # Which algorithm this is; fixed.
  type: str = 'custom'
  # 'package.module:function' of (inputs, **kwargs), see `algorithms.custom`; or
  # a subclass of `algorithms.base.Algorithm`, made with (options, **kwargs).
  import_path: bounds.Function = ''
  # Keyword arguments of the function or class.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


class EchoRole(bounds.Options):
  """Cross-entropy on the messages of one role."""

  # Cross-entropy weight per token of the role's messages.
  alpha: bounds.Positive = 0.1


class EchoFilter(bounds.Options):
  """A user's function that selects tokens."""

  # 'package.module:function' of (rollout, **kwargs), which returns one array of
  # bools per sample, True = keep; None = no filter.
  import_path: bounds.FunctionOrNone = None
  # Keyword arguments of the function.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


class Echo(_PolicyGradient):
  """GRPO, and cross-entropy on the environment's messages."""

  # Which algorithm this is; fixed.
  type: str = 'echo'
  # Divisor of the advantages, see `Grpo`.
  scale_rewards: Divisor = 'none'
  # Adjusts rewards by length, see `Grpo`.
  length_penalty: LengthPenalty | None = None
  # Role -> its cross-entropy. A value replaces the whole table.
  roles: Annotated[dict[str, EchoRole], bounds.some_of(*ROLES)] = (
    dataclasses.field(default_factory=lambda: {'tool': EchoRole()})
  )
  # Names of the tools whose messages are learned; () = all tools.
  tools: tuple[str, ...] = ()
  # Selects among the remaining tokens.
  filter: EchoFilter = EchoFilter()


class Opd(bounds.Options):
  """On-policy distillation: reverse KL to a frozen teacher."""

  # Which algorithm this is; fixed.
  type: str = 'opd'
  # The teacher model: 'init', 'ema:DECAY', 'snapshot:STEPS', 'stage:NAME', a
  # path or an endpoint.
  reference: Annotated[
    Reference, bounds.Rule('be another model', lambda x: x != 'policy')
  ] = ''
  # Factor of the loss. With the reference 'init', values below 1 preserve
  # behaviour that training on other environments would change.
  weight: bounds.Positive = 1.0
  # Leaves rollouts that a token budget cut off out of the loss.
  mask_truncated: bool = False


Demonstration = Annotated[
  str,
  'function',
  bounds.Rule(
    "be 'demonstration', 'answer', 'info.KEY' or 'package.module:function'",
    lambda x: bool(re.match(r'(demonstration|answer|info\..+|.*:.*)$', x)),
  ),
]


class Opsd(bounds.Options):
  """On-policy self-distillation: the teacher's prompt has a demonstration."""

  # Which algorithm this is; fixed.
  type: str = 'opsd'
  # The teacher model: 'policy', or a reference of opd. With the present policy
  # as the teacher, both may collapse together.
  reference: Reference = 'init'
  # Source of the demonstration: 'demonstration' or 'answer' (of the task),
  # 'info.KEY' (of the task's info), or 'package.module:function', a function of
  # the task that returns the text.
  demonstration: Demonstration = 'demonstration'
  # Content of the hint, which must contain {demonstration} once.
  template: Annotated[
    str,
    bounds.Rule(
      f'hold {PLACEHOLDER} once', lambda x: x.count(PLACEHOLDER) == 1
    ),
  ] = (
    'For this conversation you have been shown how it is done well:\n'
    '<demonstration>\n{demonstration}\n</demonstration>'
  )
  # Role of the message that the hint is put into: 'system' or 'user'. Chat
  # templates without system messages get it in the user message either way.
  role: Annotated[str, bounds.one_of('system', 'user')] = 'system'
  # Factor of the loss.
  weight: bounds.Positive = 1.0
  # Leaves rollouts that a token budget cut off out of the loss.
  mask_truncated: bool = False


Algorithm = (
  Sft | Grpo | MaxRl | Rloo | Reward | Ppo | Custom | Echo | Opd | Opsd
)
