"""Texts to reverse, few of which can be solved: a curriculum finds them.

    python -m posttrain.main --config=configs/algorithms/curriculum.py \\
        --workdir=DIR

Texts of 4 to 23 letters, after SFT on those of 4 to 8, which `short` measures.
`:uniform` draws the lengths evenly. `:replay` has the curriculum and trains on
a quarter of the groups again: at its rate it loses on short texts (greedy,
minus `:uniform`: -0.025 [-0.065, +0.017]).

Tried: two starts, five seeds of 60 steps of 32 x 8, docs/results.md; sampled
  0.029 before: uniform 0.031, curriculum 0.049, with replay 0.042.
"""

import dataclasses

from configs import algorithms, arguments
from posttrain import schema

TEXTS = schema.ReverseText(
  min_length=4,
  max_length=23,
  alphabet='abcdefghijkl',
  train_tasks=20_000,
  eval_tasks=1250,
)
SHORT = dataclasses.replace(TEXTS, max_length=8)
SAMPLER = schema.Policy(temperature=1.0, max_tokens=28)
_EXACT = 'configs.algorithms.curriculum:exact'
CURRICULUM = schema.Curriculum(pool='length')


def exact(completions, answer, **columns) -> list[float]:
  """Returns 1 for a right answer; the environment grades parts of it."""
  pairs = zip(completions, answer, strict=True)
  return [float(x[0]['content'].strip() == right) for x, right in pairs]


START = algorithms.imitation(105, short=SHORT)
MAIN = algorithms.trial(
  60,
  prompts=32,
  lr=4e-4,
  texts=schema.EnvEntry(
    env=TEXTS,
    algorithm=schema.Grpo(),
    sampler=SAMPLER,
    group_size=8,
    rewards={'exact': schema.RewardFn(fn=_EXACT)},
    curriculum=CURRICULUM,
  ),
  short=schema.EnvEntry(env=SHORT, ratio=0.0),
)


def get_config(argument: str = ''):
  arguments.check_word(argument, 'uniform', 'replay', 'tiny')
  entry = MAIN.envs['texts']
  if argument == 'uniform':
    entry = dataclasses.replace(entry, curriculum=None)
  elif argument == 'replay':
    entry = dataclasses.replace(entry, replay=schema.Replay())
  main = dataclasses.replace(MAIN, envs={**MAIN.envs, 'texts': entry})
  config = algorithms.config_dict(start=START, main=main)
  if argument == 'tiny':
    algorithms.shrink(config, unpruned='texts')
  return config
