"""Pairs out of rollouts: a correct answer is chosen, an incorrect one rejected.

Of each task's answers those that are the same count once. The first pairs of a
task share no answer; where it has fewer right ones than wrong ones, or the
reverse, the next ones take the rarer kind again. Tasks that ask the same are
asked once.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from posttrain import schema, types
from posttrain.data import pairs
from posttrain.envs import base
from posttrain.rollout import driver as drivers
from posttrain.rollout import summary

# Neither of a rollout that trains, nor of an evaluation.
FIRST_UID = 2**62 + 2**49
_TASK_UIDS = 2**12


@dataclasses.dataclass
class Count:
  """What became of the answers; see `line`."""

  tasks: int = 0
  answers: int = 0
  errors: int = 0
  cut: int = 0  # by a budget: such an answer has no end
  ungraded: int = 0
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
        f'not graded, {self.errors} failed); {self.one_sided} tasks had but '
        'one kind'
    )


def make(
    envs: Mapping[str, base.Env], driver: drivers.Driver,
    cfg: schema.MadePairs, seed: int, max_errors: int = 0,
    split: str = 'train',
) -> tuple[list[pairs.Pair], Count]:  # fmt: skip
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
    rollouts = iter(driver.play([
        drivers.Play(
            first + i * _TASK_UIDS + k, env, task, cfg.temperature,
            cfg.max_tokens,
        ) for i, task in enumerate(tasks) for k in range(cfg.samples)
    ]))  # fmt: skip
    for i, task in enumerate(tasks):
      group = [next(rollouts) for _ in range(cfg.samples)]
      played += group
      made += _pairs(task, name, group, cfg.per_prompt, (seed, index, i), count)
  summary.errors(played, max_errors)
  if not made:
    raise ValueError(
        'answers must be correct and incorrect to make pairs of: got '
        f'{count.line()}; ask another policy, or more often'
    )
  return made, count


def asked(
    env: base.Env, cfg: schema.MadePairs, seed: int, split: str = 'train'
) -> list[types.Task]:
  """The first tasks of a split in the order of a seed, each prompt once."""
  count = cfg.eval_prompts if split == 'eval' else cfg.prompts
  source, found = env.source(split, seed), {}
  for _ in range(len(source)):
    if len(found) == count:
      break
    task = next(source)
    found.setdefault(repr(task.prompt), task)
  return list(found.values())


def _pairs(
    task: types.Task, env: str, group: Sequence[types.Rollout], limit: int,
    seed: tuple[int, ...], count: Count,
) -> list[pairs.Pair]:  # fmt: skip
  """The pairs of one task; adds to `count`."""
  sides = {True: {}, False: {}}
  # In random order, so that what is said often is likely to be taken.
  order = np.random.default_rng(seed).permutation(len(group))
  for rollout in (group[i] for i in order):
    why = _unusable(rollout)
    if why:
      setattr(count, why, getattr(count, why) + 1)
      continue
    said = rollout.messages[len(task.prompt) :]
    answers = sides[rollout.score.correct]
    count.repeated += repr(said) in answers
    answers.setdefault(repr(said), said)
  right, wrong = (list(sides[side].values()) for side in (True, False))
  found = min(limit, max(len(right), len(wrong))) if right and wrong else 0
  chosen = [
      (right[i % len(right)], wrong[i % len(wrong)]) for i in range(found)
  ]
  count.tasks += 1
  count.answers += len(group)
  count.correct += len(right)
  count.incorrect += len(wrong)
  count.one_sided += not chosen
  count.pairs += len(chosen)
  return [
      pairs.Pair(
          task.prompt, yes, no, f'{env}/{task.id}',
          info={'env': env, 'id': task.id},
      ) for yes, no in chosen
  ]


def _unusable(rollout: types.Rollout) -> str | None:
  """Why an answer is in no pair: a field of `Count`; None if it may be."""
  if rollout.stop_reason == 'error':
    return 'errors'
  if rollout.stop_reason in ('max_tokens', 'overflow'):
    return 'cut'
  return 'ungraded' if rollout.score.correct is None else None
