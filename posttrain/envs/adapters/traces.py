"""Conversion of `verifiers` v1 objects: tasksets, prompts, traces.

The functions import the package, so they need it installed; the module does
not.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from posttrain import types
from posttrain.util import foreign

_SCORED = ('task', 'trace')  # what `Task.score` passes without a harness
# Hooks of a task that get a runtime.
_HOOKS = ('setup', 'finalize', 'stage_verifier')
# Fields of a task's data that only a container reads.
_DATA = {'image': 'an image', 'skills': 'skills', 'artifacts': 'artifacts'}


def load(kind: type, options: Mapping[str, Any], key: str) -> Iterable[Any]:
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
      f'{foreign.quote(options)}; {foreign.text(error)}'
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


def prompt(task: Any) -> list[Any]:
  """Returns the messages of a task, in the form of `verifiers`."""
  import verifiers.v1 as vf

  data = task.data
  messages = data.prompt
  if isinstance(messages, str):
    messages = [vf.UserMessage(content=messages)]
  if data.system_prompt is not None:
    messages = [vf.SystemMessage(content=data.system_prompt), *messages]
  return list(messages)


def texts(task: Any) -> types.Messages:
  """Returns the messages of a task, in the form of `types.Messages`.

  Raises:
    ValueError: the content of a message is not a text.
  """
  messages = prompt(task)
  for message in messages:
    if not isinstance(message.content, str):
      raise ValueError(
        f'a message must be a text: got {foreign.quote(message.content)}'
      )
  return tuple({'role': m.role, 'content': m.content} for m in messages)


def needs(task: Any) -> list[str]:
  """Returns the requirements of a task beyond one turn of a conversation.

  `Task.score` skips what it cannot call, and a reward that reads a skipped
  metric is then wrong for every answer.
  """
  import verifiers.v1 as vf
  from verifiers.v1.utils import decorators

  kind, data = type(task), task.data
  requirements = [
    f'{what} for {role} {name!r}'
    for role, name, fn in _signals(task)
    for what in _lacking(fn)
  ]
  if kind.NEEDS_CONTAINER:
    requirements.append('a container')
  requirements += [
    f'a runtime for {hook}'
    for hook in _HOOKS
    if getattr(kind, hook) is not getattr(vf.Task, hook)
  ]
  requirements += [
    f'a model server for {fn.__name__!r}'
    for fn in decorators.discover_decorated(task, 'intercept')
  ]
  requirements += [
    what for field, what in _DATA.items() if getattr(data, field)
  ]
  if task.scoring_deferred:
    requirements.append('a verifier of its own (its scoring is deferred)')
  if kind.toolsets(task.config):
    requirements.append('tool servers')
  if not data.prompt:
    requirements.append('a first message from the user')
  return requirements


def _signals(task: Any) -> Iterable[tuple[str, str, Callable]]:
  """Yields (role, name, function) of everything that scores a task."""
  for role in ('metric', 'reward'):
    yield from ((role, fn.__name__, fn) for fn in task.hooks(role))
  for judge in task.plugged_judges():
    yield 'judge', judge.reward_name, judge.score


def _lacking(fn: Callable) -> list[str]:
  """Returns the arguments of a scoring function that nothing here can pass."""
  return [
    'a runtime' if name == 'runtime' else f'an argument {name!r}'
    for name, parameter in inspect.signature(fn).parameters.items()
    if name not in _SCORED
    and parameter.default is parameter.empty
    and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
  ]


def trace(task: Any, text: str, truncated: bool) -> Any:
  """Returns the `Trace` of a conversation that ends with one turn.

  Args:
    task: the taskset's task.
    text: the assistant turn.
    truncated: whether the turn was cut off.
  """
  import verifiers.v1 as vf
  from verifiers.v1 import state

  messages = [*prompt(task), vf.AssistantMessage(content=text)]
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
