"""Between `verifiers` v1 and ours: tasksets, prompts, needs, traces.

Only called where the package is installed, and imports it inside.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain import types


def load(kind: type, options: Mapping[str, Any], key: str) -> Iterable[Any]:
  """Returns a taskset: an iterable of tasks, which may be endless.

  Args:
    kind: its class.
    options: of its config.
    key: dotted config key of the environment, for errors.

  Raises:
    ValueError: there is no such option, or the set needs tool servers.
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
  asks = data.prompt
  if isinstance(asks, str):
    asks = [vf.UserMessage(content=asks)]
  if data.system_prompt is not None:
    asks = [vf.SystemMessage(content=data.system_prompt), *asks]
  return list(asks)


def texts(task: Any) -> types.Messages:
  """Returns the same messages, in ours.

  Raises:
    ValueError: one is more than a text.
  """
  asks = prompt(task)
  for message in asks:
    if not isinstance(message.content, str):
      raise ValueError(f'a message must be a text: got {message.content!r}')
  return tuple({'role': m.role, 'content': m.content} for m in asks)


def needs(task: Any) -> list[str]:
  """Returns what a task asks for beside one turn of a conversation."""
  import verifiers.v1 as vf

  kind = type(task)
  scorers = {fn.__name__: fn for fn in task.hooks('reward')}
  scorers |= {judge.reward_name: judge.score for judge in task.plugged_judges()}
  found = [
    f'a runtime for reward {name!r}'
    for name, fn in scorers.items()
    if _needs_runtime(fn)
  ]
  if kind.NEEDS_CONTAINER:
    found.append('a container')
  found += [
    f'a runtime for {hook}'
    for hook in ('setup', 'finalize')
    if getattr(kind, hook) is not getattr(vf.Task, hook)
  ]
  if kind.toolsets(task.config):
    found.append('tool servers')
  if not task.data.prompt:
    found.append('a user who speaks first')
  return found


def _needs_runtime(fn: Any) -> bool:
  runtime = inspect.signature(fn).parameters.get('runtime')
  return runtime is not None and runtime.default is runtime.empty


def trace(task: Any, text: str, truncated: bool) -> Any:
  """Returns the `Trace` of a conversation that one turn ends.

  Args:
    task: of the taskset.
    text: the turn.
    truncated: whether it was cut off.
  """
  import verifiers.v1 as vf
  from verifiers.v1 import state

  said = [*prompt(task), vf.AssistantMessage(content=text)]
  last = len(said) - 1
  made = vf.Trace(
    task=vf.TraceTask(
      type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
    ),
    state=state.state_cls(type(task))(),
    agent=vf.AgentInfo(config=vf.AgentConfig()),
    nodes=[
      vf.MessageNode(
        parent=i - 1 if i else None, message=message, sampled=i == last
      )
      for i, message in enumerate(said)
    ],
    calls=[
      vf.ModelCall(node=last, finish_reason='length' if truncated else 'stop')
    ],
  )
  made.stop('agent_completed')
  return made
