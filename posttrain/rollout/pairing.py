"""Preference pairs from rollouts: a correct answer against an incorrect one.

Equal answers to a task count once. The first pairs of a task share no answer;
if it has fewer correct than incorrect answers, or the reverse, the rarer ones
are reused in the next pairs. Equal tasks count once. If an environment shows a
task by several prompts, the answers to each prompt are paired separately.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from posttrain import schema, types
from posttrain.data import preferences
from posttrain.envs import base, rows
from posttrain.metrics import statistics
from posttrain.rollout import env_calls, episodes
from posttrain.util import errors

# Above the uids of training rollouts and of evaluations.
FIRST_UID = 2**62 + 2**49
_TASK_UIDS = 2**12
_ADVICE = {
  'train': 'sample another policy, or raise pairs.samples',
  'eval': 'raise pairs.eval_prompts or pairs.samples, or set eval_prompts to '
  'None: a share of the training prompts is held out then',
  'ungraded': 'pairs need grades of right and wrong, as gsm8k has them; values '
  'of reward functions are none',
}


@dataclasses.dataclass
class Count:
  """The numbers of tasks, answers and pairs; see `line`."""

  tasks: int = 0  # times the number of prompts that show it
  answers: int = 0
  errors: int = 0
  cut: int = 0  # answers with a turn cut by a token budget
  ungraded: int = 0
  contradicted: int = 0  # equal answers graded both ways
  repeated: int = 0
  correct: int = 0  # distinct ones
  incorrect: int = 0  # distinct ones
  one_sided: int = 0  # tasks without a correct or without an incorrect answer
  pairs: int = 0

  def line(self) -> str:
    """Returns the counts as a sentence."""
    return (
      f'{self.pairs} pairs of {self.tasks} tasks with {self.answers} answers '
      f'({self.correct} correct and {self.incorrect} incorrect ones that '
      f'differ; {self.repeated} repeated, {self.cut} cut, {self.ungraded} '
      f'not graded, {self.contradicted} graded both ways, {self.errors} '
      f'failed); {self.one_sided} tasks had but one kind'
    )


def make(
  envs: Mapping[str, base.Env],
  driver: episodes.Driver,
  cfg: schema.MadePairs,
  seed: int,
  max_error_share: float,
  split: str = 'train',
) -> tuple[list[preferences.Preference], Count]:
  """Samples answers to tasks of every environment, and pairs them.

  Args:
    envs: the environments by name; `cfg.prompts` tasks of each are used.
    driver: runs the episodes with its engine's weights.
    cfg: options of the pairs and of sampling.
    seed: the seed of the tasks and of the choice among answers.
    max_error_share: the largest share of failed episodes.
    split: 'train', or 'eval': `cfg.eval_prompts` of the held-out tasks.

  Raises:
    TooManyErrors: environments failed too often.
    ValueError: no task has both a correct and an incorrect answer.
  """
  pairs, count, all_rollouts = [], Count(), []
  for index, (name, env) in enumerate(envs.items()):
    tasks = first_tasks(env, cfg, seed, driver.env_timeout, split)
    first = FIRST_UID + index * 2**40 + (split == 'eval') * 2**39
    played = driver.run(
      [
        episodes.EpisodeSpec(
          first + i * _TASK_UIDS + k, env, task, cfg.temperature, cfg.max_tokens
        )
        for i, task in enumerate(tasks)
        for k in range(cfg.samples)
      ]
    )
    all_rollouts += played
    for i, task in enumerate(tasks):
      group = played[i * cfg.samples : (i + 1) * cfg.samples]
      count.answers += len(group)
      by_prompt = {}  # prompt -> usable rollouts
      # In random order, so that frequent answers are likely to come first.
      order = np.random.default_rng((seed, index, i)).permutation(len(group))
      for rollout in (group[k] for k in order):
        # An episode may continue after a turn that was cut.
        ends = {rollout.stop_reason, *(x.stop_reason for x in rollout.turns)}
        if rollout.stop_reason == 'error':
          count.errors += 1
        elif ends & {'max_tokens', 'overflow'}:
          count.cut += 1
        elif rollout.score.correct is None:
          count.ungraded += 1
        else:
          by_prompt.setdefault(repr(rollout.prompt), []).append(rollout)
      pairs += [
        preferences.Preference(
          same[0].prompt,
          chosen,
          rejected,
          f'{name}/{task.id}',
          info={'env': name, 'id': task.id}
          | ({'chat_template_kwargs': x} if (x := task.variables) else {}),
          variables=task.variables,
        )
        for same in (list(by_prompt.values()) or [[]])
        for chosen, rejected in _choose(same, cfg.per_prompt, count)
      ]
  statistics.failures(all_rollouts, max_error_share)
  if not pairs:
    advice = _ADVICE['ungraded' if count.ungraded else split]
    raise ValueError(
      f'answers to the {split} split must be both correct and incorrect to '
      f'make pairs: got {count.line()}; {advice}'
    )
  return pairs, count


def first_tasks(
  env: base.Env,
  cfg: schema.MadePairs,
  seed: int,
  timeout: float,
  split: str = 'train',
) -> list[types.Task]:
  """Returns the first distinct tasks of a split in the order of a seed.

  Tasks are equal if prompt, answer and info are: tasks with equal prompts may
  be shown by different ones.

  Raises:
    ValueError: the environment grades nothing, or a task has tools, which pairs
      do not store.
  """
  if isinstance(env, rows.Rows):
    raise ValueError(
      f'envs.{env.name}.env must grade answers: got rows; '
      f'{_ADVICE["ungraded"]}; or write pairs into a file of rows with chosen '
      'and rejected, for the recipe dpo'
    )
  count = cfg.eval_prompts if split == 'eval' else cfg.prompts
  source, tasks = env_calls.Source(env, split, seed, timeout), {}
  for _ in range(len(source)):
    if len(tasks) == count:
      break
    task = next(source)
    if task.tools is not None:
      raise ValueError(
        f'envs.{errors.text(env.name)}.env must have tasks without tools, as '
        'prompts of pairs have none: got some'
      )
    tasks.setdefault(repr((task.prompt, task.answer, task.info)), task)
  return list(tasks.values())


def _choose(
  group: Sequence[types.Rollout], limit: int, count: Count
) -> list[tuple[types.Messages, types.Messages]]:
  """Returns (correct, incorrect) answers to one prompt; adds to `count`."""
  answers = {True: {}, False: {}}
  for rollout in group:
    messages = rollout.completion_messages
    distinct = answers[rollout.score.correct]
    count.repeated += repr(messages) in distinct
    distinct.setdefault(repr(messages), messages)
  for key in answers[True].keys() & answers[False].keys():
    count.contradicted += 2
    del answers[True][key], answers[False][key]
  right, wrong = (list(answers[side].values()) for side in (True, False))
  n = min(limit, max(len(right), len(wrong))) if right and wrong else 0
  count.tasks += 1
  count.correct += len(right)
  count.incorrect += len(wrong)
  count.one_sided += not n
  count.pairs += n
  return [(right[i % len(right)], wrong[i % len(wrong)]) for i in range(n)]
