"""Options of the samplers: where an environment's rollouts come from."""

import dataclasses

from posttrain.schema import base, references


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

  def __post_init__(self):
    base.require_positive(self, 'temperature', 'max_tokens')


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

  def __post_init__(self):
    base.require(
        self.model != '', 'model', 'name a model', self.model,
        "'stage:NAME', a path or an endpoint",
    )
    references.require_frozen(self, 'model')
    base.require_positive(self, 'max_tokens')
    base.require_non_negative(self, 'temperature')
