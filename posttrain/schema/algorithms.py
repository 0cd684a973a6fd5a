"""Options of the algorithms, one dataclass per type.

A type with its defaults is the vetted setting.
"""

import dataclasses
from typing import Any

from posttrain.schema import base, references

ROLES = ('system', 'user', 'assistant', 'tool')
# Where a hint's template shows the demonstration.
PLACE = '{demonstration}'


@dataclasses.dataclass(frozen=True)
class Sft:
  """Supervised fine-tuning: cross-entropy on the completion tokens."""

  # Which algorithm this is; fixed.
  type: str = 'sft'


@dataclasses.dataclass(frozen=True)
class Efficiency:
  """Right answers are worth up to twice as much, the cheaper the more."""

  # Which penalty this is; fixed.
  type: str = 'efficiency'
  # Cost of a sampled token.
  completion_weight: float = 1.0
  # Cost of a token that a tool said.
  tool_weight: float = 1.0
  # Cost of an assistant turn.
  turn_weight: float = 0.0

  def __post_init__(self):
    _require_weights(self, 'completion_weight', 'tool_weight', 'turn_weight')


@dataclasses.dataclass(frozen=True)
class Linear:
  """A group that is solved often pays for its length."""

  # Which penalty this is; fixed.
  type: str = 'linear'
  # Price of the sampled tokens, relative to the group's longest.
  output_weight: float = 0.25
  # The same of all other tokens of the episode.
  input_weight: float = 0.1
  # The same of the assistant turns.
  turn_weight: float = 0.1

  def __post_init__(self):
    _require_weights(self, 'output_weight', 'input_weight', 'turn_weight')


def _require_weights(node, *fields: str) -> None:
  base.require_non_negative(node, *fields)
  base.require(
    any(getattr(node, field) for field in fields),
    fields[0],
    'be > 0, or another of the weights',
    0.0,
    'a penalty without a price does nothing; set length_penalty to None',
  )


LengthPenalty = Efficiency | Linear


@dataclasses.dataclass(frozen=True)
class _PolicyGradient:
  """What all that train the rl component by a reward have in common."""

  # Weight of the KL to `reference`, on every action token; 0 = no reference.
  kl_beta: float = 0.0
  # Model of that KL: 'init' (the stage's initial parameters), 'policy',
  # 'ema:DECAY' or 'snapshot:STEPS' (its moving average, or an earlier copy),
  # 'stage:NAME', the path of a workdir, a checkpoint or a HuggingFace
  # directory, or an endpoint.
  reference: references.Reference = 'init'
  # Tokens with advantage exactly 0 leave the rl loss and its denominator.
  prune_zero_advantage: bool = True

  def __post_init__(self):
    base.require_non_negative(self, 'kl_beta')
    references.require(self, 'reference')
    base.require(
      self.kl_beta > 0 or self.reference == 'init',
      'reference',
      "be left at 'init'",
      self.reference,
      'nothing reads it where kl_beta is 0',
    )


@dataclasses.dataclass(frozen=True)
class Grpo(_PolicyGradient):
  """Policy gradient with the group's mean reward as the baseline."""

  # Which algorithm this is; fixed.
  type: str = 'grpo'
  # What divides the advantages: 'none', 'group' (standard deviation of the
  # group's rewards) or 'batch' (of all the environment's in the step).
  scale_rewards: str = 'none'
  # What length costs; None = nothing.
  length_penalty: LengthPenalty | None = None

  def __post_init__(self):
    super().__post_init__()
    base.require_choice(self, 'scale_rewards', ('none', 'group', 'batch'))


@dataclasses.dataclass(frozen=True)
class MaxRl(_PolicyGradient):
  """Rewards relative to the group's mean: more weight on hard tasks."""

  # Which algorithm this is; fixed.
  type: str = 'max_rl'
  # Subtract the mean before dividing by it: less noise, one order less.
  baseline: bool = True


@dataclasses.dataclass(frozen=True)
class Rloo(_PolicyGradient):
  """Policy gradient with the mean of the others' rewards as the baseline."""

  # Which algorithm this is; fixed.
  type: str = 'rloo'
  # What length costs; None = nothing.
  length_penalty: LengthPenalty | None = None


@dataclasses.dataclass(frozen=True)
class Reward(_PolicyGradient):
  """Policy gradient of the reward itself, without a baseline."""

  # Which algorithm this is; fixed.
  type: str = 'reward'


@dataclasses.dataclass(frozen=True)
class Custom(_PolicyGradient):
  """Policy gradient with the credit that a function of yours gives."""

  # Which algorithm this is; fixed.
  type: str = 'custom'
  # 'package.module:function' of (inputs, **kwargs), see `algorithms.custom`.
  import_path: str = ''
  # What else it is given.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    super().__post_init__()
    base.require_import_path(self, 'import_path')


@dataclasses.dataclass(frozen=True)
class EchoRole:
  """How much of what one role says is learned."""

  # Cross-entropy weight of each of its tokens.
  alpha: float = 0.1

  def __post_init__(self):
    base.require_positive(self, 'alpha')


@dataclasses.dataclass(frozen=True)
class EchoFilter:
  """A function of yours that says which tokens are kept."""

  # 'package.module:function' of (rollout, **kwargs) -> one list of bools per
  # sample; None = no filter.
  import_path: str | None = None
  # What else it is given.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if self.import_path is not None:
      base.require_import_path(self, 'import_path')
    base.require(
      self.import_path is not None or not self.kwargs,
      'kwargs',
      'be left empty',
      self.kwargs,
      'nothing reads it without import_path',
    )


@dataclasses.dataclass(frozen=True)
class Echo(_PolicyGradient):
  """GRPO, and cross-entropy on what the environment says."""

  # Which algorithm this is; fixed.
  type: str = 'echo'
  # As in grpo.
  scale_rewards: str = 'none'
  # As in grpo.
  length_penalty: LengthPenalty | None = None
  # Role -> how much of what it says is learned. Setting it replaces the table.
  roles: dict[str, EchoRole] = dataclasses.field(
    default_factory=lambda: {'tool': EchoRole()}
  )
  # Only tool messages of these names; empty = of all.
  tools: tuple[str, ...] = ()
  # Narrows the selection further.
  filter: EchoFilter = EchoFilter()

  def __post_init__(self):
    super().__post_init__()
    base.require_choice(self, 'scale_rewards', ('none', 'group', 'batch'))
    base.require(
      bool(self.roles),
      'roles',
      f'enable one of {ROLES} at least',
      self.roles,
      'without any, this is grpo',
    )
    for role in self.roles:
      base.require(role in ROLES, 'roles', f'name roles of {ROLES}', role)
    base.require(
      not self.tools or 'tool' in self.roles,
      'tools',
      'be left empty',
      self.tools,
      "roles has no 'tool' to choose from",
    )


@dataclasses.dataclass(frozen=True)
class Opd:
  """On-policy distillation: reverse KL to a frozen teacher."""

  # Which algorithm this is; fixed.
  type: str = 'opd'
  # The teacher: 'init', 'ema:DECAY', 'snapshot:STEPS', 'stage:NAME', a path
  # or an endpoint.
  reference: references.Reference = ''

  def __post_init__(self):
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
  """On-policy self-distillation: the teacher has seen a demonstration."""

  # Which algorithm this is; fixed.
  type: str = 'opsd'
  # The teacher: 'policy', or whatever opd takes.
  reference: references.Reference = 'policy'
  # What it has seen: 'demonstration' or 'answer' of the task, 'info.KEY' of
  # its info, or 'package.module:function' of a task that returns the text.
  demonstration: str = 'demonstration'
  # How it is told, with {demonstration} once.
  template: str = (
    'For this conversation you have been shown how it is done well:\n'
    '<demonstration>\n{demonstration}\n</demonstration>'
  )
  # Who tells it: 'system' or 'user', for templates that know no system.
  role: str = 'system'

  def __post_init__(self):
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
      self.template.count(PLACE) == 1,
      'template',
      f'hold {PLACE} once',
      self.template,
    )
    base.require_choice(self, 'role', ('system', 'user'))


Algorithm = Sft | Grpo | MaxRl | Rloo | Reward | Custom | Echo | Opd | Opsd
