"""Rewards that a config adds up: functions of yours, and models that judge.

    def fn(prompts, completions, completion_ids, **columns)
        -> list[float | None]

TRL's signature: lists with one entry per rollout. `completions` are the
messages behind the prompt, `completion_ids` the sampled ids; the columns are
what the tasks carry: `answer`, and each key of `info`. It may also take
`rollouts` (ours), `judge` (of its config), `log_metric(name, value)` and
`log_extra(name, values)`: the mean of what is a number is logged, for there is
no table of completions to put the rest in. None is "not scorable": it is left
out of the sum. It may be a coroutine. There is no `trainer_state`.
"""

import asyncio
import concurrent.futures
import dataclasses
import hashlib
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from posttrain import imports, schema, types
from posttrain.chat import renderer as chat
from posttrain.decode import requests
from posttrain.rollout import endpoint


class Judge(Protocol):
  """A model that is asked."""

  def __call__(
      self, conversations: Sequence[types.Messages], *, max_tokens: int = 64,
      temperature: float = 0.0,
  ) -> list[str]:  # fmt: skip
    """Answers each conversation."""
    ...


class LocalJudge:
  """A judge in this process."""

  def __init__(self, engine: Any, renderer: chat.Renderer):
    """Args: engine: of its own, with weights."""
    self._engine, self._renderer = engine, renderer

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
            id=id, ids=prompt, max_tokens=max_tokens,
            stop_ids=self._renderer.stop_ids,
            sampling=requests.Sampling(temperature=temperature),
        ) for id, prompt in zip(ids, prompts, strict=True)
    }  # fmt: skip
    done = self._engine.generate(list(asked.values()))
    texts = {
        x.id: self._renderer.tokenizer.decode(
            [i for i in x.ids.tolist() if i not in self._renderer.stop_ids]
        ) for x in done
    }
    return [texts[id] for id in ids]


class Rewards:
  """What the rollouts of one environment are worth."""

  def __init__(self, env: str, cfg: Mapping[str, schema.RewardFn]):
    """Args: env: its name; cfg: {} = its own grade as it is."""
    self._env, self._cfg = env, cfg
    self._functions = {
        name: imports.function(one.fn, f'envs.{env}.rewards.{name}.fn')
        for name, one in cfg.items() if one.fn is not None
    }
    self._judges: dict[schema.Reference, Judge] = {}

  def connect(self, judge: Callable[[schema.Reference], Judge]) -> None:
    """Hands it the judges it names."""
    names = {one.judge for one in self._cfg.values()} - {None}
    self._judges = {name: judge(name) for name in names}

  def __call__(
      self, rollouts: Sequence[types.Rollout]
  ) -> tuple[list[types.Rollout], dict[str, float]]:
    """Returns the rollouts with their rewards, and what was measured.

        reward = sum_k weight_k r_k    over those that are not None

    None if all are; a rollout that failed stays as it is.

    Raises:
      ValueError: a function returns another number of rewards, or one that is
        not finite.
    """
    alive = [r for r in rollouts if r.samples]
    if not self._cfg or not alive:
      return list(rollouts), {}
    metrics: dict[str, list[float]] = {}
    parts = {
        name: self._ask(name, alive, metrics) for name in self._cfg
    }
    for name, values in parts.items():
      metrics[f'rewards/{name}'] = [v for v in values if v is not None]
    totals = {
        rollout.uid: _total(
            [(self._cfg[k].weight, parts[k][i]) for k in parts]
        ) for i, rollout in enumerate(alive)
    }  # fmt: skip
    return [
        dataclasses.replace(r, score=dataclasses.replace(
            r.score, reward=totals[r.uid]
        )) if r.uid in totals else r for r in rollouts
    ], {k: float(np.mean(v)) for k, v in metrics.items() if v}

  def _ask(self, name: str, rollouts, metrics) -> list[float | None]:
    cfg = self._cfg[name]
    if cfg.fn is None:
      return [r.score.reward for r in rollouts]
    fn = self._functions[name]

    def log(key, *values):
      logged = metrics.setdefault(f'rewards/{name}/{key}', [])
      logged += [float(x) for x in values if isinstance(x, int | float)]

    given = {
        **columns(rollouts), **cfg.kwargs, 'rollouts': rollouts,
        'log_metric': log, 'log_extra': lambda key, values: log(key, *values),
    }  # fmt: skip
    if cfg.judge is not None:
      given['judge'] = self._judges[cfg.judge]
    key = f'envs.{self._env}.rewards.{name}: {cfg.fn}'
    found = _call(fn, _accepted(fn, given, key), key)
    self._check(name, found, len(rollouts))
    return [None if x is None else float(x) for x in found]

  def _check(self, name: str, found, count: int) -> None:
    key = f'envs.{self._env}.rewards.{name}: {self._cfg[name].fn} must return'
    got = len(found) if hasattr(found, '__len__') else repr(found)
    if got != count:
      raise ValueError(
          f'{key} a reward per rollout: got {got}, expected {count}'
      )
    for i, value in enumerate(found):
      number = isinstance(value, numbers.Real) and math.isfinite(value)
      if value is not None and not number:
        raise ValueError(
            f'{key} finite rewards: got {value!r} for rollout {i}; None says '
            'that one is not scorable'
        )


def columns(rollouts: Sequence[types.Rollout]) -> dict[str, list[Any]]:
  """Returns what a reward function is told of rollouts, entry by entry."""
  tasks = [rollout.task for rollout in rollouts]
  keys = {key for task in tasks for key in task.info}
  return {
      **{key: [task.info.get(key) for task in tasks] for key in sorted(keys)},
      'answer': [task.answer for task in tasks],
      'prompts': [list(task.prompt) for task in tasks],
      'completions': [list(r.messages[len(r.task.prompt) :]) for r in rollouts],
      'completion_ids': [
          np.concatenate([s.ids[s.mask] for s in r.samples]).tolist()
          for r in rollouts
      ],
  }


def _accepted(
    fn: Callable, given: Mapping[str, Any], name: str
) -> dict[str, Any]:
  """Of what is given, what the function takes by name."""
  parameters = inspect.signature(fn).parameters
  missing = [
      key for key, p in parameters.items()
      if p.default is p.empty and key not in given
      and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
  ]  # fmt: skip
  if missing:
    raise ValueError(
        f'{name} must ask for what there is: got {missing}, expected some of '
        f'{sorted(given)}'
    )
  if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
    return dict(given)
  return {key: value for key, value in given.items() if key in parameters}


def _call(fn: Callable, given: Mapping[str, Any], key: str) -> Any:
  """What the function returns; whatever it raises says which one it is."""
  try:
    found = fn(**given)
    if inspect.iscoroutine(found):  # in a thread: a notebook runs a loop here
      with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(asyncio.run, found).result()
    return found
  except endpoint.EndpointError:  # of a judge
    raise
  except Exception as error:
    raise RuntimeError(
        f'{key} must return rewards: it raised {type(error).__name__}: '
        f'{error}; None says that a rollout is not scorable'
    ) from error


def _total(parts: Sequence[tuple[float, float | None]]) -> float | None:
  known = [weight * value for weight, value in parts if value is not None]
  return sum(known) if known else None


def _name(prompt: np.ndarray) -> int:
  digest = hashlib.blake2b(prompt.tobytes(), digest_size=8).digest()
  return int.from_bytes(digest, 'big') >> 1
