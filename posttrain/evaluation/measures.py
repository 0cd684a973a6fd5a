"""Measures of held-out tasks.

- `reward/<name>`: the value of a reward function, or of a reward model where it
  is loaded, of the greedy answer;
- `sampled_reward/<name>`: its mean over the answers at temperature 1;
- `reward`, `pass_rate` and `format_rate`, and with `sampled_`: the same of the
  environment's own grade;
- `nll`: -log p of the demonstration, nats per token of its assistant turns at
  temperature 1, where answers are not graded;
- `token_accuracy`: the share of the same tokens that are the most likely one
  after the true tokens before them.

A reward function that fails gives its answers no value, and an error.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from posttrain import schema, types
from posttrain.chat import rendering
from posttrain.metrics import estimates
from posttrain.rollout import grading

# {environment: {name: the rewards of this function alone, with weight 1}}
Functions = Mapping[str, Mapping[str, grading.Rewards]]
# Of the environment: {name: field of the score}
GRADES = {
  'reward': 'reward',
  'pass_rate': 'correct',
  'format_rate': 'formatted',
}
Score = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
# A measure of each task, None for a task without it, and the tasks' weights in
# the mean.
Values = tuple[list[float | None], list[float]]


def functions(
  envs: Mapping[str, schema.EnvEntry],
  reward_model: Callable[[str], grading.Model] | None = None,
  judge: Callable[[schema.Reference], grading.Judge] | None = None,
) -> Functions:
  """Imports each reward function.

  Args:
    envs: the entries of a stage.
    reward_model: returns the reward model of a name; None = no reward model is
      measured.
    judge: returns the judge of a reference; None = no judged reward is
      measured.

  Raises:
    ValueError: a path names no function.
  """

  return {
    env: {
      name: grading.Rewards(
        env,
        {name: dataclasses.replace(cfg, weight=1.0)},
        judge=judge,
        reward_model=reward_model,
      )
      for name, cfg in entry.rewards.items()
      if (cfg.model is None or reward_model is not None)
      and (cfg.judge is None or judge is not None)
      and (cfg.model or cfg.fn)
    }
    for env, entry in envs.items()
  }


class Measures:
  """Measures greedy answers, and the demonstrations of their tasks."""

  def __init__(
    self, functions: Functions, score: Score, renderer: rendering.Renderer
  ):
    """Holds functions, scorer and renderer.

    Args:
      functions: from `functions`.
      score: returns, for all tokens of sequences, f32[T, 2] each: logprobs
        under the policy at temperature 1, and whether the token is the most
        likely one, 0 or 1.
      renderer: renders demonstrations.
    """
    self._functions, self._score = functions, score
    self._renderer = renderer

  def __call__(
    self, env: str, greedy: Sequence[types.Rollout], tasks: Sequence[types.Task]
  ) -> tuple[dict[str, Values], tuple[str, ...]]:
    """Returns ({name: value per task}, errors of reward functions).

    A task without a value has None.

    Args:
      env: the environment's name.
      greedy: the greedy rollout of each task; () = they are not played.
      tasks: the tasks.
    """
    values, errors = self.rewards(env, greedy)
    if not any(rollout.score.correct is not None for rollout in greedy):
      values |= self._likelihood(tasks)
    return values, errors

  def reward(self, env: str) -> bool:
    """Returns whether it measures rewards of the environment's answers."""
    return bool(self._functions.get(env))

  def rewards(
    self, env: str, rollouts: Sequence[types.Rollout]
  ) -> tuple[dict[str, Values], tuple[str, ...]]:
    """Returns ({'reward/<name>': value per rollout}, errors of functions).

    And the environment's own `GRADES`.

    Args:
      env: the environment's name.
      rollouts: answers to its tasks.
    """
    values, errors = {}, ()
    for name, function in self._functions.get(env, {}).items():
      scored, _, faults = function(rollouts)
      errors += faults
      known = [x.score.reward if x.samples else None for x in scored]
      values[f'reward/{name}'] = known, [1.0] * len(known)
    for name, field in GRADES.items():
      own = [getattr(x.score, field) for x in rollouts]
      values[name] = own, [1.0] * len(own)
    return values, errors

  def _likelihood(self, tasks: Sequence[types.Task]) -> dict[str, Values]:
    """Returns both measures of demonstrations, weighted by tokens.

    {} without demonstrations.
    """
    parts = [
      (index, part)
      for index, task in enumerate(tasks)
      if task.demonstration is not None
      for part in self._renderer.of(task).demonstrate(
        (*task.prompt, *task.demonstration), len(task.prompt)
      )
    ]
    if not parts:
      return {}
    scores = self._score([part.ids for _, part in parts])
    sizes, known = [0] * len(tasks), []
    for (index, part), own in zip(parts, scores, strict=True):
      known += (own[part.sampled] * (-1, 1)).tolist()
      sizes[index] += int(part.sampled.sum())
    nll, accuracy = zip(*known, strict=True)
    return {
      'nll': grouped(nll, sizes),
      'token_accuracy': grouped(accuracy, sizes),
    }


def grouped(values: Sequence[float | None], sizes: Sequence[int]) -> Values:
  """Returns the mean of each group, weighted by its number of known values.

  Args:
    values: one per answer, group after group; None = not known.
    sizes: the number of answers of each group.
  """
  means, weights, start = [], [], 0
  for size in sizes:
    known = [x for x in values[start : start + size] if x is not None]
    means.append(sum(known) / len(known) if known else None)
    weights.append(float(len(known)))
    start += size
  return means, weights


def summary(name: str, values: Values) -> dict[str, float]:
  """Returns the weighted mean over the tasks that have the measure.

  And the bounds `<name>_low` and `<name>_high` of its 95 % interval over tasks:
  `estimates.interval`. Without a known value {}, without an interval the mean
  alone.
  """
  known = [(x, w) for x, w in zip(*values, strict=True) if x is not None]
  if not known:
    return {}
  bounds = estimates.interval(
    *zip(*known, strict=True), is_rate=estimates.is_rate(name, values[0])
  )
  mean = sum(x * w for x, w in known) / sum(w for _, w in known)
  names = (name + side for side in ('', *estimates.BOUNDS))
  return dict(zip(names, (mean, *(bounds or ())), strict=False))
