"""Options of the samplers: the sources of an environment's rollouts."""

import dataclasses
from typing import Any

from posttrain.schema import base, references


def require_budgets(node: Any) -> None:
  """Checks that the budgets of an episode are None or > 0."""
  for field in ('max_episode_tokens', 'keep_exchanges'):
    value = getattr(node, field)
    base.require(value is None or value > 0, field, 'be None or > 0', value)


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Replays the demonstrations of the environment's tasks."""

  # Which sampler this is; fixed.
  type: str = 'dataset'
  # A sample longer than a row: 'error' = raises, 'truncate' = is cut on the
  # right.
  too_long: str = 'error'

  def __post_init__(self):
    base.require_choice(self, 'too_long', ('error', 'truncate'))


@dataclasses.dataclass(frozen=True)
class Policy:
  """Samples from the trained policy.

  There is no top-p, top-k or min-p: `sampler_logprobs` are those of the
  untruncated distribution, and are wrong for tokens from a truncated one.
  Evaluation and serving have these options.
  """

  # Which sampler this is; fixed.
  type: str = 'policy'
  # Divisor of the logits; the losses use the same temperature.
  temperature: float = 1.0
  # Longest turn, in tokens; an episode may have several turns.
  max_tokens: int = 64
  # Largest number of tokens after an episode's prompt, the environment's
  # messages included; None = as many as fit into a row.
  max_episode_tokens: int | None = None
  # Number of latest exchanges (a turn and the environment's reply) that the
  # model's context keeps after the prompt; None = all. A turn whose context
  # lost an exchange is a separate sample.
  keep_exchanges: int | None = None

  def __post_init__(self):
    base.require_positive(self, 'temperature', 'max_tokens')
    require_budgets(self)


@dataclasses.dataclass(frozen=True)
class Frozen:
  """Samples from a frozen model, for the policy to imitate."""

  # Which sampler this is; fixed.
  type: str = 'frozen'
  # The model: 'init', 'stage:NAME', a path, or an endpoint.
  model: references.Reference = ''
  # Divisor of the logits; 0 = greedy decoding.
  temperature: float = 1.0
  # Longest turn, in tokens; an episode may have several turns.
  max_tokens: int = 64
  # Largest number of tokens after an episode's prompt, the environment's
  # messages included; None = as many as fit into a row.
  max_episode_tokens: int | None = None
  # Number of latest exchanges (a turn and the environment's reply) that the
  # model's context keeps after the prompt; None = all. A turn whose context
  # lost an exchange is a separate sample.
  keep_exchanges: int | None = None

  def __post_init__(self):
    base.require(
      self.model != '',
      'model',
      'name a model',
      self.model,
      "'stage:NAME', a path or an endpoint",
    )
    references.require_frozen(self, 'model')
    base.require_positive(self, 'max_tokens')
    base.require_non_negative(self, 'temperature')
    require_budgets(self)


Sampler = Dataset | Policy | Frozen
