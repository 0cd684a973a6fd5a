"""Rewards of an environment: weighted sums of functions and reward models.

    def fn(prompts, completions, completion_ids, **columns)
        -> list[float | None]

TRL's signature: lists with one entry per rollout. `completions` are the
messages after the prompt, `completion_ids` the sampled ids. Where a row of data
has its prompt as a string, prompt and completion are strings. The columns are
the fields of the tasks: `answer`, and each key of `info`, None for a task
without it. A function may also take `rollouts` (not in TRL), `judge` (the
config's), `log_metric(name, value)` and `log_extra(column, values)`: the means
of finite numbers are logged, other values are dropped, since there is no table
of completions. The metrics `faults` and `seconds` are reserved. None means "not
scorable": the entry is left out of the sum. A function may be a coroutine. Its
arguments are copies. There is no `trainer_state`.

A user's function runs in a process of its own; one with a judge, with
`isolate=False` or of posttrain in a thread: see `calls`. A call has a fault if
the function raises, exceeds its timeout, returns the wrong number of rewards,
or a value that is neither None nor a number of at most `worker.LARGEST`. The
affected rollouts then have no reward at all: all of the call, or those with a
bad value. Each fault is logged and counted; those rollouts count as failed, as
those of failed episodes do, and `rollout.max_error_share` bounds their share.

A function whose judge is on a server, or with `per_group`, is called once per
group: as soon as the group's last episode has ended, in a thread, while others
still play. The other functions are called once per step, with all groups.
Functions without a judge are called one at a time. (With several processes all
are called after the last episode, shared among the processes.)
"""

import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from posttrain import processes, schema, types
from posttrain.chat import rendering
from posttrain.decode import requests
from posttrain.rollout import calls, env_calls, side_by_side, worker
from posttrain.util import errors, imports, watchdog

_LOGGERS = ('log_metric', 'log_extra')
# Names of the arguments of all functions, besides the columns of the rows.
ARGUMENTS = (
  'answer',
  'completion_ids',
  'completions',
  'prompts',
  'rollouts',
  *_LOGGERS,
)


class Result(NamedTuple):
  """The rewards of one summand for some rollouts."""

  rewards: list[float | None]  # None = no term of the sum
  # Indices of the rollouts that could not be scored because of a fault: their
  # total reward is unknown.
  failed: frozenset[int] = frozenset()
  metrics: Mapping[str, float] = {}
  error: str | None = None  # the fault, in one line
  logged: Mapping[str, Sequence[float]] = {}  # values whose mean is a metric


class GroupCalls(NamedTuple):
  """A finished group, some of whose functions have been called."""

  rollouts: list[types.Rollout]  # those with samples
  calls: Mapping[str, concurrent.futures.Future]  # by the summand's name


# A model that replies to conversations, with max_tokens=64 and temperature=0.0
# by name: returns the text of one reply per conversation.
Judge = Callable[..., list[str]]
Model = Callable[[Sequence[types.Rollout]], Result]
Rewarded = tuple[list[types.Rollout], dict[str, float], tuple[str, ...]]
_ONE_AT_A_TIME = threading.Lock()  # functions without a judge


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
    ids = [
      int(hashlib.blake2b(x.tobytes(), digest_size=8).hexdigest(), 16) >> 1
      for x in prompts
    ]
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


class Function:
  """A reward function, called once per step or per group."""

  def __init__(
    self,
    key: str,
    cfg: schema.RewardFn,
    columns: Callable[[], Iterable[str]] = tuple,
    workers: env_calls.Workers | None = None,
  ):
    """Imports a function.

    Args:
      key: dotted config key of the entry.
      cfg: the entry.
      columns: returns the columns that some task has; called when the tasks of
        a step all lack an argument of the function, or it raises.
      workers: those of functions without a judge; None = no Ray.

    Raises:
      ValueError: the path names no function.
    """
    assert cfg.fn is not None
    self._key, self._cfg, self._columns = key, cfg, columns
    self._name = f'{key}: {cfg.fn}'
    self.fn = imports.function(cfg.fn, f'{key}.fn')
    parameters = inspect.signature(self.fn).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    self._takes = lambda name: takes_all or name in parameters
    self._is_partial = False  # whether rows lacked its columns
    self.score: Callable[[worker.Call, calls.Clock], worker.Reply]
    if workers is not None and cfg.judge is None:
      self.score = workers.reward(cfg.fn)
    elif (
      cfg.isolate
      and cfg.judge is None
      and not cfg.fn.startswith('posttrain.')  # in this process
    ):
      self.score = calls.process(
        cfg.fn, cfg.memory and cfg.memory * 2**20, id(self.fn)
      )
    else:
      passes = (calls.EndpointError,)
      self.score = lambda call, clock: calls.run(
        lambda: worker.answer(self.fn, call, passes), clock
      )

  def __call__(
    self, rollouts: Sequence[types.Rollout], judge: Callable | None = None
  ) -> Result:
    """Calls the function once, for all rollouts.

    Args:
      rollouts: the rollouts to score.
      judge: the argument `judge`; None = none.

    Returns:
      The rewards; the logged values, if the function returned; and metrics:
      `faults`, 0 or 1; `seconds`, including those of the judge.

    Raises:
      EndpointError: the judge's server is away.
      TooManyThreads: too many calls that exceeded their limits still run.
    """
    clock, count = calls.Clock(self._cfg.timeout), len(rollouts)
    reply = self._reply(rollouts, judge, clock)
    if reply.stack:  # perhaps because of rows without metadata
      keys = list(filter(self._takes, self._columns()))
      rows = [{**x.task.info, 'answer': x.task.answer} for x in rollouts]
      whole = [
        i
        for i, row in enumerate(rows)
        if all(row.get(key) is not None for key in keys)
      ]
      if len(whole) < count:
        if not self._is_partial:
          self._is_partial = True
          logging.getLogger('absl').warning(
            '%s %s; rows without its columns, %s, have no reward',
            self._name,
            reply.error,
            sorted(keys),
          )
        result = Result([], metrics={'faults': 0.0})
        if whole:
          result = self([rollouts[i] for i in whole], judge)
        rewards = dict(zip(whole, result.rewards, strict=True))
        return result._replace(
          rewards=[rewards.get(i) for i in range(count)],
          failed=frozenset(whole[i] for i in result.failed),
        )
    failed, error = frozenset(reply.bad), reply.error
    if error:
      failed = frozenset(range(count))
    elif failed:
      first = min(failed)
      error = (
        f'must return finite rewards, of at most {worker.LARGEST:g} with the '
        f'weight of {self._cfg.weight:g} as well: got {reply.bad[first]} for '
        f'rollout {first}, of task {errors.quote(rollouts[first].task.id)}; '
        'None marks a rollout as not scorable'
      )
    if error:
      error = (
        f'{self._name} {error}; rollouts left out: {len(failed)} of {count}'
      )
      logging.getLogger('absl').warning('%s', f'{error}\n{reply.stack}'.strip())
    return Result(
      list(reply.rewards) if reply.rewards else [None] * count,
      failed,
      {'faults': float(bool(error)), 'seconds': clock.wall},
      error or None,
      reply.logged,
    )

  def check(self, keys: Iterable[str]) -> None:
    """Checks its arguments.

    Args:
      keys: keys of `info` of some tasks.

    Raises:
      ValueError: it needs one that no task has; names those that exist.
    """
    known = {*ARGUMENTS, *keys, *self._cfg.kwargs}
    if self._cfg.judge is not None:
      known.add('judge')
    if missing(self.fn, known):
      known |= set(self._columns())
    if wrong := missing(self.fn, known):
      env = self._key.partition('.rewards.')[0]
      rename = (
        f'; --config.STAGE.{env}.env.columns=\'{{"OWN": "{wrong[0]}"}}\' '
        'names a column so; the argument judge needs the option judge'
      )
      raise ValueError(
        f'{self._key}.fn must take arguments that exist: got {wrong}, expected '
        f'some of {sorted(known)}{errors.nearest(wrong[0], known) or rename}'
      )

  def probe(self, rollouts: Sequence[types.Rollout]) -> None:
    """Calls the function on invented rollouts, unless it has a judge.

    An exception is a warning, since a function need not know such a text.

    Raises:
      ValueError: it returns something else than rewards, or too late.
    """
    if self._cfg.judge is not None or not self._cfg.probe:
      return
    reply = self._reply(rollouts, None, calls.Clock(self._cfg.timeout))
    error = reply.error
    for value in reply.bad.values():
      if not re.match('-?(nan|inf|[0-9])', value):
        error = f'must return numbers, or None: got {value}'
    if reply.stack:
      shown = errors.quote(columns(rollouts)['completions'][0])
      logging.getLogger('absl').warning(
        '%s %s; completions are texts as the prompts are, or else lists of '
        'messages: here the first, an invented one, is %s',
        self._name,
        error,
        shown,
      )
    elif error:
      raise ValueError(f'{self._name} {error}')

  def _reply(self, rollouts, judge, clock) -> worker.Reply:
    """Calls the function with copies of the arguments that it declares."""
    arguments = {**columns(rollouts), **self._cfg.kwargs, 'rollouts': rollouts}
    if judge is not None:
      arguments['judge'] = clock.stopped()(judge)
    if missing(self.fn, {*arguments, *_LOGGERS}):
      # A column that only tasks of other steps have is None for each task.
      nothing = [None] * len(rollouts)
      arguments = {**dict.fromkeys(self._columns(), nothing), **arguments}
    own = {}
    for name, value in arguments.items():
      if not self._takes(name):
        continue
      try:
        if type(value) in (list, tuple):
          # An object that rollouts share is copied for each of them.
          own[name] = type(value)(copy.deepcopy(x) for x in value)
        else:
          own[name] = value if name == 'judge' else copy.deepcopy(value)
      except Exception as error:
        return worker.Reply(
          error='must get arguments that can be copied: got '
          f'{name}: {errors.describe(error)}'
        )
    loggers = tuple(filter(self._takes, _LOGGERS))
    call = worker.Call(own, loggers, len(rollouts), self._cfg.weight)
    alone = _ONE_AT_A_TIME if judge is None else contextlib.nullcontext()
    try:
      with alone, watchdog.waiting(lambda: f'reward function {self._name}'):
        return self.score(call, clock)
    except calls.Late as error:
      return worker.Reply(
        error=f'must return within its timeout of {error.seconds:g} s: it did '
        'not, and was given up'
      )


class Rewards:
  """The rewards of one environment's rollouts."""

  def __init__(
    self,
    env: str,
    cfg: Mapping[str, schema.RewardFn],
    columns: Callable[[], Iterable[str]] = tuple,
    judge: Callable[[schema.Reference], Judge] | None = None,
    reward_model: Callable[[str], Model] | None = None,
    workers: env_calls.Workers | None = None,
  ):
    """Imports the functions; looks up all judges and reward models.

    Args:
      env: the environment's name.
      cfg: the summands; {} = the environment's own grade as it is.
      columns: returns the columns that some task has; called once, see
        `Function`.
      judge: returns the judge with a name of `cfg`; called once per name.
      reward_model: returns the reward model with a name of `cfg`; called once
        per name.
      workers: those of functions without a judge; None = no Ray.

    Raises:
      ValueError: a path of `cfg` names no function, or a name no model that
        fits.
      EndpointError: a judge's server is away.
    """
    self._cfg, columns = cfg, functools.cache(columns)
    self._judges = _look_up((entry.judge for entry in cfg.values()), judge)
    self._models = _look_up((x.model for x in cfg.values()), reward_model)
    self.functions = {
      name: Function(f'envs.{env}.rewards.{name}', entry, columns, workers)
      for name, entry in cfg.items()
      if entry.fn is not None
    }

  def __call__(self, rollouts: Sequence[types.Rollout]) -> Rewarded:
    """Returns the result of `task`."""
    (result,) = side_by_side.run([self.task(rollouts)])
    return result.result()

  def begin(self, group: Sequence[types.Rollout]) -> GroupCalls:
    """Calls the functions that are called per group, each in a thread.

    With several processes none is called yet.
    """
    alive = [r for r in group if r.samples]
    started = {
      name: side_by_side.thread(self._call, name, alive)
      for name in self._cfg
      if alive and processes.count() == 1 and _is_per_group(self._cfg[name])
    }
    return GroupCalls(alive, started)

  def task(
    self, rollouts: Sequence[types.Rollout], begun: Sequence[GroupCalls] = ()
  ) -> side_by_side.Task[Rewarded]:
    """Computes rewards; a task of `side_by_side`.

        reward = sum_k weight_k r_k    over the k where r_k is not None

    The reward is None if all r_k are, or if the call of a function failed: a
    partial sum is on another scale; the rollout's `error` then says why. A
    rollout without samples, which is one that failed, stays as it is.

    Args:
      rollouts: the rollouts to score.
      begun: from `begin`, of each of their groups; () = they are one group.

    Returns:
      (the rollouts with their rewards, metrics, errors of the functions)

    Raises:
      EndpointError: a judge's server is away.
    """
    alive = [r for r in rollouts if r.samples]
    if not self._cfg or not alive:
      return list(rollouts), {}, ()
    groups = [group for group in begun if group.rollouts]
    by_call = yield from self._results(groups or [self.begin(alive)])
    # 1. The rollouts' sums.
    rewards, failed, errors = {}, {}, ()
    for name, results in by_call.items():
      rewards[name] = []
      for x in results:
        failed |= {len(rewards[name]) + i: x.error for i in x.failed}
        rewards[name] += x.rewards
        errors += (x.error,) if x.error is not None else ()
    scored = {}
    for i, rollout in enumerate(alive):
      summands = {name: values[i] for name, values in rewards.items()}
      known = [
        self._cfg[name].weight * value
        for name, value in summands.items()
        if value is not None
      ]
      score = dataclasses.replace(
        rollout.score,
        reward=None if i in failed or not known else sum(known),
        summands=summands,
      )
      scored[rollout.uid] = dataclasses.replace(
        rollout, score=score, error=failed.get(i)
      )
    # 2. The means of the summands and of logged values; the largest number that
    # a call has measured.
    metrics = {}
    for name, results in by_call.items():
      values = {'': [x for x in rewards[name] if x is not None]}
      most: dict[str, float] = {}
      for x in results:
        for k, logged in x.logged.items():
          values.setdefault(f'/{k}', []).extend(logged)
        for k, v in x.metrics.items():
          most[f'/{k}'] = max(most.get(f'/{k}', v), v)
      means = {k: float(np.mean(x)) for k, x in values.items() if x}
      metrics |= {f'rewards/{name}{k}': v for k, v in {**means, **most}.items()}
    return [scored.get(r.uid, r) for r in rollouts], metrics, errors

  def _results(
    self, groups: Sequence[GroupCalls]
  ) -> side_by_side.Task[dict[str, list[Result]]]:
    """Returns each summand's results, one per call, in the groups' order."""
    per_group = groups[0].calls
    if per_group:
      yield ()  # other environments start theirs
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    results = {}
    in_order = enumerate(self._cfg)
    for process, name in sorted(in_order, key=lambda x: x[1] in per_group):
      if name in per_group:
        results[name] = [group.calls[name] for group in groups]
        while running := [x for x in results[name] if not x.done()]:
          yield running
        results[name] = [x.result() for x in results[name]]
      elif self._cfg[name].fn is None:
        results[name] = [self._call(name, rollouts)]
      else:
        parts = [rollouts]
        if _is_per_group(self._cfg[name]):
          parts = [group.rollouts for group in groups]
        results[name] = processes.on(
          process, functools.partial(self._calls, name, parts)
        )
    return {name: results[name] for name in self._cfg}

  def _calls(self, name: str, parts: Sequence[Any]) -> list[Result]:
    """Returns a summand of each part; the calls of several overlap."""
    if len(parts) == 1:
      return [self._call(name, parts[0])]
    calls = [side_by_side.thread(self._call, name, part) for part in parts]
    return [call.result() for call in calls]

  def _call(self, name: str, rollouts: Sequence[types.Rollout]) -> Result:
    """Returns a summand of some rollouts."""
    cfg = self._cfg[name]
    if cfg.model is not None:
      return self._models[cfg.model](rollouts)
    if cfg.fn is None:
      return Result([r.score.reward for r in rollouts])
    judge = None if cfg.judge is None else self._judges[cfg.judge]
    return self.functions[name](rollouts, judge)


def _is_per_group(cfg: schema.RewardFn) -> bool:
  """Returns whether a summand is computed group by group."""
  if cfg.per_group is None:
    return isinstance(cfg.judge, schema.Endpoint)
  return cfg.per_group


def missing(fn: Callable, arguments: Collection[str]) -> list[str]:
  """Returns the required parameters that have no argument."""
  return [
    key
    for key, p in inspect.signature(fn).parameters.items()
    if p.default is p.empty
    and key not in arguments
    and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
  ]


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
      [id for s in r.samples for id in s.ids[s.mask].tolist()] for r in rollouts
    ],
  }


def _given(
  rollout: types.Rollout, messages: types.Messages
) -> str | list[types.Message]:
  """Returns messages as a reward function gets them."""
  if rollout.task.as_text and len(messages) == 1:
    return messages[0]['content']
  return list(messages)
