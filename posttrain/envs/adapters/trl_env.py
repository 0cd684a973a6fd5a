"""Classes of TRL's `environment_factory`: an episode with tools as methods.

    class Guess:
      def reset(self, low: int, **row) -> str | None: ...
      def guess(self, number: int) -> str:
        '''Says whether the number is higher or lower.'''
      def get_reward(self) -> float: ...

1. `reset(**row)` gets the columns of the row, `prompt` among them. Its result
   is appended verbatim to the last message of the prompt.
2. Every other method without a leading underscore is a tool, `async` methods
   included. The chat template describes them, see
   `posttrain.chat.tool_calls`.
3. The calls of a turn are run in order. Each result, or exception, becomes a
   message. A turn without a call ends the episode.
4. `get_reward()` is the grade. Without it, use the entry's `rewards`: reward
   functions get the row's columns, but no `environments`.

TRL itself is not needed.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from posttrain import schema, types
from posttrain.data import row_files, rows, sources
from posttrain.envs import adapters, base, tools
from posttrain.util import coroutines, errors, imports


class Trl(base.Env):
  """`schema.Trl`."""

  def __init__(self, name: str, cfg: schema.Trl):
    """Builds one instance, to list its tools.

    Raises:
      ValueError: the class does not exist, or it has no `reset`; or a tool has
        arguments that cannot be passed by name.
    """
    key = f'envs.{name}.env.factory'
    self.name, self._cfg, self.max_turns = name, cfg, cfg.max_turns
    self.blocking = cfg.blocking
    self._factory = imports.function(cfg.factory, key)
    instance = base.build(key, self._factory)
    if not hasattr(instance, 'reset'):
      raise ValueError(
        f'{key} must build an object with a method reset: got '
        f'{cfg.factory!r}, which builds a {type(instance).__name__}'
      )
    # Of the class: `getmembers` of an instance would evaluate its properties.
    methods = [
      getattr(instance, name)
      for name, _ in inspect.getmembers(type(instance), inspect.isfunction)
      if not name.startswith('_') and name not in ('reset', 'get_reward')
    ]
    self._tools = tools.of(methods, cfg.tool_format) if methods else None

  def source(self, split: str, seed: int) -> base.Source:
    """Returns a task per row of the split's file, or per empty row.

    Raises:
      ValueError: the file is missing, or a row is malformed; names its line.
    """
    cfg, evaluates = self._cfg, split == 'eval'
    path = cfg.eval_path if evaluates else cfg.path
    if cfg.path is None:
      count = cfg.eval_tasks if evaluates else cfg.train_tasks
      objects, fingerprint = [({}, f'{split}:{i}') for i in range(count)], ''
    elif path is None:
      return sources.Shuffled((), seed)
    else:
      file = base.find(self.name, 'eval_path' if evaluates else 'path', path)
      objects = row_files.objects(file)
      fingerprint = row_files.fingerprint(file)
    tasks = [self._task(row, where) for row, where in objects]
    return sources.Shuffled(tasks, seed, fingerprint)

  def make(self, task: types.Task) -> 'Episode':
    return Episode(task, self._factory, self._cfg.correct_at)

  def _task(self, row: Mapping[str, Any], where: str) -> types.Task:
    prompt = rows.turns_of(row.get('prompt', ''), 'prompt', 'user', where)
    if not prompt or prompt[-1]['role'] != 'user':
      raise ValueError(
        f'{where}: prompt must end in a user message, to which reset '
        f'appends: got {errors.quote(prompt)}'
      )
    return types.Task(
      id=where,
      env=self.name,
      prompt=prompt,
      answer=row.get('answer'),
      info=row,
      tools=self._tools,
    )


class Episode:
  """One instance of the class; turns are calls of its methods."""

  def __init__(
    self, task: types.Task, factory: Callable[[], Any], correct_at: float | None
  ):
    self._task, self._env, self._correct_at = task, factory(), correct_at

  def reset(self) -> types.Messages:
    text = coroutines.wait(self._env.reset(**self._task.info)) or ''
    *before, last = self._task.prompt
    return (*before, {**last, 'content': last['content'] + text})

  def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
    """Runs a tool; see `base.ToolEpisode`."""
    return getattr(self._env, name)(**arguments)

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Ends the episode: the turn has no call."""
    del text, truncated
    return types.StepOut()

  def grade(self) -> types.Score:
    """Returns `get_reward()`; not scorable without that method."""
    reward = coroutines.wait(getattr(self._env, 'get_reward', lambda: None)())
    return adapters.score(
      None if reward is None else float(reward), self._correct_at, {}
    )

  def close(self) -> None:
    pass
