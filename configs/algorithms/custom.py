"""custom: a function of yours writes the credit, here a price per token.

    python -m posttrain.main --config=configs/algorithms/custom.py --workdir=DIR

grpo on the reward less 0.002 per sampled token.

Expected, on 250 unseen questions, seeds 0, 1, 2: sampled 0.573, 0.555,
0.252 after the start, 0.909, 0.890, 0.532 after; greedy 0.968, 0.948, 0.576,
then 0.992, 0.992, 0.716. The length of answers stays: no right answer is
shorter. Two cores of an AMD EPYC: four minutes.

Tried: 32 questions: sampled 0.881, 0.854, 0.435, greedy 0.988, 0.980, 0.640;
  and see grpo.py.
"""

from configs import algorithms, arguments
from posttrain import schema


def centered(inputs, price: float) -> list[list[float]]:
  """Returns rewards less a price per token, relative to the group's mean."""
  pairs = zip(inputs.rewards, inputs.completion_lengths, strict=True)
  values = [reward - price * length for reward, length in pairs]
  mean = sum(values) / len(values)
  return inputs.broadcast([value - mean for value in values])


START = algorithms.imitation(150, sums=algorithms.SUMS)
MAIN = algorithms.trial(
  100,
  prompts=64,
  sums=schema.EnvEntry(
    env=algorithms.SUMS,
    algorithm=schema.Custom(
      import_path='configs.algorithms.custom:centered', kwargs={'price': 0.002}
    ),
    sampler=algorithms.SAMPLER,
    group_size=8,
  ),
)


def get_config(argument: str = ''):
  arguments.check_word(argument, 'tiny')
  config = algorithms.config_dict(start=START, main=MAIN)
  if argument == 'tiny':
    algorithms.shrink(config, unpruned='sums')
  return config
