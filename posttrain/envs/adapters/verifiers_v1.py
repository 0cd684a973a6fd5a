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

import functools
import inspect
import itertools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import adapters, base
from posttrain.util import coroutines, errors, imports


class Verifiers(base.Env):
  """`schema.Verifiers`."""

  max_turns = 1

  def __init__(self, name: str, cfg: schema.Verifiers):
    """Imports the taskset's class; tasks are loaded later.

    Raises:
      ValueError: `verifiers` is not installed, or the class does not exist.
    """
    adapters.load('verifiers.v1', 'verifiers', name)
    self.name, self._cfg, self.blocking = name, cfg, cfg.blocking
    self._correct_at = cfg.correct_at
    self._class = imports.function(cfg.taskset, f'envs.{name}.env.taskset')
    self._tasks = functools.cache(self._load)  # by split

  def source(self, split: str, seed: int) -> base.Source:
    """Returns the tasks of a split, fewer if the taskset has fewer.

    Raises:
      ValueError: an option is not one of the taskset's, or a task needs more
        than one turn.
    """
    tasks = self._tasks(split)
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
    import verifiers.v1 as vf
    from verifiers.v1 import state

    split, index = task.id.split(':')
    vf_task = self._tasks(split)[int(index)]

    def grade(text: str, truncated: bool) -> types.Score:
      messages = [*_prompt(vf_task), vf.AssistantMessage(content=text)]
      last = len(messages) - 1
      reason = 'length' if truncated else 'stop'
      trace = vf.Trace(
        task=vf.TraceTask(
          type=type(vf_task).__name__,
          data=vf_task.data,
          key=vf_task.key,
          hash=vf_task.hash,
        ),
        state=state.state_cls(type(vf_task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[
          vf.MessageNode(
            parent=i - 1 if i else None, message=message, sampled=i == last
          )
          for i, message in enumerate(messages)
        ],
        calls=[vf.ModelCall(node=last, finish_reason=reason)],
      )
      trace.stop('agent_completed')
      coroutines.wait(vf_task.score(trace))
      rewards = {name: one.score for name, one in trace.rewards.items()}
      return adapters.score(
        trace.reward if rewards else None,
        self._correct_at,
        {**trace.metrics, **rewards},
      )

    return base.OneTurn(task, grade)

  def _load(self, split: str) -> list[Any]:
    cfg, options = self._cfg, self._cfg.options
    first, count = 0, cfg.eval_tasks
    if split == 'eval':
      options = options | cfg.eval_options
    else:
      first, count = 0 if cfg.eval_options else count, cfg.train_tasks
    key = f'envs.{self.name}.env'
    taskset = load_taskset(self._class, options, key)
    return base.build(
      f'{key}.taskset',
      lambda: list(itertools.islice(taskset, first, first + count)),
    )

  def _task(self, id: str, vf_task: Any) -> types.Task:
    import verifiers.v1 as vf
    from verifiers.v1.utils import decorators

    # `Task.score` skips what it cannot call, and a reward that reads a skipped
    # metric is then wrong for every answer.
    kind, data = type(vf_task), vf_task.data
    scoring = [*vf_task.hooks('metric'), *vf_task.hooks('reward')]
    scoring += [judge.score for judge in vf_task.plugged_judges()]
    needs = [
      f'{name!r} of {fn.__name__}'
      for fn in scoring
      for name, x in inspect.signature(fn).parameters.items()
      if name not in ('task', 'trace')
      and x.default is x.empty
      and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
    ]
    needs += [
      f'a runtime for {hook}'
      for hook in ('setup', 'finalize', 'stage_verifier')
      if getattr(kind, hook) is not getattr(vf.Task, hook)
    ]
    messages = _prompt(vf_task)
    others = {
      'a container': kind.NEEDS_CONTAINER,
      'a model server': decorators.discover_decorated(vf_task, 'intercept'),
      'an image': data.image,
      'skills': data.skills,
      'artifacts': data.artifacts,
      'a verifier of its own': vf_task.scoring_deferred,
      'tool servers': kind.toolsets(vf_task.config),
      'a first message from the user': not data.prompt,
      'images': not all(isinstance(x.content, str) for x in messages),
    }
    needs += [need for need, value in others.items() if value]
    if needs:
      raise ValueError(
        f'environment {self.name}, task {id} must be a conversation of one '
        f'turn in texts: a {kind.__name__} needs {", ".join(needs)}'
      )
    prompt = tuple({'role': m.role, 'content': m.content} for m in messages)
    info = data.model_dump(
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
  # `verifiers` plays a taskset by the environment of the package that exports
  # it, whose `run` and `finalize` may compare the rollouts of a group.
  needs = ['tool servers'] if taskset.toolsets(taskset.config) else []
  parts = kind.__module__.split('.')
  for end in range(len(parts)):
    names = vars(sys.modules['.'.join(parts[: end + 1])])
    classes = [x for x in names.values() if isinstance(x, type)]
    if kind in classes:
      needs += [
        x.__name__
        for x in classes
        if issubclass(x, vf.Env) and not x.__module__.startswith('verifiers.')
      ]
  if needs:
    raise ValueError(
      f'{key}.taskset must need no tool servers and no environment of its own: '
      f'got {kind.__name__!r}, which has {", ".join(needs)}; compare rollouts '
      'in a reward function'
    )
  return taskset


def _prompt(task: Any) -> list[Any]:
  """Returns the messages of a task, in the form of `verifiers`."""
  import verifiers.v1 as vf

  messages, system = task.data.prompt or [], task.data.system_prompt
  if isinstance(messages, str):
    messages = [vf.UserMessage(content=messages)]
  before = [] if system is None else [vf.SystemMessage(content=system)]
  return [*before, *messages]
