"""Options of the samplers: where an environment's rollouts come from."""

import dataclasses

from posttrain.schema import base, references


def require_budgets(node) -> None:
  """Refuses budgets of an episode that leave it nothing."""
  for field in ('max_episode_tokens', 'keep_exchanges'):
    value = getattr(node, field)
    base.require(value is None or value > 0, field, 'be None or > 0', value)


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Replays the demonstrations that the environment's tasks carry."""

  # Which sampler this is; fixed.
  type: str = 'dataset'
  # A sample longer than a row: 'error', or 'truncate' (cut on the right).
  too_long: str = 'error'

  def __post_init__(self):
    base.require_choice(self, 'too_long', ('error', 'truncate'))


@dataclasses.dataclass(frozen=True)
class Policy:
  """Samples from the policy that is trained.

  There is no top-p, top-k or min-p on purpose: `sampler_logprobs` are those
  of the untruncated law, and tokens drawn from a truncated one would be
  weighed against a law that they were not drawn from. Evaluation and serving
  have them.
  """

  # Which sampler this is; fixed.
  type: str = 'policy'
  # Logits are divided by it; the losses compare logprobs at the same one.
  temperature: float = 1.0
  # Longest turn, in tokens; an episode may have several.
  max_tokens: int = 64
  # Tokens that an episode may add to its prompt, the environment's words
  # included; None = what a row holds.
  max_episode_tokens: int | None = None
  # Behind the prompt the policy sees at most so many of the last exchanges (a
  # turn and what the environment said to it); None = all. Each turn that sees
  # less than the one before is a sample of its own.
  keep_exchanges: int | None = None

  def __post_init__(self):
    base.require_positive(self, 'temperature', 'max_tokens')
    require_budgets(self)


@dataclasses.dataclass(frozen=True)
class Frozen:
  """Samples from a model that does not train, for others to imitate."""

  # Which sampler this is; fixed.
  type: str = 'frozen'
  # The model: 'init', 'stage:NAME', a path, or an endpoint.
  model: references.Reference = ''
  # Logits are divided by it; 0 = the likeliest token.
  temperature: float = 1.0
  # Longest turn, in tokens; an episode may have several.
  max_tokens: int = 64
  # Tokens that an episode may add to its prompt, the environment's words
  # included; None = what a row holds.
  max_episode_tokens: int | None = None
  # Behind the prompt the policy sees at most so many of the last exchanges (a
  # turn and what the environment said to it); None = all. Each turn that sees
  # less than the one before is a sample of its own.
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
