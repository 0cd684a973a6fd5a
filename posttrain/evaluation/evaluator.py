"""Evaluation of a policy on held-out tasks, graded by the environments.

Every task is played once greedily and `samples` times at temperature 1. The
random numbers are the same at every evaluation, so that two evaluations differ
by their weights alone. The prompts of a suite are answered greedily; their
answers are measured by `posttrain.rewards.texts`, which needs no expected one.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from posttrain import schema, types
from posttrain.algorithms import base as algorithms
from posttrain.chat import renderer as chat
from posttrain.envs import base
from posttrain.envs import suite as suites
from posttrain.evaluation import answers as answers_lib
from posttrain.evaluation import measures as measures_lib
from posttrain.metrics import rollouts as rollout_metrics
from posttrain.rewards import texts
from posttrain.rollout import driver as drivers
from posttrain.rollout import env_calls

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
      ValueError: a prompt cannot be rendered; names the row. Or no task is left
        for `eval.best`.
    """
    self.cfg = cfg
    self.max_errors = max_errors
    self.by_env = {}
    self.selection: tuple[types.Task, ...] = ()
    self.counts: dict[str, int] = {}
    self.suite = suites.Suite(cfg.suite)
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

  @property
  def description(self) -> str:
    """Description of an evaluation, for the display; '' without tasks."""
    count = sum(len(tasks) for _, tasks in self.by_env.values())
    count += len(self.selection)
    return f'evaluating {count} prompts' if count else ''


class Evaluator:
  """Plays the evaluation tasks of a stage and measures the rollouts."""

  def __init__(
    self,
    tasks: EvalTasks,
    driver: drivers.Driver,
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
    # Of the evaluation under way: rollouts, and errors of reward functions.
    self._rollouts: list[types.Rollout] = []
    self._faults: list[str] = []

  def measure(
    self,
  ) -> tuple[dict[str, float], list[answers_lib.Answer], tuple[str, ...]]:
    """Plays every task with the engine's weights; warns of failed episodes.

    Returns:
      {'eval/<name>/<env>': value} and {'select/<name>/<env>': value} of the
      metric that selects, the greedy answers, and the errors, of episodes and
      of reward functions.

    Raises:
      TooManyErrors: environments failed too often.
    """
    metrics, answers, self._rollouts, self._faults = {}, [], [], []
    for index, (name, (env, tasks)) in enumerate(self.tasks.by_env.items()):
      if not tasks:
        continue
      uid = FIRST_UID + index * _ENV_UIDS
      greedy = [
        rollout for (rollout,) in self._run_episodes(env, tasks, uid, 0.0, 1)
      ]
      measures = self._measure_beside(name, greedy)
      groups = self._sample(env, tasks, uid + 1, greedy, measures)
      measures |= self._measure_sampled(name, groups)
      values = self._measure(env, greedy, groups, measures)
      metrics |= {f'eval/{key}/{name}': v for key, v in values.items()}
      answers += _answers(greedy, groups, measures)
    metrics |= self._select()
    errors = rollout_metrics.errors(self._rollouts, self.tasks.max_errors)
    if errors:
      logging.getLogger('absl').warning(
        '%d of %d episodes of the evaluation failed and are in no mean, the '
        'first: %s',
        len(errors),
        len(self._rollouts),
        errors[0],
      )
    return metrics, answers, (*errors, *self._faults)

  def _measure_beside(
    self, name: str, greedy: Sequence[types.Rollout]
  ) -> dict[str, measures_lib.Values]:
    """Returns the measures beside the grade; keeps the errors of functions."""
    if self._measures is None:
      return {}
    measures, faults = self._measures(name, greedy)
    self._faults += faults
    return measures

  def _measure_sampled(
    self, name: str, groups: Sequence[Sequence[types.Rollout]]
  ) -> dict[str, measures_lib.Values]:
    """Returns the means of reward functions over each task's group."""
    if self._measures is None or not groups:
      return {}
    flat = [rollout for group in groups for rollout in group]
    rewards, faults = self._measures.rewards(name, flat)
    self._faults += faults
    sizes = [len(group) for group in groups]
    return {
      f'sampled_{key}': measures_lib.grouped(values, sizes)
      for key, (values, _) in rewards.items()
    }

  def _select(self) -> dict[str, float]:
    """Measures `eval.best` on its own tasks; samples only if it must."""
    if self._cfg.selects is None:
      return {}
    name, env_name = self._cfg.selects
    index, tasks = list(self.tasks.by_env).index(env_name), self.tasks.selection
    uid = FIRST_UID + index * _ENV_UIDS + self._cfg.prompts * _TASK_UIDS
    env, _ = self.tasks.by_env[env_name]
    greedy = [x for (x,) in self._run_episodes(env, tasks, uid, 0.0, 1)]
    measures = self._measure_beside(env_name, greedy)
    values = self._measure(env, greedy, [], measures)
    if name not in values:
      groups = self._sample(env, tasks, uid + 1, greedy, measures)
      measures |= self._measure_sampled(env_name, groups)
      values = self._measure(env, greedy, groups, measures)
    return {f'select/{name}/{env_name}': values[name]} if name in values else {}

  def answer_suite(
    self,
  ) -> tuple[dict[str, float], list[answers_lib.SuiteAnswer]]:
    """Plays the prompts of `eval.suite`, and measures the answers.

    Returns:
      {'eval/suite/<name>': mean over the answers that have the value}, and the
      answers in the order of the prompts.
    """
    uid = FIRST_UID + len(self.tasks.by_env) * _ENV_UIDS
    suite = self.tasks.suite
    specs = [
      drivers.EpisodeSpec(
        uid + index * _TASK_UIDS, suite, task, 0.0, self._cfg.max_tokens
      )
      for index, task in enumerate(suite.tasks)
    ]
    rollouts = self._driver.run(specs) if specs else []
    answers = [
      answers_lib.SuiteAnswer(
        x.prompt, x.text, x.stop_reason, x.tokens, texts.grade(x.text)
      )
      for x in map(answers_lib.of, rollouts)
    ]
    return answers_lib.suite_metrics(answers), answers

  @property
  def _ks(self) -> tuple[int, ...]:
    """The ks of pass@k and maj@k; () where one answer is sampled."""
    n = self._cfg.samples
    return (*self._cfg.ks, n) if n > 1 else self._cfg.ks

  def _sample(
    self,
    env,
    tasks,
    uid: int,
    greedy: list[types.Rollout],
    measures: Mapping[str, measures_lib.Values],
  ) -> list[list[types.Rollout]]:
    """Plays each task at temperature 1; [] where no answer is graded.

    An environment or a reward function grades; the loss of demonstrations is
    that of no answer.
    """
    has_grade = any(
      x.score.correct is not None or x.score.reward is not None for x in greedy
    )
    has_reward = any(name.startswith('reward/') for name in measures)
    if not (self._cfg.samples and (has_grade or has_reward)):
      return []
    return self._run_episodes(env, tasks, uid, 1.0, self._cfg.samples)

  def _measure(
    self,
    env: base.Env,
    greedy: list[types.Rollout],
    groups: list[list[types.Rollout]],
    measures: Mapping[str, measures_lib.Values],
  ) -> dict[str, float]:
    """Returns one environment's values, without prefix and suffix.

    Args:
      env: the environment.
      greedy: the greedy rollout of each task.
      groups: the sampled rollouts of each task, [] for none.
      measures: of each task, beside its grade.
    """
    values = {
      **{
        name: value
        for key, x in measures.items()
        for name, value in measures_lib.summary(key, x).items()
      },
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
        'sampled_reward': sampled.get('reward'),
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


def _answers(
  greedy: Sequence[types.Rollout],
  groups: Sequence[Sequence[types.Rollout]],
  measures: Mapping[str, measures_lib.Values],
) -> list[answers_lib.Answer]:
  """Returns the answer to each task, with its grades and measures."""
  return [
    answers_lib.of(
      rollout,
      groups[i] if groups else (),
      {k: x[i] for k, (x, _) in measures.items() if x[i] is not None},
    )
    for i, rollout in enumerate(greedy)
  ]


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
    renderer = renderer.with_tools(task.tools)
    return len(renderer.render(task.prompt, add_generation_prompt=True))
  except ValueError as error:
    raise ValueError(
      f'row {task.id} of environment {task.env}: {error}'
    ) from None
