"""Options of the algorithms, one dataclass per type."""

import dataclasses
from typing import Any

from posttrain.schema import base, references

ROLES = ('system', 'user', 'assistant', 'tool')
# Placeholder of the demonstration in a hint's template.
PLACEHOLDER = '{demonstration}'


@dataclasses.dataclass(frozen=True)
class Sft:
  """Supervised fine-tuning: cross-entropy on the completion tokens."""

  # Which algorithm this is; fixed.
  type: str = 'sft'
  # Factor of the loss. Values below 1 preserve behaviour that training on other
  # environments would change.
  weight: float = 1.0

  def __post_init__(self):
    base.require_positive(self, 'weight')


@dataclasses.dataclass(frozen=True)
class Efficiency:
  """A bonus of up to 100% on the group's best reward for a low cost."""

  # Which penalty this is; fixed.
  type: str = 'efficiency'
  # Cost per sampled token.
  completion_weight: float = 1.0
  # Cost per token of tool messages.
  tool_weight: float = 1.0
  # Cost per assistant turn.
  turn_weight: float = 0.0

  def __post_init__(self):
    _require_weights(self, 'completion_weight', 'tool_weight', 'turn_weight')


@dataclasses.dataclass(frozen=True)
class Linear:
  """A penalty on length that grows with the group's mean reward."""

  # Which penalty this is; fixed.
  type: str = 'linear'
  # Factor of the number of sampled tokens, relative to the group's largest.
  output_weight: float = 0.25
  # Factor of the number of all other tokens of the episode, likewise.
  input_weight: float = 0.1
  # Factor of the number of assistant turns, likewise.
  turn_weight: float = 0.1

  def __post_init__(self):
    _require_weights(self, 'output_weight', 'input_weight', 'turn_weight')


@dataclasses.dataclass(frozen=True)
class Overlong:
  """A penalty on episodes that come close to their limit of tokens.

  Soft overlong punishment (Yu et al., DAPO, arXiv 2503.14476, eq. 13).
  """

  # Which penalty this is; fixed.
  type: str = 'overlong'
  # Number of sampled tokens in an episode at which the penalty is largest: set
  # it to the sampler's limit.
  max_tokens: int = 64
  # Number of tokens over which the penalty grows linearly from 0, before that.
  buffer: int = 16
  # The largest penalty, on the scale of the rewards.
  weight: float = 1.0

  def __post_init__(self):
    base.require_positive(self, 'max_tokens', 'buffer', 'weight')
    base.require(
      self.buffer <= self.max_tokens,
      'buffer',
      f'be <= max_tokens={self.max_tokens}',
      self.buffer,
    )


def _require_weights(node: Any, *fields: str) -> None:
  base.require_non_negative(node, *fields)
  base.require(
    any(getattr(node, field) for field in fields),
    fields[0],
    'be > 0, or another of the weights',
    0.0,
    'a penalty with weights of 0 does nothing; set length_penalty to None',
  )


LengthPenalty = Efficiency | Linear | Overlong


@dataclasses.dataclass(frozen=True)
class _PolicyGradient:
  """Options of every algorithm that trains the rl component. Abstract."""

  # Weight of the KL to `reference`, on every sampled token; 0 = no reference.
  kl_beta: float = 0.0
  # Reference model of the KL: 'init' (the stage's initial parameters),
  # 'policy', 'ema:DECAY' or 'snapshot:STEPS' (a moving average, or an earlier
  # copy, of the policy), 'stage:NAME', the path of a workdir, a checkpoint or a
  # HuggingFace directory, or an endpoint.
  reference: references.Reference = 'init'
  # Leaves tokens with an advantage of exactly 0 out of the rl loss and its
  # denominator.
  prune_zero_advantage: bool = True

  def __post_init__(self):
    base.require_non_negative(self, 'kl_beta')
    references.require(self, 'reference')


@dataclasses.dataclass(frozen=True)
class Grpo(_PolicyGradient):
  """Policy gradient with the group's mean reward as the baseline."""

  # Which algorithm this is; fixed.
  type: str = 'grpo'
  # Divisor of the advantages: 'none', 'group' (standard deviation of the
  # group's rewards) or 'batch' (standard deviation of all rewards of the
  # environment in the step).
  scale_rewards: str = 'none'
  # Adjusts rewards by length: 'efficiency', 'linear' or 'overlong'; None = no
  # adjustment.
  length_penalty: LengthPenalty | None = None

  def __post_init__(self):
    super().__post_init__()
    base.require_choice(self, 'scale_rewards', ('none', 'group', 'batch'))


@dataclasses.dataclass(frozen=True)
class MaxRl(_PolicyGradient):
  """Rewards relative to the group's mean: more weight on hard tasks."""

  # Which algorithm this is; fixed.
  type: str = 'max_rl'
  # Subtracts the mean reward before dividing by it: less variance, and one
  # term less of the series.
  baseline: bool = True


@dataclasses.dataclass(frozen=True)
class Rloo(_PolicyGradient):
  """Policy gradient with a leave-one-out baseline."""

  # Which algorithm this is; fixed.
  type: str = 'rloo'
  # Adjusts rewards by length: 'efficiency', 'linear' or 'overlong'; None = no
  # adjustment.
  length_penalty: LengthPenalty | None = None


@dataclasses.dataclass(frozen=True)
class Reward(_PolicyGradient):
  """Policy gradient of the reward, without a baseline."""

  # Which algorithm this is; fixed.
  type: str = 'reward'


@dataclasses.dataclass(frozen=True)
class Custom(_PolicyGradient):
  """Policy gradient with advantages of the user's function."""

  # Which algorithm this is; fixed.
  type: str = 'custom'
  # 'package.module:function' of (inputs, **kwargs), see `algorithms.custom`.
  import_path: base.Function = ''
  # Keyword arguments of the function.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    super().__post_init__()
    base.require_import_path(self, 'import_path')


@dataclasses.dataclass(frozen=True)
class EchoRole:
  """Cross-entropy on the messages of one role."""

  # Cross-entropy weight per token of the role's messages.
  alpha: float = 0.1

  def __post_init__(self):
    base.require_positive(self, 'alpha')


@dataclasses.dataclass(frozen=True)
class EchoFilter:
  """A user's function that selects tokens."""

  # 'package.module:function' of (rollout, **kwargs), which returns one array of
  # bools per sample, True = keep; None = no filter.
  import_path: base.FunctionOrNone = None
  # Keyword arguments of the function.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if self.import_path is not None:
      base.require_import_path(self, 'import_path')


@dataclasses.dataclass(frozen=True)
class Echo(_PolicyGradient):
  """GRPO, and cross-entropy on the environment's messages."""

  # Which algorithm this is; fixed.
  type: str = 'echo'
  # Divisor of the advantages, see `Grpo`.
  scale_rewards: str = 'none'
  # Adjusts rewards by length, see `Grpo`.
  length_penalty: LengthPenalty | None = None
  # Role -> its cross-entropy. A value replaces the whole table.
  roles: dict[str, EchoRole] = dataclasses.field(
    default_factory=lambda: {'tool': EchoRole()}
  )
  # Names of the tools whose messages are learned; () = all tools.
  tools: tuple[str, ...] = ()
  # Selects among the remaining tokens.
  filter: EchoFilter = EchoFilter()

  def __post_init__(self):
    super().__post_init__()
    base.require_choice(self, 'scale_rewards', ('none', 'group', 'batch'))
    base.require(
      bool(self.roles),
      'roles',
      f'enable one of {ROLES} at least',
      self.roles,
      'with no role, this is grpo',
    )
    for role in self.roles:
      base.require(role in ROLES, 'roles', f'name roles of {ROLES}', role)


@dataclasses.dataclass(frozen=True)
class Opd:
  """On-policy distillation: reverse KL to a frozen teacher."""

  # Which algorithm this is; fixed.
  type: str = 'opd'
  # The teacher model: 'init', 'ema:DECAY', 'snapshot:STEPS', 'stage:NAME', a
  # path or an endpoint.
  reference: references.Reference = ''
  # Factor of the loss. With the reference 'init', values below 1 preserve
  # behaviour that training on other environments would change.
  weight: float = 1.0

  def __post_init__(self):
    base.require_positive(self, 'weight')
    base.require(
      self.reference != '',
      'reference',
      'name a teacher',
      self.reference,
      "'stage:NAME', a path or an endpoint",
    )
    references.require(self, 'reference')
    base.require(
      self.reference != 'policy',
      'reference',
      'be another model',
      self.reference,
      'the KL of the policy to itself is 0',
    )


@dataclasses.dataclass(frozen=True)
class Opsd:
  """On-policy self-distillation: the teacher's prompt has a demonstration."""

  # Which algorithm this is; fixed.
  type: str = 'opsd'
  # The teacher model: 'policy', or a reference of opd. With the present policy
  # as the teacher, both may collapse together.
  reference: references.Reference = 'init'
  # Source of the demonstration: 'demonstration' or 'answer' (of the task),
  # 'info.KEY' (of the task's info), or 'package.module:function', a function of
  # the task that returns the text.
  demonstration: base.Function = 'demonstration'
  # Content of the hint, which must contain {demonstration} once.
  template: str = (
    'For this conversation you have been shown how it is done well:\n'
    '<demonstration>\n{demonstration}\n</demonstration>'
  )
  # Role of the message that the hint is put into: 'system' or 'user'. Chat
  # templates without system messages get it in the user message either way.
  role: str = 'system'
  # Factor of the loss.
  weight: float = 1.0

  def __post_init__(self):
    base.require_positive(self, 'weight')
    references.require(self, 'reference')
    known = self.demonstration in ('demonstration', 'answer')
    base.require(
      known
      or ':' in self.demonstration
      or self.demonstration[:5] == 'info.' != self.demonstration,
      'demonstration',
      "be 'demonstration', 'answer', 'info.KEY' or 'package.module:function'",
      self.demonstration,
    )
    base.require(
      self.template.count(PLACEHOLDER) == 1,
      'template',
      f'hold {PLACEHOLDER} once',
      self.template,
    )
    base.require_choice(self, 'role', ('system', 'user'))


Algorithm = Sft | Grpo | MaxRl | Rloo | Reward | Custom | Echo | Opd | Opsd
