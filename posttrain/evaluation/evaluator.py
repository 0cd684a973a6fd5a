"""Evaluation of a policy on held-out tasks, graded by the environments.

Every task is played once greedily and `samples` times at temperature 1. The
random numbers are the same at every evaluation, so that two evaluations differ
by their weights alone. The prompts of a suite are answered greedily; their
answers are measured by `posttrain.rewards.texts`, which needs no expected one.
"""

import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from posttrain import schema, types
from posttrain.algorithms import base as algorithms
from posttrain.chat import rendering
from posttrain.envs import base, rows
from posttrain.evaluation import answers as answers_lib
from posttrain.evaluation import measures as measures_lib
from posttrain.evaluation import task_sets
from posttrain.metrics import statistics
from posttrain.rewards import texts
from posttrain.rollout import env_calls, episodes

FIRST_UID = 2**62  # above the uids of training rollouts
_ENV_UIDS, _TASK_UIDS = 2**40, 2**12


class EvalTasks:
  """The evaluation tasks of a stage: drawn, and their prompts rendered.

  Needs no model.

  Attributes:
    by_env: {environment's name: (environment, its tasks)}.
    selection: the tasks that `eval.best` is measured on; () without it.
    counts: {environment's name: number of its held-out tasks}.
    suite: the prompts of `eval.suite`.
    cfg: the evaluation's options.
    max_errors: number of errors of environments that an evaluation tolerates.
  """

  def __init__(
    self,
    envs: dict[str, base.Env],
    renderer: rendering.Renderer,
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
      ValueError: a prompt cannot be rendered; names the row. Or no task is left
        for `eval.best`.
    """
    self.cfg = cfg
    self.max_errors = max_errors
    self.by_env = {}
    self.selection: tuple[types.Task, ...] = ()
    self.counts: dict[str, int] = {}
    self.suite = rows.Suite(cfg.suite)
    lengths = [
      _prompt_length(renderer, task) + cfg.max_tokens
      for task in self.suite.tasks
    ]
    for name, env in envs.items():
      selecting = cfg.selects is not None and cfg.selects[1] == name
      source = env_calls.Source(env, 'eval', seed, env_timeout)
      self.counts[name] = len(source)
      tasks = source.take(cfg.prompts + selecting * cfg.best_prompts)
      self.by_env[name] = env, tasks[: cfg.prompts]
      if selecting:
        self.selection = tasks[cfg.prompts :]
        if not self.selection:
          raise ValueError(
            f'envs.{name}.env must have more evaluation tasks than the '
            f'eval.prompts={cfg.prompts} that are reported, for eval.best: got '
            f'{len(tasks)}; lower eval.prompts, or add tasks'
          )
      lengths.append(max_episode_length(renderer, env, tasks, cfg))
    self._max_length = max(lengths, default=0)

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


class Evaluation(NamedTuple):
  """The results of an evaluation."""

  # {'eval/<name>/<env>': value}, {'eval/suite/<name>': value}; of the metric
  # that selects {'select/<name>/<env>': value}.
  metrics: dict[str, float]
  answers: list[answers_lib.Answer]  # greedy ones
  suite: list[answers_lib.SuiteAnswer]  # in the order of the prompts
  errors: tuple[str, ...]  # of episodes and of reward functions


class Evaluator:
  """Plays the evaluation tasks of a stage and measures the rollouts."""

  def __init__(
    self,
    tasks: EvalTasks,
    driver: episodes.Driver,
    scorer: algorithms.Scorer | None = None,
    measures: measures_lib.Measures | None = None,
  ):
    """Holds the models.

    Args:
      tasks: the tasks and the evaluation's options.
      driver: runs episodes with the policy.
      scorer: scores samples under the model 'init'; needed with `eval.kl`.
      measures: measures tasks beside their grade; None = no measure.
    """
    self.tasks = tasks
    self._cfg = tasks.cfg
    self._driver, self._scorer = driver, scorer
    self._measures = measures

  def measure(self) -> Evaluation:
    """Plays every task with the engine's weights; warns of failed episodes.

    Raises:
      TooManyErrors: environments failed too often.
    """
    sets = self._task_sets()
    # Two queues for all environments, because each ends with empty slots.
    suite = self._play_greedily(sets)
    faults: list[str] = []
    for part in sets:
      part.measures = self._measure_beside(part, faults)
    self._sample([part for part in sets if self._is_sampled(part)])
    metrics = {}
    for part in sets:
      part.measures |= self._measure_sampled(part, faults)
      metrics |= part.named(self._measure(part))
    rollouts = [x for part in sets for x in part.rollouts]
    errors = statistics.errors(rollouts, self.tasks.max_errors)
    if errors:
      logging.getLogger('absl').warning(
        '%d of %d episodes of the evaluation failed and are in no mean, the '
        'first: %s',
        len(errors),
        len(rollouts),
        errors[0],
      )
    return Evaluation(
      metrics | answers_lib.suite_metrics(suite),
      [x for part in sets if part.selects_by is None for x in part.answers],
      suite,
      (*errors, *faults),
    )

  def _task_sets(self) -> list[task_sets.TaskSet]:
    """Returns the tasks of each environment, and those of `eval.best`."""
    sets = [
      task_sets.TaskSet(name, env, tasks, FIRST_UID + index * _ENV_UIDS)
      for index, (name, (env, tasks)) in enumerate(self.tasks.by_env.items())
      if tasks
    ]
    if self._cfg.selects is not None:
      metric, name = self._cfg.selects
      index = list(self.tasks.by_env).index(name)
      uid = FIRST_UID + index * _ENV_UIDS + self._cfg.prompts * _TASK_UIDS
      env, _ = self.tasks.by_env[name]
      sets.append(
        task_sets.TaskSet(name, env, self.tasks.selection, uid, metric)
      )
    return sets

  def _play_greedily(
    self, sets: Sequence[task_sets.TaskSet]
  ) -> list[answers_lib.SuiteAnswer]:
    """Plays each task once at temperature 0; returns the suite's answers."""
    suite = self.tasks.suite
    uid = FIRST_UID + len(self.tasks.by_env) * _ENV_UIDS
    own = [
      self._spec(part, i, part.uid, 0.0)
      for part in sets
      for i in range(len(part.tasks))
    ]
    prompts = [
      episodes.EpisodeSpec(
        uid + index * _TASK_UIDS, suite, task, 0.0, self._cfg.max_tokens
      )
      for index, task in enumerate(suite.tasks)
    ]
    rollouts = iter(
      self._driver.run([*own, *prompts]) if own or prompts else ()
    )
    for part in sets:
      part.greedy = list(itertools.islice(rollouts, len(part.tasks)))
    return [
      answers_lib.SuiteAnswer(
        x.prompt, x.text, x.stop_reason, x.tokens, texts.grade(x.text)
      )
      for x in map(answers_lib.of, rollouts)
    ]

  def _sample(self, sets: Sequence[task_sets.TaskSet]) -> None:
    """Plays each task `samples` times at temperature 1."""
    count = self._cfg.samples
    specs = [
      self._spec(part, index, part.uid + 1 + i, 1.0)
      for part in sets
      for index in range(len(part.tasks))
      for i in range(count)
    ]
    rollouts = iter(self._driver.run(specs) if specs else ())
    for part in sets:
      part.groups = [
        list(itertools.islice(rollouts, count)) for _ in part.tasks
      ]

  def _spec(
    self, part: task_sets.TaskSet, index: int, uid: int, temperature: float
  ) -> episodes.EpisodeSpec:
    return episodes.EpisodeSpec(
      uid + index * _TASK_UIDS,
      part.env,
      part.tasks[index],
      temperature,
      self._cfg.max_tokens,
      self._cfg.max_episode_tokens,
      self._cfg.keep_exchanges,
    )

  def _is_sampled(self, part: task_sets.TaskSet) -> bool:
    """Returns whether the tasks are played at temperature 1.

    An environment or a reward function must grade answers; the loss on
    demonstrations needs none. Tasks of `eval.best` are sampled only if greedy
    answers lack its metric.
    """
    has_grade = any(
      x.score.correct is not None or x.score.reward is not None
      for x in part.greedy
    )
    has_reward = any(name.startswith('reward/') for name in part.measures)
    if not (self._cfg.samples and (has_grade or has_reward)):
      return False
    return part.selects_by is None or part.selects_by not in self._measure(part)

  def _measure_beside(
    self, part: task_sets.TaskSet, faults: list[str]
  ) -> dict[str, measures_lib.Values]:
    """Returns the measures beside the grade; adds the errors of functions."""
    if self._measures is None:
      return {}
    measures, errors = self._measures(part.name, part.greedy)
    faults += errors
    return measures

  def _measure_sampled(
    self, part: task_sets.TaskSet, faults: list[str]
  ) -> dict[str, measures_lib.Values]:
    """Returns the means of reward functions over each task's group."""
    if self._measures is None or not part.groups:
      return {}
    rewards, errors = self._measures.rewards(part.name, part.sampled)
    faults += errors
    sizes = [len(group) for group in part.groups]
    return {
      f'sampled_{key}': measures_lib.grouped(values, sizes)
      for key, (values, _) in rewards.items()
    }

  @property
  def _ks(self) -> tuple[int, ...]:
    """The ks of pass@k and maj@k; () where one answer is sampled."""
    n = self._cfg.samples
    return (*self._cfg.ks, n) if n > 1 else self._cfg.ks

  def _measure(self, part: task_sets.TaskSet) -> dict[str, float]:
    """Returns one environment's values, without prefix and suffix."""
    greedy = part.greedy
    values = {
      **{
        name: value
        for key, measure in part.measures.items()
        for name, value in measures_lib.summary(key, measure).items()
      },
      **statistics.summarize(greedy),
      **statistics.stops(greedy),
      **statistics.bounds('pass_rate', [[x.score.correct] for x in greedy]),
      **statistics.bounds('format_rate', [[x.score.formatted] for x in greedy]),
    }
    if part.groups:
      sampled = statistics.summarize(part.sampled)
      values |= {
        'sampled_pass_rate': sampled.get('pass_rate'),
        **statistics.bounds(
          'sampled_pass_rate',
          [[x.score.correct for x in group] for group in part.groups],
        ),
        'sampled_format_rate': sampled.get('format_rate'),
        'sampled_reward': sampled.get('reward'),
        **statistics.best_of(part.groups, self._ks, part.env.votes),
        **statistics.entropy(part.sampled),
        **self._kl([group[0] for group in part.groups]),
      }
    errors = sum(x.stop_reason == 'error' for x in part.rollouts)
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


def _max_growth(env: base.Env, cfg: schema.Eval) -> int:
  """Returns the most tokens that an episode may add to its prompt."""
  sampled, budget = env.max_turns * cfg.max_tokens, cfg.max_episode_tokens
  if budget is None:
    return sampled
  # With a second turn, the environment's messages count as well.
  return budget if env.max_turns > 1 else min(sampled, budget)


def max_episode_length(
  renderer: rendering.Renderer,
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


def _prompt_length(renderer: rendering.Renderer, task: types.Task) -> int:
  try:
    renderer = renderer.with_tools(task.tools)
    return len(renderer.render(task.prompt, add_generation_prompt=True))
  except ValueError as error:
    raise ValueError(
      f'row {task.id} of environment {task.env}: {error}'
    ) from None
