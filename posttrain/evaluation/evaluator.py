"""Evaluation of a policy on held-out tasks, graded by the environments.

Every task is played once greedily and `samples` times at temperature 1. The
random numbers are the same at every evaluation, so that two evaluations differ
by their weights alone. The prompts of a suite are answered greedily; their
answers are measured by `posttrain.rewards.texts`, which needs no expected one.
"""

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from posttrain import algorithms, schema, types
from posttrain.chat import rendering
from posttrain.envs import base, rows
from posttrain.evaluation import answers, measures
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
    max_length: tokens of the longest prompt with all turns that may follow it.
    cfg: the evaluation's options.
    max_error_share: largest share of the episodes that may fail.
  """

  def __init__(
    self,
    envs: dict[str, base.Env],
    renderer: rendering.Renderer,
    stage: schema.Stage,
    seed: int,
  ):
    """Draws the tasks and renders their prompts.

    Args:
      envs: the environments by name.
      renderer: renders the prompts to tokens.
      stage: the stage's options; its `too_long='drop'` holds here as well.
      seed: seed of the draw.

    Raises:
      EnvError: an environment's source fails.
      ValueError: a prompt cannot be rendered; names the row. Or no task is left
        for `eval.best`.
    """
    self.cfg = cfg = stage.eval
    self.max_error_share = stage.rollout.max_error_share
    self.by_env = {}
    self.selection: tuple[types.Task, ...] = ()
    self.counts: dict[str, int] = {}
    self.suite = rows.Suite(cfg)
    lengths = [
      _prompt_length(renderer, task) + cfg.max_tokens
      for task in self.suite.tasks
    ]
    for name, env in envs.items():
      selecting = cfg.selects is not None and cfg.selects[1] == name
      source = env_calls.Source(env, 'eval', seed, stage.rollout.env_timeout)
      self.counts[name] = len(source)
      most = cfg.skip + cfg.prompts + selecting * cfg.best_prompts
      tasks = source.take(most)[cfg.skip :]
      if stage.envs[name].sampler.too_long == 'drop':
        size = stage.batch.row_tokens
        fitting = [x for x in tasks if _prompt_length(renderer, x) < size]
        if left := len(tasks) - len(fitting):
          logging.getLogger('absl').warning(
            "envs.%s.sampler.too_long='drop': %d of %d held-out prompts do not "
            'fit into batch.row_tokens=%d, and are left out',
            name,
            left,
            len(tasks),
            size,
          )
        tasks = tuple(fitting)
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
    self.max_length = max(lengths, default=0)

  @property
  def any(self) -> bool:
    """Whether there is a task, or a prompt of the suite."""
    return any(
      (*(tasks for _, tasks in self.by_env.values()), self.suite.tasks)
    )


@dataclasses.dataclass
class TaskSet:
  """Tasks of one environment, with their rollouts and measures."""

  name: str  # the environment's
  env: base.Env
  tasks: Sequence[types.Task]
  uid: int  # of the first task's greedy rollout
  selects_by: str | None = None  # the metric of `eval.best`; None = all
  greedy: list[types.Rollout] = dataclasses.field(default_factory=list)
  # At temperature 1, a group per task; [] = not played.
  groups: list[list[types.Rollout]] = dataclasses.field(default_factory=list)
  # {name: its value of each task, with the tasks' weights}
  measures: 'dict[str, measures.Values]' = dataclasses.field(
    default_factory=dict
  )

  @property
  def sampled(self) -> list[types.Rollout]:
    """The rollouts at temperature 1."""
    return [rollout for group in self.groups for rollout in group]

  @property
  def rollouts(self) -> list[types.Rollout]:
    """All rollouts."""
    return [*self.greedy, *self.sampled]

  @property
  def answers(self) -> list[answers.Answer]:
    """The answer to each task, with its grades and measures."""
    return [
      answers.of(
        rollout,
        self.groups[i] if self.groups else (),
        {k: x[i] for k, (x, _) in self.measures.items() if x[i] is not None},
      )
      for i, rollout in enumerate(self.greedy)
    ]

  def named(self, values: Mapping[str, float]) -> dict[str, float]:
    """Returns the values to report, or the one that selects, by full name."""
    if self.selects_by is None:
      return {f'eval/{key}/{self.name}': v for key, v in values.items()}
    if self.selects_by not in values:
      return {}
    name = f'select/{self.selects_by}/{self.name}'
    return {name: values[self.selects_by]}


class Evaluation(NamedTuple):
  """The results of an evaluation."""

  # {'eval/<name>/<env>': value}, {'eval/suite/<name>': value}; of the metric
  # that selects {'select/<name>/<env>': value}.
  metrics: dict[str, float]
  answers: list[answers.Answer]  # greedy ones
  suite: list[answers.SuiteAnswer]  # in the order of the prompts
  errors: tuple[str, ...]  # of episodes and of reward functions


class Evaluator:
  """Plays the evaluation tasks of a stage and measures the rollouts."""

  def __init__(
    self,
    tasks: EvalTasks,
    driver: episodes.Driver,
    measures: measures.Measures,
    scorer: algorithms.base.Scorer | None = None,
    teachers: Mapping[str, schema.Reference] | None = None,
  ):
    """Holds the models.

    Args:
      tasks: the tasks and the evaluation's options.
      driver: runs episodes with the policy.
      measures: measures tasks beside their grade.
      scorer: scores samples under the model 'init', which `eval.kl` needs, and
        under the teachers.
      teachers: the models to measure the KL to, by environment.
    """
    self._teachers = teachers or {}
    self.tasks = tasks
    self._cfg = tasks.cfg
    self._driver, self._scorer = driver, scorer
    self._measures = measures

  def most_tokens(self, brief: bool = False) -> int:
    """Returns how many tokens `measure` samples at most; 0 = none."""
    _, sets, prompts = self._sets(brief)
    turns = sum(len(x.tasks) * x.env.max_turns for x in sets)
    times = 1 if brief else 1 + self._cfg.samples
    return (turns * times + len(prompts)) * self._cfg.max_tokens

  def measure(self, brief: bool = False) -> Evaluation:
    """Plays every task with the engine's weights; warns of failed episodes.

    Args:
      brief: leaves out the suite, answers that nothing grades, and those at
        temperature 1, which the first step samples anyway.

    Raises:
      TooManyErrors: environments failed too often.
    """
    sets, played, prompts = self._sets(brief)
    # Two queues for all environments, because each ends with empty slots.
    suite = self._play_greedily(played, prompts)
    faults: list[str] = []
    for part in sets:
      part.measures, failed = self._measures(part.name, part.greedy, part.tasks)
      faults += failed
    self._sample([x for x in sets if self._is_sampled(x, brief)])
    metrics = {}
    for part in sets:
      if part.groups:
        rewards, failed = self._measures.rewards(part.name, part.sampled)
        faults += failed
        sizes = [len(group) for group in part.groups]
        part.measures |= {
          f'sampled_{key}': measures.grouped(values, sizes)
          for key, (values, _) in rewards.items()
        }
        part.measures |= self._kl('kl', 'init' if self._cfg.kl else None, part)
        teacher = self._teachers.get(part.name)
        part.measures |= self._kl('teacher_kl', teacher, part)
      metrics |= part.named(self._measure(part))
    rollouts = [x for part in sets for x in part.rollouts]
    errors = statistics.failures(rollouts, self.tasks.max_error_share)
    if errors:
      logging.getLogger('absl').warning(
        '%d of %d episodes of the evaluation failed and are in no mean, the '
        'first: %s',
        len(errors),
        len(rollouts),
        errors[0],
      )
    return Evaluation(
      metrics | answers.suite_metrics(suite),
      [x for part in sets if part.selects_by is None for x in part.answers],
      suite,
      (*errors, *faults),
    )

  def _sets(
    self, brief: bool
  ) -> tuple[list[TaskSet], list[TaskSet], Sequence[types.Task]]:
    """Returns all tasks, those that are played, and prompts of the suite.

    All are those of each environment, and those of `eval.best`.
    """
    sets = [
      TaskSet(name, env, tasks, FIRST_UID + index * _ENV_UIDS)
      for index, (name, (env, tasks)) in enumerate(self.tasks.by_env.items())
      if tasks
    ]
    if self._cfg.selects is not None:
      metric, name = self._cfg.selects
      own = next(x for x in sets if x.name == name)
      uid = own.uid + self._cfg.prompts * _TASK_UIDS
      sets.append(TaskSet(name, own.env, self.tasks.selection, uid, metric))
    if not brief:
      return sets, sets, self.tasks.suite.tasks
    # Nothing grades rows without a reward.
    played = [
      x
      for x in sets
      if not isinstance(x.env, rows.Rows) or self._measures.reward(x.name)
    ]
    return sets, played, ()

  def _play_greedily(
    self, sets: Sequence[TaskSet], prompts: Sequence[types.Task]
  ) -> list[answers.SuiteAnswer]:
    """Plays each task once at temperature 0; returns the suite's answers."""
    suite, most = self.tasks.suite, self._cfg.max_tokens
    if (bound := self._cfg.max_sampled_tokens) is not None:
      most = min(most, -(-bound // 32))
    uid = FIRST_UID + len(self.tasks.by_env) * _ENV_UIDS
    specs = [
      self._spec(part, i, part.uid, 0.0)
      for part in sets
      for i in range(len(part.tasks))
    ]
    specs += [
      episodes.EpisodeSpec(uid + index * _TASK_UIDS, suite, task, 0.0, most)
      for index, task in enumerate(prompts)
    ]
    rollouts = iter(self._driver.run(specs))
    for part in sets:
      part.greedy = list(itertools.islice(rollouts, len(part.tasks)))
    answered = []
    for rollout in rollouts:
      x, is_right = (
        answers.of(rollout),
        self.tasks.suite.refusals.get(rollout.task.id),
      )
      grades = texts.grade(x.text)
      if is_right is not None:
        grades['right_refusal'] = float(grades['refusal'] == is_right)
      answered.append(
        answers.SuiteAnswer(x.prompt, x.text, x.stop_reason, x.tokens, grades)
      )
    return answered

  def _sample(self, sets: Sequence[TaskSet]) -> None:
    """Plays each task `samples` times at temperature 1."""
    count = self._cfg.samples
    specs = [
      self._spec(part, index, part.uid + 1 + i, 1.0)
      for part in sets
      for index in range(len(part.tasks))
      for i in range(count)
    ]
    rollouts = iter(self._driver.run(specs))
    for part in sets:
      part.groups = [
        list(itertools.islice(rollouts, count)) for _ in part.tasks
      ]

  def _spec(
    self, part: TaskSet, index: int, uid: int, temperature: float
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

  def _is_sampled(self, part: TaskSet, brief: bool) -> bool:
    """Returns whether the tasks are played at temperature 1.

    An environment or a reward function must grade answers; the loss on
    demonstrations needs none. Tasks of `eval.best` are sampled only if greedy
    answers lack its metric.
    """
    values = self._measure(part)
    has_grade = 'pass_rate' in values or 'reward' in values
    is_read = self._measures.reward(part.name) or part.name in self._teachers
    if not (self._cfg.samples and (has_grade or is_read)):
      return False
    if part.selects_by is None:
      return not brief
    return part.selects_by not in values

  def _measure(self, part: TaskSet) -> dict[str, float]:
    """Returns one environment's values, without prefix and suffix."""
    greedy, n = part.greedy, self._cfg.samples
    values = {
      **{
        name: value
        for key, own in part.measures.items()
        for name, value in measures.summary(key, own).items()
      },
      **statistics.summarize(greedy),
      **statistics.stops(greedy),
    }
    if part.groups:
      values |= {
        **statistics.best_of(
          part.groups,
          (*self._cfg.ks, n) if n > 1 else self._cfg.ks,
          part.env.votes,
        ),
        **statistics.entropy(part.sampled),
      }
    values['errors'] = sum(x.stop_reason == 'error' for x in part.rollouts)
    return values

  def _kl(
    self, name: str, reference: schema.Reference | None, part: TaskSet
  ) -> 'dict[str, measures.Values]':
    """Returns {name: each task's mean of log p - log p_reference, nats}.

    Reads the first answer to each task; returns {} without a reference.
    """
    samples = [sample for group in part.groups for sample in group[0].samples]
    if reference is None or not samples:
      return {}
    scored = self._scorer(reference, samples)
    drift = [
      (sample.sampler_logprobs - logprobs)[sample.mask]
      for sample, logprobs in zip(samples, scored, strict=True)
    ]
    sizes = [sum(x.mask.sum() for x in g[0].samples) for g in part.groups]
    return {name: measures.grouped(np.concatenate(drift).tolist(), sizes)}


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
  growth, budget = env.max_turns * cfg.max_tokens, cfg.max_episode_tokens
  if budget is not None:
    # With a second turn, the environment's messages count as well.
    growth = budget if env.max_turns > 1 else min(growth, budget)
  lengths = (_prompt_length(renderer, task) for task in tasks)
  return max((length + growth for length in lengths), default=0)


def _prompt_length(renderer: rendering.Renderer, task: types.Task) -> int:
  try:
    renderer = renderer.of(task)
    return len(renderer.render(task.prompt, add_generation_prompt=True))
  except ValueError as error:
    raise ValueError(
      f'row {task.id} of environment {task.env}: {error}'
    ) from None
