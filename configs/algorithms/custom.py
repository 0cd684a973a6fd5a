"""custom: credit by a function of yours, here one that likes short answers.

    python -m posttrain.main --config=configs/algorithms/custom.py --workdir=DIR

grpo less a price per token. Measured with seed 0 on two busy cores, 250 unseen
questions: sampled answers right 0.576 of the time after the start, 0.714
after; their length stays, for there is no shorter way to be right; two and a
half minutes.
"""

from configs import algorithms
from posttrain import schema


def get_config(argument: str = ''):
  tiny = algorithms.is_tiny(argument)
  sums = schema.EnvEntry(
    env=algorithms.SUMS,
    sampler=algorithms.SAMPLED,
    group_size=8,
    algorithm=schema.Custom(
      import_path='configs.algorithms.custom:centered',
      kwargs={'price': 0.002},
      prune_zero_advantage=not tiny,
    ),
  )
  return algorithms.run(
    tiny,
    start=algorithms.warm(tiny, 150, sums=algorithms.SUMS),
    main=algorithms.trial(tiny, 60, prompts=32, sums=sums),
  )


def centered(inputs, price: float) -> list[list[float]]:
  """The reward less a price per token, relative to the group's mean."""
  pairs = zip(inputs.rewards, inputs.completion_lengths, strict=True)
  worth = [reward - price * length for reward, length in pairs]
  mean = sum(worth) / len(worth)
  return inputs.broadcast([one - mean for one in worth])
