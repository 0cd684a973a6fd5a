"""Evaluation of a policy on held-out tasks, graded by the environments.

Every task is played once greedily and `samples` times at temperature 1. The
random numbers are the same at every evaluation, so that two evaluations differ
by their weights alone. The prompts of a suite are answered greedily and are not
graded.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain import schema, types
from posttrain.algorithms import base as algorithms
from posttrain.chat import renderer as chat
from posttrain.envs import base
from posttrain.envs import suite as suites
from posttrain.metrics import rollouts as rollout_metrics
from posttrain.rollout import driver as drivers
from posttrain.rollout import env_calls

FIRST_UID = 2**62  # above the uids of training rollouts
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
  messages: tuple[types.Message, ...]  # after the prompt
  turn_rewards: tuple[float, ...]  # of the policy's turns, in their order
  metrics: dict[str, float]  # of the score
  # Of each answer at temperature 1: whether it is correct, None = not graded.
  sampled: tuple[bool | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class SuiteAnswer:
  """The greedy answer to a prompt of the suite."""

  prompt: str
  text: str
  stop_reason: str
  tokens: int


class EvalTasks:
  """The evaluation tasks of a stage: drawn, and their prompts rendered.

  Needs no model.

  Attributes:
    by_env: {environment's name: (environment, its tasks)}.
    suite: the prompts of `eval.suite`.
    cfg: the evaluation's options.
    max_errors: number of errors of environments that an evaluation tolerates.
  """

  def __init__(
    self,
    envs: dict[str, base.Env],
    renderer: chat.Renderer,
    cfg: schema.Eval,
    seed: int,
    max_errors: int = 0,
    env_timeout: float = schema.Rollout.env_timeout,
  ):
    """Draws the tasks and renders their prompts.

    Args:
      envs: the environments by name.
      renderer: renders the prompts to tokens.
      cfg: the evaluation's options.
      seed: seed of the draw.
      max_errors: number of errors of environments that an evaluation tolerates.
      env_timeout: time limit of a call of an environment's source, in seconds.

    Raises:
      EnvError: an environment's source fails.
      ValueError: a prompt cannot be rendered; names the row.
    """
    self.cfg = cfg
    self.max_errors = max_errors
    self.by_env = {
      name: (
        env,
        env_calls.Source(env, 'eval', seed, env_timeout).take(cfg.prompts),
      )
      for name, env in envs.items()
    }
    self.suite = suites.Suite(cfg.suite)
    self._max_length = max(
      (
        *(
          max_episode_length(renderer, env, tasks, cfg)
          for env, tasks in self.by_env.values()
        ),
        *(
          _prompt_length(renderer, task) + cfg.max_tokens
          for task in self.suite.tasks
        ),
      ),
      default=0,
    )

  @property
  def max_length(self) -> int:
    """Tokens of the longest prompt with all turns that may follow it."""
    return self._max_length

  @property
  def any(self) -> bool:
    """Whether there is a task, or a prompt of the suite."""
    return any(
      (*(tasks for _, tasks in self.by_env.values()), self.suite.tasks)
    )


class Evaluator:
  """Plays the evaluation tasks of a stage and measures the rollouts."""

  def __init__(
    self,
    tasks: EvalTasks,
    driver: drivers.Driver,
    scorer: algorithms.Scorer | None = None,
  ):
    """Holds the models.

    Args:
      tasks: the tasks and the evaluation's options.
      driver: runs episodes with the policy.
      scorer: scores samples under the model 'init'; needed with `eval.kl`.
    """
    self.tasks = tasks
    self._cfg = tasks.cfg
    self._driver, self._scorer = driver, scorer
    self._rollouts: list[types.Rollout] = []  # of the evaluation under way

  def measure(self) -> tuple[dict[str, float], list[Answer], tuple[str, ...]]:
    """Plays every task with the engine's weights; warns of failed episodes.

    Returns:
      {'eval/<name>/<env>': value}, the greedy answers, and the errors.

    Raises:
      TooManyErrors: environments failed too often.
    """
    metrics, answers, self._rollouts = {}, [], []
    for index, (name, (env, tasks)) in enumerate(self.tasks.by_env.items()):
      if not tasks:
        continue
      uid = FIRST_UID + index * _ENV_UIDS
      greedy = [
        rollout for (rollout,) in self._run_episodes(env, tasks, uid, 0.0, 1)
      ]
      groups = self._sample(env, tasks, uid + 1, greedy)
      values = self._measure(env, greedy, groups)
      metrics |= {f'eval/{key}/{name}': v for key, v in values.items()}
      answers += [
        answer(rollout, group)
        for rollout, group in zip(
          greedy, groups or [()] * len(greedy), strict=True
        )
      ]
    errors = rollout_metrics.errors(self._rollouts, self.tasks.max_errors)
    if errors:
      logging.getLogger('absl').warning(
        '%d of %d episodes of the evaluation failed and are in no mean, the '
        'first: %s',
        len(errors),
        len(self._rollouts),
        errors[0],
      )
    return metrics, answers, errors

  def answer_suite(self) -> list[SuiteAnswer]:
    """Plays the prompts of `eval.suite`; returns the answers in their order."""
    uid = FIRST_UID + len(self.tasks.by_env) * _ENV_UIDS
    suite = self.tasks.suite
    specs = [
      drivers.EpisodeSpec(
        uid + index * _TASK_UIDS, suite, task, 0.0, self._cfg.max_tokens
      )
      for index, task in enumerate(suite.tasks)
    ]
    rollouts = self._driver.run(specs) if specs else []
    return [
      SuiteAnswer(x.prompt, x.text, x.stop_reason, x.tokens)
      for x in map(answer, rollouts)
    ]

  @property
  def _ks(self) -> tuple[int, ...]:
    """The ks of pass@k and maj@k; () where one answer is sampled."""
    n = self._cfg.samples
    return (*self._cfg.ks, n) if n > 1 else self._cfg.ks

  def _sample(
    self, env, tasks, uid: int, greedy: list[types.Rollout]
  ) -> list[list[types.Rollout]]:
    """Plays each task at temperature 1; [] where no answer is graded."""
    graded = any(rollout.score.correct is not None for rollout in greedy)
    if not (self._cfg.samples and graded):
      return []
    return self._run_episodes(env, tasks, uid, 1.0, self._cfg.samples)

  def _measure(
    self,
    env: base.Env,
    greedy: list[types.Rollout],
    groups: list[list[types.Rollout]],
  ) -> dict[str, float]:
    """Returns one environment's values, without prefix and suffix.

    Args:
      env: the environment.
      greedy: the greedy rollout of each task.
      groups: the sampled rollouts of each task, [] for none.
    """
    values = {
      **rollout_metrics.summarize(greedy),
      **rollout_metrics.stops(greedy),
      **rollout_metrics.bounds(
        'pass_rate', [[x.score.correct] for x in greedy]
      ),
      **rollout_metrics.bounds(
        'format_rate', [[x.score.formatted] for x in greedy]
      ),
    }
    flat = [rollout for group in groups for rollout in group]
    if groups:
      sampled = rollout_metrics.summarize(flat)
      values |= {
        'sampled_pass_rate': sampled.get('pass_rate'),
        **rollout_metrics.bounds(
          'sampled_pass_rate',
          [[x.score.correct for x in group] for group in groups],
        ),
        'sampled_format_rate': sampled.get('format_rate'),
        **rollout_metrics.best_of(groups, self._ks, env.votes),
        **rollout_metrics.entropy(flat),
        **self._kl([group[0] for group in groups]),
      }
    errors = sum(x.stop_reason == 'error' for x in (*greedy, *flat))
    return {
      **{k: v for k, v in values.items() if v is not None},
      'errors': errors,
    }

  def _kl(self, rollouts: list[types.Rollout]) -> dict[str, float]:
    """Returns {'kl': mean of log p - log p_init over sampled tokens}, nats."""
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    if not (self._cfg.kl and samples):
      return {}
    scored = self._scorer('init', samples)
    drift = [
      (sample.sampler_logprobs - logprobs)[sample.mask]
      for sample, logprobs in zip(samples, scored, strict=True)
    ]
    return {'kl': float(np.mean(np.concatenate(drift)))}

  def _run_episodes(
    self,
    env: base.Env,
    tasks: Sequence[types.Task],
    uid: int,
    temperature: float,
    count: int,
  ) -> list[list[types.Rollout]]:
    """Plays every task `count` times; returns a group per task."""
    rollouts = self._driver.run(
      [
        drivers.EpisodeSpec(
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
    self._rollouts += rollouts
    return [rollouts[i : i + count] for i in range(0, len(rollouts), count)]


def _max_growth(env: base.Env, cfg: schema.Eval) -> int:
  """Returns the most tokens that an episode may add to its prompt."""
  sampled, budget = env.max_turns * cfg.max_tokens, cfg.max_episode_tokens
  if budget is None:
    return sampled
  # With a second turn, the environment's messages count as well.
  return budget if env.max_turns > 1 else min(sampled, budget)


def max_episode_length(
  renderer: chat.Renderer,
  env: base.Env,
  tasks: Sequence[types.Task],
  cfg: schema.Eval,
) -> int:
  """Returns the tokens of the longest prompt with all turns that may follow.

  Without tasks it is 0.

  Raises:
    ValueError: a prompt cannot be rendered; names the row.
  """
  return max(
    (_prompt_length(renderer, task) + _max_growth(env, cfg) for task in tasks),
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
  """Returns a greedy rollout as an `Answer`.

  Args:
    rollout: the greedy rollout.
    sampled: rollouts of the same task at temperature 1; their grades are kept.
  """
  task, score = rollout.task, rollout.score
  messages = rollout.completion_messages
  text = (
    messages[0]['content']
    if len(messages) == 1
    else '\n'.join(f'{x["role"]}: {x["content"]}' for x in messages)
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
      {'role': x['role'], 'content': x['content']} for x in messages
    ),
    turn_rewards=tuple(float(turn.reward) for turn in rollout.turns),
    metrics={key: float(value) for key, value in score.metrics.items()},
    sampled=tuple(other.score.correct for other in sampled),
  )
