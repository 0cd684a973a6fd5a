"""Tasksets of `verifiers` v1, scored in process: one turn, no harness.

1. The tasks are the first ones of `Taskset(config)`, which may be endless.
   Evaluation takes the first `eval_tasks`, training the `train_tasks` after
   them; if evaluation has its own options, each split starts at task 0.
2. The prompt is the task's `system_prompt` and `prompt`, texts only.
3. The turn becomes a `Trace`, and `Task.score` writes rewards into it.

Tasks that need more than that are refused by name before the run starts: a
reward, metric or judge with a `runtime` (which `Task.score` would skip) or any
other argument than `task` and `trace`, a container, hooks with a runtime, hooks
of the model server, tools, skills, artifacts, a conversation without a prompt,
images; and a taskset whose package has an environment of its own, which would
compare the rollouts of a group.
"""

import itertools
from typing import Any

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import base
from posttrain.envs.adapters import common, traces
from posttrain.util import foreign, imports


class Verifiers(base.Env):
  """`schema.Verifiers`."""

  max_turns = 1

  def __init__(self, name: str, cfg: schema.Verifiers):
    """Imports the taskset's class; tasks are loaded later.

    Raises:
      ValueError: `verifiers` is not installed, or the class does not exist.
    """
    common.load('verifiers.v1', 'verifiers', name)
    self.name, self._cfg, self.blocking = name, cfg, cfg.blocking
    self._correct_at = cfg.correct_at
    self._class = imports.function(cfg.taskset, f'envs.{name}.env.taskset')
    self._loaded: dict[str, list[Any]] = {}  # by split

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns the tasks of a split, fewer if the taskset has fewer.

    Raises:
      ValueError: an option is not one of the taskset's, or a task needs more
        than one turn.
    """
    tasks = self._load(split)
    fingerprint = sources.fingerprint(*(task.key.encode() for task in tasks))
    return sources.Shuffled(
      [self._task(f'{split}:{i}', task) for i, task in enumerate(tasks)],
      seed,
      fingerprint,
    )

  def make(self, task: types.Task) -> 'Episode':
    split, index = task.id.split(':')
    vf_task = self._load(split)[int(index)]
    return Episode(task, vf_task, self._correct_at)

  def _load(self, split: str) -> list[Any]:
    base.check_split(split)
    if split not in self._loaded:
      cfg, evaluates = self._cfg, split == 'eval'
      options = cfg.options | (cfg.eval_options if evaluates else {})
      first = 0 if evaluates or cfg.eval_options else cfg.eval_tasks
      stop = first + getattr(cfg, f'{split}_tasks')
      key = f'envs.{self.name}.env'
      taskset = traces.load(self._class, options, key)
      self._loaded[split] = base.build(
        f'{key}.taskset', lambda: list(itertools.islice(taskset, first, stop))
      )
    return self._loaded[split]

  def _task(self, id: str, vf_task: Any) -> types.Task:
    where = f'environment {self.name}, task {id}'
    if needs := traces.needs(vf_task):
      raise ValueError(
        f'{where} must be a conversation of one turn: a '
        f'{foreign.kind(vf_task)} needs {", ".join(needs)}; leave that out '
        'of the taskset, or play it by the harness of verifiers'
      )
    try:
      prompt = traces.texts(vf_task)
    except ValueError as error:
      raise ValueError(f'{where}: {error}') from None
    info = vf_task.data.model_dump(
      mode='json', exclude_defaults=True, exclude={'prompt', 'system_prompt'}
    )
    return types.Task(
      id=id, env=self.name, prompt=prompt, answer=info.get('answer'), info=info
    )


class Episode:
  """One answer to one task."""

  def __init__(self, task: types.Task, vf_task: Any, correct_at: float | None):
    """Builds an episode.

    Args:
      task: the task.
      vf_task: the taskset's object of the same task.
      correct_at: smallest reward of a correct episode; None = unknown.
    """
    self._task, self._vf_task, self._correct_at = task, vf_task, correct_at
    self._score = types.Score(reward=None)

  def reset(self) -> types.Messages:
    self._score = types.Score(reward=None)
    return self._task.prompt

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Scores the answer; exceptions of reward functions are raised."""
    trace = traces.trace(self._vf_task, text, truncated)
    common.settle(self._vf_task.score(trace))
    rewards = {name: one.score for name, one in trace.rewards.items()}
    self._score = common.score(
      trace.reward if rewards else None,
      self._correct_at,
      {**trace.metrics, **rewards},
    )
    return types.StepOut(reward=self._score.reward or 0.0)

  def grade(self) -> types.Score:
    """Returns the weighted sum of the rewards; metrics hold each reward."""
    return self._score

  def close(self) -> None:
    pass
