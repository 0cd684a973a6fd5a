"""Tasksets of `verifiers` v1, scored in process: one turn, no harness.

1. The tasks are those of `Taskset(config)`, which may be endless: so many are
   taken. Evaluation takes the first ones, and training those behind them;
   where evaluation has options of its own, each split takes its first ones.
2. The prompt is the task's `system_prompt` and `prompt`, texts only.
3. The turn becomes a `Trace`, and `Task.score` writes rewards into it.

What needs more than a turn is refused before the run starts: a reward with a
`runtime` (which `Task.score` would skip), a container, `setup` and `finalize`
hooks, tools, a user who speaks first, images. Metrics with a `runtime` are
left out.
"""

import itertools
from typing import Any

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import base
from posttrain.envs.adapters import common, traces
from posttrain.util import imports


class Verifiers(base.Env):
  """`schema.Verifiers`."""

  max_turns = 1

  def __init__(self, name: str, cfg: schema.Verifiers):
    """Loads no task yet.

    Raises:
      ValueError: `verifiers` is not installed, or there is no such class.
    """
    common.load('verifiers.v1', 'verifiers', name)
    self.name, self._cfg, self.blocking = name, cfg, cfg.blocking
    self._correct_at = cfg.correct_at
    self._class = imports.function(cfg.taskset, f'envs.{name}.env.taskset')
    self._loaded: dict[str, list[Any]] = {}  # by split

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns the tasks of a split, fewer than asked for if there are no more.

    Raises:
      ValueError: an option is not one of the taskset's, or a task needs what
        is not here.
    """
    tasks = self._load(split)
    made_of = sources.fingerprint(*(task.key.encode() for task in tasks))
    return sources.Shuffled(
      [self._task(f'{split}:{i}', task) for i, task in enumerate(tasks)],
      seed,
      made_of,
    )

  def make(self, task: types.Task) -> 'Episode':
    split, index = task.id.split(':')
    theirs = self._load(split)[int(index)]
    return Episode(task, theirs, self._correct_at)

  def _load(self, split: str) -> list[Any]:
    base.check_split(split)
    if split not in self._loaded:
      cfg, held = self._cfg, split == 'eval'
      options = cfg.options | (cfg.eval_options if held else {})
      first = 0 if held or cfg.eval_options else cfg.eval_tasks
      stop = first + getattr(cfg, f'{split}_tasks')
      taskset = traces.load(self._class, options, f'envs.{self.name}.env')
      self._loaded[split] = list(itertools.islice(taskset, first, stop))
    return self._loaded[split]

  def _task(self, id: str, theirs: Any) -> types.Task:
    where = f'environment {self.name}, task {id}'
    if needs := traces.needs(theirs):
      raise ValueError(
        f'{where} must be a conversation of one turn: a '
        f'{type(theirs).__name__} needs {", ".join(needs)}; leave that out '
        'of the taskset, or play it by the harness of verifiers'
      )
    try:
      prompt = traces.texts(theirs)
    except ValueError as error:
      raise ValueError(f'{where}: {error}') from None
    info = theirs.data.model_dump(
      mode='json', exclude_defaults=True, exclude={'prompt', 'system_prompt'}
    )
    return types.Task(
      id=id, env=self.name, prompt=prompt, answer=info.get('answer'), info=info
    )


class Episode:
  """One answer."""

  def __init__(self, task: types.Task, theirs: Any, correct_at: float | None):
    """Args: theirs: the task as the taskset has it."""
    self._task, self._theirs, self._correct_at = task, theirs, correct_at
    self._score = types.Score(reward=None)

  def reset(self) -> types.Messages:
    self._score = types.Score(reward=None)
    return self._task.prompt

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Scores the answer; raises what a reward function raises."""
    trace = traces.trace(self._theirs, text, truncated)
    common.settle(self._theirs.score(trace))
    rewards = {name: one.score for name, one in trace.rewards.items()}
    self._score = common.score(
      trace.reward if rewards else None,
      self._correct_at,
      {**trace.metrics, **rewards},
    )
    return types.StepOut(reward=self._score.reward or 0.0)

  def grade(self) -> types.Score:
    """Returns the weighted sum of the rewards; the metrics are each of them."""
    return self._score

  def close(self) -> None:
    pass
