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

import inspect
import itertools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import base
from posttrain.envs.adapters import common
from posttrain.util import errors, imports


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

  def make(self, task: types.Task) -> base.OneTurn:
    """Returns an episode; exceptions of reward functions are raised.

    The metrics of its score hold each reward.
    """
    split, index = task.id.split(':')
    vf_task = self._load(split)[int(index)]

    def grade(text: str, truncated: bool) -> types.Score:
      trace = _trace(vf_task, text, truncated)
      common.settle(vf_task.score(trace))
      rewards = {name: one.score for name, one in trace.rewards.items()}
      return common.score(
        trace.reward if rewards else None,
        self._correct_at,
        {**trace.metrics, **rewards},
      )

    return base.OneTurn(task, grade)

  def _load(self, split: str) -> list[Any]:
    base.check_split(split)
    if split not in self._loaded:
      cfg, evaluates = self._cfg, split == 'eval'
      options = cfg.options | (cfg.eval_options if evaluates else {})
      first = 0 if evaluates or cfg.eval_options else cfg.eval_tasks
      stop = first + getattr(cfg, f'{split}_tasks')
      key = f'envs.{self.name}.env'
      taskset = load_taskset(self._class, options, key)
      self._loaded[split] = base.build(
        f'{key}.taskset', lambda: list(itertools.islice(taskset, first, stop))
      )
    return self._loaded[split]

  def _task(self, id: str, vf_task: Any) -> types.Task:
    where = f'environment {self.name}, task {id}'
    if needs := _needs(vf_task):
      raise ValueError(
        f'{where} must be a conversation of one turn: a '
        f'{type(vf_task).__name__} needs {", ".join(needs)}; leave that out '
        'of the taskset, or play it by the harness of verifiers'
      )
    messages = _prompt(vf_task)
    for message in messages:
      if not isinstance(message.content, str):
        raise ValueError(
          f'{where}: a message must be a text: got '
          f'{errors.quote(message.content)}'
        )
    prompt = tuple({'role': m.role, 'content': m.content} for m in messages)
    info = vf_task.data.model_dump(
      mode='json', exclude_defaults=True, exclude={'prompt', 'system_prompt'}
    )
    return types.Task(
      id=id, env=self.name, prompt=prompt, answer=info.get('answer'), info=info
    )


def load_taskset(
  kind: type, options: Mapping[str, Any], key: str
) -> Iterable[Any]:
  """Returns a taskset: an iterable of tasks, which may be endless.

  Args:
    kind: the taskset's class.
    options: options of the class's config.
    key: dotted config key of the environment, for errors.

  Raises:
    ValueError: an option does not exist, or the taskset needs tool servers or
      an environment of its own.
  """
  import verifiers.v1 as vf
  from verifiers.v1.utils import generic

  config = generic.concrete_type(kind, vf.TasksetConfig, origin=vf.Taskset)
  config = config or vf.TasksetConfig
  try:
    taskset = kind(config(**options))
  except ValueError as error:  # pydantic's
    raise ValueError(
      f'{key}.options must be those of {config.__name__}: got '
      f'{errors.quote(options)}; {errors.text(error)}'
    ) from error
  if taskset.toolsets(taskset.config):
    raise ValueError(
      f'{key}.taskset must need no tool servers: got {kind.__name__!r}'
    )
  if own := _own_env(kind):
    raise ValueError(
      f'{key}.taskset must need no environment of its own: got '
      f'{kind.__name__!r}, whose package has {own!r}; its run and finalize, '
      'such as a comparison of the rollouts of a group, need the harness of '
      'verifiers; compare rollouts in a reward function of posttrain instead'
    )
  return taskset


def _own_env(kind: type) -> str | None:
  """Returns the name of the `vf.Env` that belongs to a taskset; None if none.

  `verifiers` looks for it in `__all__` of the package that exports the taskset.
  A module without `__all__` exports what it defines.
  """
  import verifiers.v1 as vf

  parts = kind.__module__.split('.')
  for end in range(len(parts), 0, -1):
    name = '.'.join(parts[:end])
    module = sys.modules.get(name)
    names = getattr(module, '__all__', None)
    items = vars(module) if module else {}
    exported = {
      key: value
      for key, value in items.items()
      if (key in names if names else getattr(value, '__module__', '') == name)
      and isinstance(value, type)
    }
    if kind not in exported.values():
      continue
    for key, value in exported.items():
      if issubclass(value, vf.Env) and value not in (vf.Env, vf.SingleAgentEnv):
        return key
  return None


def _prompt(task: Any) -> list[Any]:
  """Returns the messages of a task, in the form of `verifiers`."""
  import verifiers.v1 as vf

  data = task.data
  messages = data.prompt
  if isinstance(messages, str):
    messages = [vf.UserMessage(content=messages)]
  if data.system_prompt is not None:
    messages = [vf.SystemMessage(content=data.system_prompt), *messages]
  return list(messages)


def _needs(task: Any) -> list[str]:
  """Returns the requirements of a task beyond one turn of a conversation.

  `Task.score` skips what it cannot call, and a reward that reads a skipped
  metric is then wrong for every answer.
  """
  import verifiers.v1 as vf
  from verifiers.v1.utils import decorators

  kind, data = type(task), task.data
  scoring = [
    (role, fn.__name__, fn)
    for role in ('metric', 'reward')
    for fn in task.hooks(role)
  ]
  scoring += [
    ('judge', judge.reward_name, judge.score) for judge in task.plugged_judges()
  ]
  requirements = []
  for role, name, fn in scoring:
    for argument, parameter in inspect.signature(fn).parameters.items():
      variadic = parameter.kind in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
      )
      if (
        argument not in ('task', 'trace')
        and parameter.default is parameter.empty
        and not variadic
      ):
        what = f'an argument {argument!r}'
        what = 'a runtime' if argument == 'runtime' else what
        requirements.append(f'{what} for {role} {name!r}')
  if kind.NEEDS_CONTAINER:
    requirements.append('a container')
  requirements += [
    f'a runtime for {hook}'
    for hook in ('setup', 'finalize', 'stage_verifier')
    if getattr(kind, hook) is not getattr(vf.Task, hook)
  ]
  requirements += [
    f'a model server for {fn.__name__!r}'
    for fn in decorators.discover_decorated(task, 'intercept')
  ]
  requirements += [
    what
    for field, what in (
      ('image', 'an image'),
      ('skills', 'skills'),
      ('artifacts', 'artifacts'),
    )
    if getattr(data, field)
  ]
  if task.scoring_deferred:
    requirements.append('a verifier of its own (its scoring is deferred)')
  if kind.toolsets(task.config):
    requirements.append('tool servers')
  if not data.prompt:
    requirements.append('a first message from the user')
  return requirements


def _trace(task: Any, text: str, truncated: bool) -> Any:
  """Returns the `Trace` of a conversation that ends with one turn.

  Args:
    task: the taskset's task.
    text: the assistant turn.
    truncated: whether the turn was cut off.
  """
  import verifiers.v1 as vf
  from verifiers.v1 import state

  messages = [*_prompt(task), vf.AssistantMessage(content=text)]
  last = len(messages) - 1
  result = vf.Trace(
    task=vf.TraceTask(
      type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
    ),
    state=state.state_cls(type(task))(),
    agent=vf.AgentInfo(config=vf.AgentConfig()),
    nodes=[
      vf.MessageNode(
        parent=i - 1 if i else None, message=message, sampled=i == last
      )
      for i, message in enumerate(messages)
    ],
    calls=[
      vf.ModelCall(node=last, finish_reason='length' if truncated else 'stop')
    ],
  )
  result.stop('agent_completed')
  return result
