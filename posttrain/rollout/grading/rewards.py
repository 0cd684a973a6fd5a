"""Rewards that a config adds up: functions of yours, and models that judge.

    def fn(prompts, completions, completion_ids, **columns)
        -> list[float | None]

TRL's signature: lists with one entry per rollout. `completions` are the
messages behind the prompt, `completion_ids` the sampled ids; the columns are
what the tasks carry: `answer`, and each key of `info`, None for a task without
it. It may also take `rollouts` (ours), `judge` (of its config),
`log_metric(name, value)` and `log_extra(column, values)`: the mean of what is a
number is logged, for there is no table of completions to put the rest in;
`faults` and `seconds` are ours. None is "not scorable": it is left out of the
sum. It may be a coroutine. There is no `trainer_state`.

It runs in a thread, and a coroutine in an event loop that all of them share
(`reward_calls`), for a limited time, and may fail a few times
(`reward_functions`): what it should have scored then has no reward.
"""

import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from posttrain import schema, types
from posttrain.chat import renderer as chat
from posttrain.decode import requests
from posttrain.rollout.grading import functions
from posttrain.util import imports

TooManyFaults = functions.TooManyFaults


class Judge(Protocol):
  """A model that is asked."""

  def __call__(
    self,
    conversations: Sequence[types.Messages],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
  ) -> list[str]:
    """Answers each conversation."""
    ...


Model = Callable[[Sequence[types.Rollout]], functions.Found]


class LocalJudge:
  """A judge in this process."""

  def __init__(self, engine: Any, renderer: chat.Renderer):
    """Args: engine: of its own, with weights."""
    self._engine, self._renderer = engine, renderer
    self._lock = threading.Lock()  # a function may ask from many threads

  def __call__(self, conversations, *, max_tokens=64, temperature=0.0):
    prompts = [
      self._renderer.render(messages, add_generation_prompt=True).ids
      for messages in conversations
    ]
    # Named by what is asked, the draws are the same after a restart; who asks
    # twice gets one answer.
    ids = [_name(prompt) for prompt in prompts]
    asked = {
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
      done = self._engine.generate(list(asked.values()))
    texts = {
      x.id: self._renderer.tokenizer.decode(
        [i for i in x.ids.tolist() if i not in self._renderer.stop_ids]
      )
      for x in done
    }
    return [texts[id] for id in ids]


class Rewards:
  """What the rollouts of one environment are worth."""

  def __init__(
    self,
    env: str,
    cfg: Mapping[str, schema.RewardFn],
    columns: Callable[[], Iterable[str]] = tuple,
  ):
    """Makes them without judges and models, see `connect`.

    Args:
      env: its name.
      cfg: {} = its own grade as it is.
      columns: returns each key of `info` that some task has; asked once, when
        those of a step all lack what a function needs.
    """
    self._cfg, columns = cfg, functools.cache(columns)
    keys = {name: f'envs.{env}.rewards.{name}' for name in cfg}
    self._functions = {
      name: functions.Function(
        keys[name], one, imports.function(one.fn, f'{keys[name]}.fn'), columns
      )
      for name, one in cfg.items()
      if one.fn is not None
    }
    self._budgets = {
      name: self._functions[name].budget
      if name in self._functions
      else functions.Budget(
        keys[name], f'{keys[name]}: {one.model}', one.max_faults
      )
      for name, one in cfg.items()
    }
    self._judges: dict[schema.Reference, Judge] = {}
    self._models: dict[str, Model] = {}

  def connect(
    self,
    judge: Callable[[schema.Reference], Judge] | None,
    model: Callable[[str], Model] | None = None,
  ) -> None:
    """Hands it the judges and reward models that it names."""
    names = {one.judge for one in self._cfg.values()} - {None}
    self._judges = {name: judge(name) for name in names}
    names = {one.model for one in self._cfg.values()} - {None}
    self._models = {name: model(name) for name in names}

  def __call__(
    self, rollouts: Sequence[types.Rollout]
  ) -> tuple[list[types.Rollout], dict[str, float], tuple[str, ...]]:
    """Returns the rollouts with their rewards, what was measured, and faults.

        reward = sum_k weight_k r_k    over those that are not None

    None if all are, or if a function failed to say what it should have said:
    a part of the sum is no reward. A rollout that failed stays as it is.

    Raises:
      ValueError: a function asks for what there is not.
      TooManyFaults: a function or a model fails again and again.
      EndpointError: of a judge.
    """
    alive = [r for r in rollouts if r.samples]
    if not self._cfg or not alive:
      return list(rollouts), {}, ()
    asked = {name: self._ask(name, alive) for name in self._cfg}
    errors = tuple(x.error for x in asked.values() if x.error is not None)
    for budget in self._budgets.values():
      budget.check(errors)
    failed = frozenset().union(*(x.failed for x in asked.values()))
    totals = {
      rollout.uid: None
      if i in failed
      else _total(
        [(self._cfg[k].weight, x.rewards[i]) for k, x in asked.items()]
      )
      for i, rollout in enumerate(alive)
    }
    return (
      [
        dataclasses.replace(
          r, score=dataclasses.replace(r.score, reward=totals[r.uid])
        )
        if r.uid in totals
        else r
        for r in rollouts
      ],
      _metrics(asked),
      errors,
    )

  def _ask(self, name: str, rollouts) -> functions.Found:
    cfg = self._cfg[name]
    if cfg.model is not None:
      found = self._models[cfg.model](rollouts)
      self._budgets[name].count(found.error)
      return found
    if cfg.fn is None:
      return functions.Found([r.score.reward for r in rollouts])
    judge = None if cfg.judge is None else self._judges[cfg.judge]
    given = {**columns(rollouts), **cfg.kwargs}
    return self._functions[name](rollouts, given, judge)


def columns(rollouts: Sequence[types.Rollout]) -> dict[str, list[Any]]:
  """Returns what a reward function is told of rollouts, entry by entry."""
  tasks = [rollout.task for rollout in rollouts]
  keys = {key for task in tasks for key in task.info}
  return {
    **{key: [task.info.get(key) for task in tasks] for key in sorted(keys)},
    'answer': [task.answer for task in tasks],
    'prompts': [list(rollout.prompt) for rollout in rollouts],
    'completions': [list(rollout.said) for rollout in rollouts],
    'completion_ids': [
      np.concatenate([s.ids[s.mask] for s in r.samples]).tolist()
      for r in rollouts
    ],
  }


def _metrics(asked: Mapping[str, functions.Found]) -> dict[str, float]:
  metrics = {}
  for name, found in asked.items():
    known = [x for x in found.rewards if x is not None]
    if known:
      metrics[f'rewards/{name}'] = float(np.mean(known))
    metrics |= {f'rewards/{name}/{k}': v for k, v in found.metrics.items()}
  return metrics


def _total(parts: Sequence[tuple[float, float | None]]) -> float | None:
  known = [weight * value for weight, value in parts if value is not None]
  return sum(known) if known else None


def _name(prompt: np.ndarray) -> int:
  digest = hashlib.blake2b(prompt.tobytes(), digest_size=8).digest()
  return int.from_bytes(digest, 'big') >> 1
