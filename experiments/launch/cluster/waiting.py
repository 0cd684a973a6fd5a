"""A few steps of GRPO on an environment and a reward that wait; learns nothing.

python -m posttrain.main --config=experiments/launch/cluster/waiting.py
    --workdir=DIR [--config.grpo.rollout.workers=ray]
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from configs import arguments, machinery
from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import alphabet_sort, base


class Waiting(base.Env):
  """`alphabet_sort`, each of whose steps waits."""

  blocking = True

  def __init__(self, name: str, options: Mapping[str, Any], seconds: float):
    """Args: options: of `schema.AlphabetSort`; seconds: the wait of a step."""
    self._env = alphabet_sort.AlphabetSort(name, schema.AlphabetSort(**options))
    self.name, self.max_turns = name, self._env.max_turns
    self._seconds = seconds

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    return self._env.source(split, seed)

  def make(self, task: types.Task) -> base.Episode:
    return _Episode(self._env.make(task), self._seconds)


class _Episode:
  def __init__(self, episode: base.Episode, seconds: float):
    self._episode, self._seconds = episode, seconds
    self.reset, self.grade = episode.reset, episode.grade
    self.close = episode.close

  def step(self, text: str, truncated: bool) -> types.StepOut:
    time.sleep(self._seconds)
    return self._episode.step(text, truncated)


def letters(
  completions: Sequence[types.Messages], seconds: float = 0.0, **_: Any
) -> list[float]:
  """Returns the fraction of letters in the policy's turns, after a wait.

  It differs between the answers of a random policy, so that they train.
  """
  time.sleep(seconds)
  texts = [
    ''.join(x['content'] for x in messages if x['role'] == 'assistant')
    for messages in completions
  ]
  return [sum(map(str.isalpha, x)) / max(len(x), 1) for x in texts]


ENTRY = schema.EnvEntry(
  env=schema.CustomEnv(
    import_path='experiments.launch.cluster.waiting:Waiting',
    kwargs={'options': {'turns': 3}, 'seconds': 0.02},
  ),
  algorithm=schema.Grpo(),
  sampler=schema.Policy(max_tokens=12),
  rewards={
    'env': schema.RewardFn(),
    'letters': schema.RewardFn(
      fn='experiments.launch.cluster.waiting:letters', kwargs={'seconds': 0.02}
    ),
  },
  group_size=4,
)
GRPO = schema.Stage(
  init='random',
  envs={'sort': ENTRY},
  rollout=schema.Rollout(slots=8, prefill_rows=8, chunk=4, num_workers=2),
  steps=20,
  batch=schema.Batch(
    prompts_per_step=4, row_tokens=256, micro_batch_tokens=1024
  ),
  optim=schema.Optim(lr=1e-3),
  eval=schema.Eval(prompts=8, samples=2, max_tokens=12, every=10),
)


def get_config(argument: str = ''):
  """Returns the recipe; 'ray': in two Ray workers, '' = in threads."""
  arguments.check_word(argument, 'ray')
  rollout = dataclasses.replace(GRPO.rollout, workers='ray')
  if not argument:
    rollout = dataclasses.replace(GRPO.rollout, num_workers=4)
  return machinery.config_dict(
    schema.Run(
      model=schema.PRESETS['tiny'],
      checkpoint=schema.Checkpoint(every=5),
      stages={'grpo': dataclasses.replace(GRPO, rollout=rollout)},
    )
  )
