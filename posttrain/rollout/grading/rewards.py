"""Rewards of an environment: weighted sums of functions and reward models.

    def fn(prompts, completions, completion_ids, **columns)
        -> list[float | None]

TRL's signature: lists with one entry per rollout. `completions` are the
messages after the prompt, `completion_ids` the sampled ids. Where a row of data
has its prompt as a string, prompt and completion are strings. The columns are
the fields of the tasks: `answer`, and each key of `info`, None for a task
without it. A function may also take `rollouts` (not in TRL), `judge` (the
config's), `log_metric(name, value)` and `log_extra(column, values)`: the means
of numbers are logged, other values are dropped, since there is no table of
completions.
The metrics `faults` and `seconds` are reserved. None means "not scorable": the
entry is left out of the sum. A function may be a coroutine. There is no
`trainer_state`.

A function runs in a thread, and a coroutine in an event loop that all of them
share (`calls`). A call has a time limit, and a function may fail a few times
(`functions`): the rollouts of a failed call have no reward.

Functions are called one after another, but for those whose judge is on a
server: they wait for it at the same time, each in a thread of its own, those of
other environments included. (Not with several processes, which share the calls
among them in a fixed order.)
"""

import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from posttrain import processes, schema, types
from posttrain.chat import rendering
from posttrain.decode import requests
from posttrain.rollout.grading import functions
from posttrain.rollout.remote import remote as remotes
from posttrain.util import imports, side_by_side

# Names of the arguments of all functions, besides the columns of the rows.
ARGUMENTS = (
  'answer',
  'completion_ids',
  'completions',
  'log_extra',
  'log_metric',
  'prompts',
  'rollouts',
)
TooManyFaults, OnlyFaults = functions.TooManyFaults, functions.OnlyFaults


class Judge(Protocol):
  """A model that replies to conversations."""

  def __call__(
    self,
    conversations: Sequence[types.Messages],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
  ) -> list[str]:
    """Returns the text of one reply per conversation."""
    ...


Model = Callable[[Sequence[types.Rollout]], functions.Result]
Rewarded = tuple[list[types.Rollout], dict[str, float], tuple[str, ...]]


class LocalJudge:
  """A judge in this process."""

  def __init__(self, engine: Any, renderer: rendering.Renderer):
    """Args: engine: an engine with weights, used by this judge alone."""
    self._engine, self._renderer = engine, renderer
    self._lock = threading.Lock()  # a function may call it from many threads

  def __call__(
    self,
    conversations: Sequence[types.Messages],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
  ) -> list[str]:
    """Returns the text of one reply per conversation."""
    prompts = [
      self._renderer.render(messages, add_generation_prompt=True).ids
      for messages in conversations
    ]
    # An id is a hash of the prompt, so that the draws are the same after a
    # restart; equal prompts get one reply.
    ids = [_request_id(prompt) for prompt in prompts]
    by_id = {
      id: requests.Request(
        id=id,
        ids=prompt,
        max_tokens=max_tokens,
        stop_ids=self._renderer.stop_ids,
        sampling=requests.Sampling(temperature=temperature),
      )
      for id, prompt in zip(ids, prompts, strict=True)
    }
    with self._lock:
      completions = self._engine.generate(list(by_id.values()))
    texts = {
      x.id: self._renderer.tokenizer.decode(
        [i for i in x.ids.tolist() if i not in self._renderer.stop_ids]
      )
      for x in completions
    }
    return [texts[id] for id in ids]


class Rewards:
  """The rewards of one environment's rollouts."""

  def __init__(
    self,
    env: str,
    cfg: Mapping[str, schema.RewardFn],
    columns: Callable[[], Iterable[str]] = tuple,
    judge: Callable[[schema.Reference], Judge] | None = None,
    reward_model: Callable[[str], Model] | None = None,
    remote: remotes.Remote | None = None,
  ):
    """Imports the functions; looks up all judges and reward models.

    Args:
      env: the environment's name.
      cfg: the summands; {} = the environment's own grade as it is.
      columns: returns each key of `info` that some task has; called once, when
        the tasks of a step all lack an argument of a function.
      judge: returns the judge with a name of `cfg`; called once per name.
      reward_model: returns the reward model with a name of `cfg`; called once
        per name.
      remote: the worker processes of functions; None = threads.

    Raises:
      ValueError: a path of `cfg` names no function, or a name no model that
        fits.
      EndpointError: a judge's server is away.
    """
    self._cfg, columns = cfg, functools.cache(columns)
    self._judges = _look_up((entry.judge for entry in cfg.values()), judge)
    self._models = _look_up((x.model for x in cfg.values()), reward_model)
    keys = {name: f'envs.{env}.rewards.{name}' for name in cfg}
    self._functions = {
      name: functions.Function(
        keys[name],
        entry,
        imports.function(entry.fn, f'{keys[name]}.fn'),
        columns,
        remote,
      )
      for name, entry in cfg.items()
      if entry.fn is not None
    }
    self._budgets = {
      name: self._functions[name].budget
      if name in self._functions
      else functions.Budget(
        keys[name], f'{keys[name]}: {entry.model}', entry.max_faults
      )
      for name, entry in cfg.items()
    }

  def __call__(self, rollouts: Sequence[types.Rollout]) -> Rewarded:
    """Returns the result of `task`."""
    (result,) = side_by_side.run([self.task(rollouts)])
    return result.result()

  def task(
    self, rollouts: Sequence[types.Rollout]
  ) -> side_by_side.Task[Rewarded]:
    """Computes rewards; a task of `side_by_side`.

        reward = sum_k weight_k r_k    over the k where r_k is not None

    The reward is None if all r_k are, or if the call of a function failed: a
    partial sum is on another scale. A rollout without samples, which is one
    that failed, stays as it is.

    Returns:
      (the rollouts with their rewards, metrics, errors of the functions)

    Raises:
      ValueError: a function takes an argument that does not exist.
      TooManyFaults: a function or a model failed too many times in a row.
      EndpointError: a judge's server is away.
    """
    alive = [r for r in rollouts if r.samples]
    if not self._cfg or not alive:
      return list(rollouts), {}, ()
    results = yield from self._results(alive)
    errors = tuple(x.error for x in results.values() if x.error is not None)
    processes.attempt(lambda: self._check_budgets(errors))
    failed = frozenset().union(*(x.failed for x in results.values()))
    scores = {
      rollout.uid: dataclasses.replace(
        rollout.score,
        reward=None if i in failed else self._total(i, results),
        summands={name: x.rewards[i] for name, x in results.items()},
      )
      for i, rollout in enumerate(alive)
    }
    return (
      [
        dataclasses.replace(r, score=scores[r.uid]) if r.uid in scores else r
        for r in rollouts
      ],
      _metrics(results),
      errors,
    )

  def _results(
    self, rollouts: Sequence[types.Rollout]
  ) -> side_by_side.Task[dict[str, functions.Result]]:
    """Returns the rewards of every summand; waits for all servers at once."""
    names = {name: process for process, name in enumerate(self._cfg)}
    served = {
      name: side_by_side.thread(self._evaluate, process, name, rollouts)
      for name, process in names.items()
      if processes.count() == 1
      and isinstance(self._cfg[name].judge, schema.Endpoint)
    }
    if served:
      yield ()  # other environments start theirs
    results = {
      name: self._evaluate(process, name, rollouts)
      for name, process in names.items()
      if name not in served
    }
    while running := [x for x in served.values() if not x.done()]:
      yield running
    results |= {name: future.result() for name, future in served.items()}
    return {name: results[name] for name in names}

  def _total(
    self, i: int, results: Mapping[str, functions.Result]
  ) -> float | None:
    """Returns the weighted sum of a rollout's summands that are known."""
    known = [
      self._cfg[name].weight * value
      for name, result in results.items()
      if (value := result.rewards[i]) is not None
    ]
    return sum(known) if known else None

  def _check_budgets(self, errors: tuple[str, ...]) -> None:
    for budget in self._budgets.values():
      budget.check(errors)

  def _evaluate(self, process: int, name: str, rollouts) -> functions.Result:
    """Returns the rewards of a summand; one process calls its function."""
    cfg = self._cfg[name]
    if cfg.model is not None:
      result = self._models[cfg.model](rollouts)
      self._budgets[name].count(result.error)
      return result
    if cfg.fn is None:
      return functions.Result([r.score.reward for r in rollouts])

    def call() -> functions.Result:
      judge = None if cfg.judge is None else self._judges[cfg.judge]
      arguments = {**columns(rollouts), **cfg.kwargs}
      return self._functions[name](rollouts, arguments, judge)

    return processes.on(process, call)


def check(
  env: str,
  cfg: Mapping[str, schema.RewardFn],
  keys: Iterable[str],
  columns: Callable[[], Iterable[str]],
) -> None:
  """Refuses functions that need an argument that no task has.

  Args:
    env: the environment's name.
    cfg: the summands.
    keys: keys of `info` of some tasks.
    columns: returns those of all tasks; called if a function needs another.

  Raises:
    ValueError: names the function, and the arguments that exist.
  """
  for name, entry in cfg.items():
    if entry.fn is None:
      continue
    key = f'envs.{env}.rewards.{name}.fn'
    fn = imports.function(entry.fn, key)
    judge = ('judge',) if entry.judge is not None else ()
    known = {*ARGUMENTS, *keys, *entry.kwargs, *judge}
    if functions.missing(fn, known):
      known |= set(columns())
    functions.require_arguments(key, fn, known)


def _look_up(
  names: Iterable[Any], look_up: Callable[[Any], Any] | None
) -> dict[Any, Any]:
  """Returns the model of each name that is not None."""
  used = dict.fromkeys(name for name in names if name is not None)
  assert look_up is not None or not used, f'{used} must be looked up'
  return {name: look_up(name) for name in used} if look_up else {}


def columns(rollouts: Sequence[types.Rollout]) -> dict[str, list[Any]]:
  """Returns the arguments of a reward function, one entry per rollout."""
  tasks = [rollout.task for rollout in rollouts]
  keys = {key for task in tasks for key in task.info}
  return {
    **{key: [task.info.get(key) for task in tasks] for key in sorted(keys)},
    'answer': [task.answer for task in tasks],
    'prompts': [_given(r, r.prompt) for r in rollouts],
    'completions': [_given(r, r.completion_messages) for r in rollouts],
    'completion_ids': [
      np.concatenate([s.ids[s.mask] for s in r.samples]).tolist()
      for r in rollouts
    ],
  }


def _given(
  rollout: types.Rollout, messages: types.Messages
) -> str | list[types.Message]:
  """Returns messages as a reward function gets them."""
  if rollout.task.as_text and len(messages) == 1:
    return messages[0]['content']
  return list(messages)


def _metrics(results: Mapping[str, functions.Result]) -> dict[str, float]:
  metrics = {}
  for name, result in results.items():
    known = [x for x in result.rewards if x is not None]
    if known:
      metrics[f'rewards/{name}'] = float(np.mean(known))
    metrics |= {f'rewards/{name}/{k}': v for k, v in result.metrics.items()}
  return metrics


def _request_id(prompt: np.ndarray) -> int:
  digest = hashlib.blake2b(prompt.tobytes(), digest_size=8).digest()
  return int.from_bytes(digest, 'big') >> 1
