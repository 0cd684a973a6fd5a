"""Answers to held-out tasks, through the engine, graded by the environments.

Every task is answered once greedily and `samples` times at temperature 1, the
same random numbers at every evaluation, so that two of them differ by their
weights alone. The prompts of a suite are answered greedily as well, and graded
by nobody.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain import envs, schema, types
from posttrain.algorithms import base as algorithms
from posttrain.chat import renderer as chat
from posttrain.envs import suite as suites
from posttrain.metrics import rollouts as rollout_metrics
from posttrain.rollout import driver as drivers

FIRST_UID = 2**62  # no rollout that trains has one as high
_ENV_UIDS, _TASK_UIDS = 2**40, 2**12


@dataclasses.dataclass(frozen=True)
class Answer:
  """One greedy attempt at a held-out task."""

  env: str
  id: str
  prompt: str
  text: str
  answer: Any
  correct: bool | None
  formatted: bool | None
  reward: float | None
  stop_reason: str
  tokens: int
  error: str | None
  question: str  # the last message of the prompt
  messages: tuple[types.Message, ...]  # all behind the prompt
  turn_rewards: tuple[float, ...]  # the policy's turns, as they came
  metrics: dict[str, float]  # of the score
  # Which of the answers to the task at temperature 1 were correct; None = not
  # graded.
  sampled: tuple[bool | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class SuiteAnswer:
  """The greedy answer to a prompt of the suite."""

  prompt: str
  text: str
  stop_reason: str
  tokens: int


class Evaluator:
  """Answers the evaluation tasks of every environment of a stage."""

  def __init__(
    self,
    env_by_name: dict[str, envs.base.Env],
    renderer: chat.Renderer,
    cfg: schema.Eval,
    seed: int,
    max_errors: int = 0,
  ):
    """Draws the tasks and renders their prompts.

    Args:
      env_by_name: the environments.
      renderer: of the prompts.
      cfg: the options.
      seed: of the tasks.
      max_errors: of environments, that an evaluation puts up with.

    Raises:
      ValueError: a prompt cannot be rendered; names the row.
    """
    self._cfg = cfg
    self._max_errors = max_errors
    self._driver = self._scorer = None
    self._played: list[types.Rollout] = []  # in this evaluation
    self._tasks = {
      name: (env, env.source('eval', seed).take(cfg.prompts))
      for name, env in env_by_name.items()
    }
    self._suite = suites.Suite(cfg.suite)
    # Tokens of the longest prompt with all turns that may follow it.
    self.max_length = max(
      (
        *(
          longest(renderer, env, tasks, cfg)
          for env, tasks in self._tasks.values()
        ),
        *(
          _prompt_length(renderer, task) + cfg.max_tokens
          for task in self._suite.tasks
        ),
      ),
      default=0,
    )

  @property
  def asks(self) -> bool:
    """Whether there is anything to be answered."""
    asked = [tasks for _, tasks in self._tasks.values()]
    return any((*asked, self._suite.tasks))

  def connect(
    self, driver: drivers.Driver, scorer: algorithms.Scorer | None = None
  ) -> None:
    """Gives it who plays episodes; `scorer` is asked for 'init' with `kl`."""
    self._driver, self._scorer = driver, scorer

  def __call__(self) -> tuple[dict[str, float], list[Answer]]:
    """Plays with the engine's weights; values `eval/<name>/<env>`, answers.

    Raises:
      TooManyErrors: environments failed too often.
    """
    metrics, answers, self._played = {}, [], []
    for index, (name, (env, tasks)) in enumerate(self._tasks.items()):
      if not tasks:
        continue
      uid = FIRST_UID + index * _ENV_UIDS
      first = [one for (one,) in self._play(env, tasks, uid, 0.0, 1)]
      groups = self._sample(env, tasks, uid + 1, first)
      found = self._measure(env, first, groups)
      metrics |= {f'eval/{key}/{name}': v for key, v in found.items()}
      answers += [
        answer(one, group)
        for one, group in zip(first, groups or [()] * len(first), strict=True)
      ]
    rollout_metrics.errors(self._played, self._max_errors)
    return metrics, answers

  def answer_suite(self) -> list[SuiteAnswer]:
    """Answers the prompts of `eval.suite`, in their order."""
    uid = FIRST_UID + len(self._tasks) * _ENV_UIDS
    plays = [
      drivers.Play(
        uid + index * _TASK_UIDS, self._suite, task, 0.0, self._cfg.max_tokens
      )
      for index, task in enumerate(self._suite.tasks)
    ]
    found = [answer(one) for one in self._driver.play(plays)] if plays else []
    return [
      SuiteAnswer(x.prompt, x.text, x.stop_reason, x.tokens) for x in found
    ]

  @property
  def _ks(self) -> tuple[int, ...]:
    """Whose best and whose votes are measured; one answer has neither."""
    n = self._cfg.samples
    return (*self._cfg.ks, n) if n > 1 else self._cfg.ks

  def _sample(self, env, tasks, uid: int, first):
    """Answers to each task at temperature 1; [] where there is no need."""
    graded = any(one.score.correct is not None for one in first)
    if not (self._cfg.samples and graded):
      return []  # what is not graded is not worth sampling
    return self._play(env, tasks, uid, 1.0, self._cfg.samples)

  def _measure(self, env, first, groups) -> dict[str, float]:
    """One environment's values, without their prefix and suffix."""
    found = {
      **rollout_metrics.summarize(first),
      **rollout_metrics.stops(first),
      **rollout_metrics.bounds('pass_rate', [[x.score.correct] for x in first]),
      **rollout_metrics.bounds(
        'format_rate', [[x.score.formatted] for x in first]
      ),
    }
    flat = [rollout for group in groups for rollout in group]
    if groups:
      sampled = rollout_metrics.summarize(flat)
      found |= {
        'sampled_pass_rate': sampled.get('pass_rate'),
        **rollout_metrics.bounds(
          'sampled_pass_rate',
          [[x.score.correct for x in group] for group in groups],
        ),
        'sampled_format_rate': sampled.get('format_rate'),
        **rollout_metrics.best_of(
          groups, self._ks, getattr(env, 'votes', False)
        ),
        **rollout_metrics.entropy(flat),
        **self._kl([group[0] for group in groups]),
      }
    errors = sum(x.stop_reason == 'error' for x in (*first, *flat))
    return {
      **{k: v for k, v in found.items() if v is not None},
      'errors': errors,
    }

  def _kl(self, rollouts: list[types.Rollout]) -> dict[str, float]:
    """{'kl': E[log p - log p_init]} of what was sampled, nats per token."""
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    if not (self._cfg.kl and samples):
      return {}
    scored = self._scorer('init', samples)
    drift = [
      (sample.sampler_logprobs - logprobs)[sample.mask]
      for sample, logprobs in zip(samples, scored, strict=True)
    ]
    return {'kl': float(np.mean(np.concatenate(drift)))}

  def _play(
    self, env, tasks, uid: int, temperature: float, count: int
  ) -> list[list[types.Rollout]]:
    """Plays every task so many times; a group per task."""
    assert self._driver is not None, 'connect comes first'
    played = self._driver.play(
      [
        drivers.Play(
          uid + index * _TASK_UIDS + i,
          env,
          task,
          temperature,
          self._cfg.max_tokens,
          self._cfg.max_episode_tokens,
          self._cfg.keep_exchanges,
        )
        for index, task in enumerate(tasks)
        for i in range(count)
      ]
    )
    self._played += played
    played = iter(played)
    return [[next(played) for _ in range(count)] for _ in tasks]


def _growth(env: envs.base.Env, cfg: schema.Eval) -> int:
  """Tokens that an episode may add to its prompt."""
  said, budget = env.max_turns * cfg.max_tokens, cfg.max_episode_tokens
  if budget is None:
    return said
  # The environment speaks as well, if there is a turn to come.
  return budget if env.max_turns > 1 else min(said, budget)


def longest(
  renderer: chat.Renderer,
  env: envs.base.Env,
  tasks: Sequence[types.Task],
  cfg: schema.Eval,
) -> int:
  """Tokens of the longest prompt with all turns that may follow it.

  Raises:
    ValueError: a prompt cannot be rendered; names the row.
  """
  return max(
    (_prompt_length(renderer, task) + _growth(env, cfg) for task in tasks),
    default=0,
  )


def _prompt_length(renderer: chat.Renderer, task: types.Task) -> int:
  try:
    return len(renderer.render(task.prompt, add_generation_prompt=True))
  except ValueError as error:
    raise ValueError(
      f'row {task.id} of environment {task.env}: {error}'
    ) from None


def answer(
  rollout: types.Rollout, sampled: Sequence[types.Rollout] = ()
) -> Answer:
  """Returns what is kept of an attempt: all that was said and earned.

  Args:
    rollout: the greedy one.
    sampled: others at the same task, of which the grades are kept.
  """
  task, score = rollout.task, rollout.score
  said = rollout.said
  text = (
    said[0]['content']
    if len(said) == 1
    else '\n'.join(f'{turn["role"]}: {turn["content"]}' for turn in said)
  )
  return Answer(
    env=task.env,
    id=task.id,
    prompt='\n'.join(turn['content'] for turn in rollout.prompt),
    text=text,
    answer=task.answer,
    correct=score.correct,
    formatted=score.formatted,
    reward=score.reward,
    stop_reason=rollout.stop_reason,
    tokens=int(sum(sample.mask.sum() for sample in rollout.samples)),
    error=rollout.error,
    question=rollout.prompt[-1]['content'],
    messages=tuple(
      {'role': turn['role'], 'content': turn['content']} for turn in said
    ),
    turn_rewards=tuple(float(turn.reward) for turn in rollout.turns),
    metrics={key: float(value) for key, value in score.metrics.items()},
    sampled=tuple(other.score.correct for other in sampled),
  )
