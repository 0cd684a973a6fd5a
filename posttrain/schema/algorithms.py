"""Options of the algorithms, one dataclass per type."""

import dataclasses

from posttrain.schema import base


@dataclasses.dataclass(frozen=True)
class Sft:
  """Supervised fine-tuning: cross-entropy on the completion tokens."""

  type: str = 'sft'


@dataclasses.dataclass(frozen=True)
class Grpo:
  """Policy gradient with the group's mean reward as the baseline."""

  type: str = 'grpo'
  # What divides the advantages: 'none', 'group' (standard deviation of the
  # group's rewards) or 'batch' (of all the environment's in the step).
  scale_rewards: str = 'none'
  # Weight of the KL to `reference`, on every action token; 0 = no reference.
  kl_beta: float = 0.0
  # Model of that KL: 'init' (the stage's initial parameters), 'policy',
  # 'stage:NAME', or the path of a workdir or checkpoint.
  reference: str = 'init'
  # Tokens with advantage exactly 0 leave the rl loss and its denominator.
  prune_zero_advantage: bool = True

  def __post_init__(self):
    base.require_choice(self, 'scale_rewards', ('none', 'group', 'batch'))
    base.require_non_negative(self, 'kl_beta')
    base.require_reference(self, 'reference')
    base.require(
        self.kl_beta > 0 or self.reference == 'init', 'reference',
        "be left at 'init'", self.reference,
        'nothing reads it where kl_beta is 0',
    )
