"""echo: grpo that also learns the messages it reads; the pass rate falls.

    python -m posttrain.main --config=configs/algorithms/echo.py --workdir=DIR

Names to sort, more of them in a second turn; between the turns the environment
shows the right answer. SFT on the answers alone, then 80 steps of 64 tasks x 4
episodes.

Expected, on 250 unseen tasks, means of seeds 0, 1, 2: sampled pass rate 0.729
after the start, 0.706 after; greedy 0.791, then 0.781; any of 8 0.867, then
0.873: a model of this size has no room for both. The negative log-likelihood of
the environment's messages falls from 6.6 to 2.0 nats per token (seed 0). Two
busy cores of an AMD EPYC: seven minutes.

Tried:
  alpha 0.1, lr 3e-4, 60 steps of 32 x 4: 0.71 nats per token, pass rate 0.142.
"""

from configs import algorithms, arguments
from posttrain import schema

NAMES = schema.AlphabetSort(
  turns=2, first=2, more=1, role='tool', train_tasks=1000, eval_tasks=250
)
START = algorithms.imitation(300, row_tokens=128, names=NAMES)
MAIN = algorithms.trial(
  80,
  prompts=64,
  row_tokens=128,
  lr=1e-4,
  names=schema.EnvEntry(
    env=NAMES,
    # The default alpha, 0.1, is for pretrained language models.
    algorithm=schema.Echo(roles={'tool': schema.EchoRole(alpha=0.01)}),
    sampler=schema.Policy(temperature=1.0, max_tokens=24),
    group_size=4,
  ),
)


def get_config(argument: str = ''):
  arguments.check_word(argument, 'tiny')
  config = algorithms.config_dict(start=START, main=MAIN)
  if argument == 'tiny':
    algorithms.shrink(config, unpruned='names')
  return config
