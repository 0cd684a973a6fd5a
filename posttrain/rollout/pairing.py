"""Pairs out of rollouts: a correct answer is chosen, an incorrect one rejected.

Of each task's answers those that are the same count once. The first pairs of a
task share no answer; where it has fewer right ones than wrong ones, or the
reverse, the next ones take the rarer kind again. Tasks that are the same are
asked once. Where an environment shows a task by several prompts, each is paired
for itself.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from posttrain import schema, types
from posttrain.data import preferences
from posttrain.envs import base
from posttrain.metrics import rollouts as rollout_metrics
from posttrain.rollout import driver as drivers

# Neither of a rollout that trains, nor of an evaluation.
FIRST_UID = 2**62 + 2**49
_TASK_UIDS = 2**12
_ADVICE = {
  'train': 'ask another policy, or more often',
  'eval': 'raise pairs.eval_prompts or pairs.samples, or set eval_prompts to '
  'None: a share of the training prompts is held out then',
}


@dataclasses.dataclass
class Count:
  """What became of the answers; see `line`."""

  tasks: int = 0  # each as often as there are prompts that it was shown by
  answers: int = 0
  errors: int = 0
  cut: int = 0  # by a budget: such an answer, or a turn of it, has no end
  ungraded: int = 0
  contradicted: int = 0  # correct and incorrect ones that say the same
  repeated: int = 0
  correct: int = 0  # of those that are left
  incorrect: int = 0
  one_sided: int = 0  # tasks without a correct, or without an incorrect one
  pairs: int = 0

  def line(self) -> str:
    """What people read."""
    return (
      f'{self.pairs} pairs of {self.tasks} tasks with {self.answers} answers '
      f'({self.correct} correct and {self.incorrect} incorrect ones that '
      f'differ; {self.repeated} repeated, {self.cut} cut, {self.ungraded} '
      f'not graded, {self.contradicted} graded both ways, {self.errors} '
      f'failed); {self.one_sided} tasks had but one kind'
    )


def make(
  envs: Mapping[str, base.Env],
  driver: drivers.Driver,
  cfg: schema.MadePairs,
  seed: int,
  max_errors: int = 0,
  split: str = 'train',
) -> tuple[list[preferences.Preference], Count]:
  """Plays tasks of every environment, and pairs what was answered.

  Args:
    envs: whose tasks are asked, `cfg.prompts` of each.
    driver: plays them, by the weights that its engine has.
    cfg: how many, and how answers are sampled.
    seed: of the tasks and of the choice among answers.
    max_errors: of environments, that are put up with.
    split: 'train', or 'eval': `cfg.eval_prompts` of the held-out tasks.

  Raises:
    TooManyErrors: environments failed too often.
    ValueError: there is no pair to be had.
  """
  made, count, played = [], Count(), []
  for index, (name, env) in enumerate(envs.items()):
    tasks = asked(env, cfg, seed, split)
    first = FIRST_UID + index * 2**40 + (split == 'eval') * 2**39
    rollouts = iter(
      driver.run(
        [
          drivers.EpisodeSpec(
            first + i * _TASK_UIDS + k,
            env,
            task,
            cfg.temperature,
            cfg.max_tokens,
          )
          for i, task in enumerate(tasks)
          for k in range(cfg.samples)
        ]
      )
    )
    for i, task in enumerate(tasks):
      group = [next(rollouts) for _ in range(cfg.samples)]
      played += group
      made += _pairs(task, name, group, cfg.per_prompt, (seed, index, i), count)
  rollout_metrics.errors(played, max_errors)
  if not made:
    raise ValueError(
      f'answers to the {split} split must be correct and incorrect to make '
      f'pairs of: got {count.line()}; {_ADVICE[split]}'
    )
  return made, count


def asked(
  env: base.Env, cfg: schema.MadePairs, seed: int, split: str = 'train'
) -> list[types.Task]:
  """The first tasks of a split in the order of a seed, each once.

  By more than their prompts: an environment may show others than its tasks'.
  """
  count = cfg.eval_prompts if split == 'eval' else cfg.prompts
  source, found = env.source(split, seed), {}
  for _ in range(len(source)):
    if len(found) == count:
      break
    task = next(source)
    found.setdefault(repr((task.prompt, task.answer, task.info)), task)
  return list(found.values())


def _pairs(
  task: types.Task,
  env: str,
  group: Sequence[types.Rollout],
  limit: int,
  seed: tuple[int, ...],
  count: Count,
) -> list[preferences.Preference]:
  """The pairs of one task; adds to `count`."""
  shown = {}  # prompt -> answers to it that may be used
  # In random order, so that what is said often is likely to be taken.
  order = np.random.default_rng(seed).permutation(len(group))
  for rollout in (group[i] for i in order):
    why = _unusable(rollout)
    if why:
      setattr(count, why, getattr(count, why) + 1)
    else:
      shown.setdefault(repr(rollout.prompt), []).append(rollout)
  count.answers += len(group)
  return [
    preferences.Preference(
      rollouts[0].prompt,
      yes,
      no,
      f'{env}/{task.id}',
      info={'env': env, 'id': task.id},
    )
    for rollouts in (list(shown.values()) or [[]])
    for yes, no in _choose(rollouts, limit, count)
  ]


def _choose(
  rollouts: Sequence[types.Rollout], limit: int, count: Count
) -> list[tuple[types.Messages, types.Messages]]:
  """(Right, wrong) answers to one prompt; adds to `count`."""
  sides = {True: {}, False: {}}
  for rollout in rollouts:
    answers = sides[rollout.score.correct]
    count.repeated += repr(rollout.completion_messages) in answers
    answers.setdefault(
      repr(rollout.completion_messages), rollout.completion_messages
    )
  for said in sides[True].keys() & sides[False].keys():
    count.contradicted += 2
    del sides[True][said], sides[False][said]
  right, wrong = (list(sides[side].values()) for side in (True, False))
  found = min(limit, max(len(right), len(wrong))) if right and wrong else 0
  count.tasks += 1
  count.correct += len(right)
  count.incorrect += len(wrong)
  count.one_sided += not found
  count.pairs += found
  return [(right[i % len(right)], wrong[i % len(wrong)]) for i in range(found)]


def _unusable(rollout: types.Rollout) -> str | None:
  """Why an answer is in no pair: a field of `Count`; None if it may be."""
  if rollout.stop_reason == 'error':
    return 'errors'
  # An episode may go on behind a turn that was cut off.
  if rollout.stop_reason in ('max_tokens', 'overflow') or any(
    turn.stop_reason != 'eos' for turn in rollout.turns
  ):
    return 'cut'
  return 'ungraded' if rollout.score.correct is None else None
