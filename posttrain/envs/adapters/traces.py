"""Conversion of `verifiers` v1 objects: tasksets, prompts, traces.

The functions import the package, so they need it installed; the module does
not.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain import types


def load(kind: type, options: Mapping[str, Any], key: str) -> Iterable[Any]:
  """Returns a taskset: an iterable of tasks, which may be endless.

  Args:
    kind: the taskset's class.
    options: options of the class's config.
    key: dotted config key of the environment, for errors.

  Raises:
    ValueError: an option does not exist, or the taskset needs tool servers.
  """
  import verifiers.v1 as vf
  from verifiers.v1.utils import generic

  config = generic.concrete_type(kind, vf.TasksetConfig, origin=vf.Taskset)
  config = config or vf.TasksetConfig
  try:
    taskset = kind(config(**options))
  except ValueError as error:  # pydantic's
    raise ValueError(
      f'{key}.options must be those of {config.__name__}: got {options!r}; '
      f'{error}'
    ) from error
  if taskset.toolsets(taskset.config):
    raise ValueError(
      f'{key}.taskset must need no tool servers: got {kind.__name__!r}'
    )
  return taskset


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
      raise ValueError(f'a message must be a text: got {message.content!r}')
  return tuple({'role': m.role, 'content': m.content} for m in messages)


def needs(task: Any) -> list[str]:
  """Returns the requirements of a task beyond one turn of a conversation."""
  import verifiers.v1 as vf

  kind = type(task)
  scorers = {fn.__name__: fn for fn in task.hooks('reward')}
  scorers |= {judge.reward_name: judge.score for judge in task.plugged_judges()}
  requirements = [
    f'a runtime for reward {name!r}'
    for name, fn in scorers.items()
    if _needs_runtime(fn)
  ]
  if kind.NEEDS_CONTAINER:
    requirements.append('a container')
  requirements += [
    f'a runtime for {hook}'
    for hook in ('setup', 'finalize')
    if getattr(kind, hook) is not getattr(vf.Task, hook)
  ]
  if kind.toolsets(task.config):
    requirements.append('tool servers')
  if not task.data.prompt:
    requirements.append('a first message from the user')
  return requirements


def _needs_runtime(fn: Any) -> bool:
  runtime = inspect.signature(fn).parameters.get('runtime')
  return runtime is not None and runtime.default is runtime.empty


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
