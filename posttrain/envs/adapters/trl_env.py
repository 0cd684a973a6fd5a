"""Classes of TRL's `environment_factory`: an episode with tools as methods.

    class Guess:
      def reset(self, low: int, **row) -> str | None: ...
      def guess(self, number: int) -> str:
        '''Says whether the number is higher or lower.'''
      def get_reward(self) -> float: ...

1. `reset(**row)` is told the columns of the row, `prompt` among them. What it
   returns is appended to the last message of the prompt, as it is.
2. Every other method without a leading underscore is a tool; `async` ones
   too. Tools are told in the system message, see `calls`.
3. A turn's calls are run in order, each answered by a message of role 'tool':
   by what it raises, too. A turn without a call ends the episode.
4. `get_reward()` is the grade. Without one, the entry's `rewards` are: they are
   told the row's columns, but no `environments`.

TRL itself is not needed.
"""

from collections.abc import Callable, Mapping
from typing import Any

from posttrain import schema, types
from posttrain.chat import messages
from posttrain.data import jsonl, sources
from posttrain.envs import base
from posttrain.envs.adapters import calls, common
from posttrain.util import imports

_OURS = ('reset', 'get_reward')  # methods that are no tools


class Trl(base.Env):
  """`schema.Trl`."""

  def __init__(self, name: str, cfg: schema.Trl):
    """Makes one instance, to see its tools.

    Raises:
      ValueError: there is no such class, or it has no `reset`.
    """
    key = f'envs.{name}.env.factory'
    self.name, self._cfg, self.max_turns = name, cfg, cfg.max_turns
    self.blocking = cfg.blocking
    self._factory = imports.function(cfg.factory, key)
    made = self._factory()
    if not hasattr(made, 'reset'):
      raise ValueError(
        f'{key} must make what has a method reset: got {cfg.factory!r}, '
        f'which makes a {type(made).__name__}'
      )
    self._tools = calls.describe(calls.tools(made, _OURS))

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns a task per row of the split's file, or as many empty ones.

    Raises:
      ValueError: no such file, or a row is malformed; names its line.
    """
    base.check_split(split)
    cfg = self._cfg
    if cfg.path is None:
      count = getattr(cfg, f'{split}_tasks')
      rows, made_of = [({}, f'{split}:{i}') for i in range(count)], ''
    else:
      field = 'path' if split == 'train' else 'eval_path'
      if (path := getattr(cfg, field)) is None:
        return sources.Shuffled((), seed)
      file = base.find(self.name, field, path, folders=False)
      rows, made_of = jsonl.objects(file), sources.file_fingerprint(file)
    return sources.Shuffled(
      [self._task(row, where) for row, where in rows], seed, made_of
    )

  def make(self, task: types.Task) -> 'Episode':
    return Episode(task, self._factory, self._cfg.correct_at)

  def _task(self, row: Mapping[str, Any], where: str) -> types.Task:
    prompt = row.get('prompt', '')
    if isinstance(prompt, str):
      prompt = [{'role': 'user', 'content': prompt}]
    if not isinstance(prompt, list) or not prompt:
      raise ValueError(
        f'{where}: prompt must be a string or a list of messages: got '
        f'{prompt!r}'
      )
    for index, message in enumerate(prompt):
      messages.check(message, f'{where}: prompt[{index}]')
    system = {'role': 'system', 'content': self._tools}
    if prompt[0]['role'] == 'system':
      own, *prompt = prompt
      system = {**own, 'content': f'{own["content"]}\n\n{self._tools}'}
    if not prompt or prompt[-1]['role'] != 'user':
      raise ValueError(
        f'{where}: prompt must end in a user message, to which reset '
        f'appends: got {row["prompt"]!r}'
      )
    return types.Task(
      id=where,
      env=self.name,
      prompt=(system, *prompt),
      answer=row.get('answer'),
      info=row,
    )


class Episode:
  """One instance of the class, and the calls it gets."""

  def __init__(
    self, task: types.Task, factory: Callable[[], Any], correct_at: float | None
  ):
    self._task, self._env, self._correct_at = task, factory(), correct_at
    self._tools = calls.tools(self._env, _OURS)
    self._calls = self._failures = 0

  def reset(self) -> types.Messages:
    self._calls = self._failures = 0
    told = common.settle(self._env.reset(**self._task.info)) or ''
    *before, last = self._task.prompt
    return (*before, {**last, 'content': last['content'] + told})

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Runs the calls of a turn; ends without one."""
    del truncated  # half a call cannot be read, and that is its answer
    found = calls.find(text, self._tools)
    said = tuple(self._answer(call) for call in found)
    return types.StepOut(said, done=not found)

  def grade(self) -> types.Score:
    """Returns `get_reward()`; not scorable if there is none.

    Metrics: `calls`, and `failures`, those that came to nothing.
    """
    reward = common.settle(getattr(self._env, 'get_reward', lambda: None)())
    return common.score(
      None if reward is None else float(reward),
      self._correct_at,
      {'calls': self._calls, 'failures': self._failures},
    )

  def close(self) -> None:
    pass

  def _answer(self, call: calls.Call) -> types.Message:
    self._calls += 1
    try:
      said = str(common.settle(calls.run(call, self._tools)))
    except Exception as error:
      self._failures += 1
      said = f'error: {error}'
    return {'role': 'tool', 'name': call.name, 'content': said}
