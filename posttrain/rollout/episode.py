"""One running episode: a generator of environment calls and engine requests.

An `EpisodeRun` submits its own turns to the engine. Its generator yields

    a call into its environment, and is sent the call's result
    None, and is sent the completion of the turn that it has requested

until it returns its rollout. The caller decides when, and in which thread, the
environment is called; the transcript belongs to the caller's thread.
"""

import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any, Protocol

import numpy as np

from posttrain import types
from posttrain.chat import rendering
from posttrain.decode import requests
from posttrain.envs import base
from posttrain.rollout import calls, env_calls, transcript
from posttrain.util import errors

# The bits of a request id that count restarts; the other bits are the uid.
_RESTART_BIT, _MAX_RESTARTS = 50, 2**12

EnvError = env_calls.EnvError
# Into an environment; returns its `EnvError`, if any. The caller may answer
# with `calls.Late` instead of the result.
Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class EpisodeSpec:
  """An episode to run: a task, its environment, and the limits."""

  # Unique over the whole run; with the engine's seed it decides all draws.
  uid: int
  env: base.Env
  task: types.Task
  # 0 = greedy. The samples then carry temperature 1, the temperature of their
  # logprobs: greedy decoding has no distribution of its own.
  temperature: float
  max_tokens: int  # per turn, at least 1
  # Tokens that the episode may add to its prompt, at least 1; None = no limit.
  max_episode_tokens: int | None = None
  # Number of last exchanges in the policy's context, at least 1; None = all.
  keep_exchanges: int | None = None


class Engine(Protocol):
  """The methods of `decode.engines.Engine` that episodes use."""

  def submit(self, request: requests.Request) -> None:
    """Queues a request."""

  def extend(self, id: int, ids: np.ndarray, max_tokens: int) -> None:
    """Appends tokens to a held sequence that has stopped, and decodes on."""

  def poll(self) -> list[requests.Completion]:
    """Decodes until a request stops; returns all stopped ones."""
    ...

  def release(self, id: int) -> None:
    """Frees a held slot."""


def uid_of(request_id: int) -> int:
  """Returns the uid of the episode that a request belongs to."""
  return request_id & ~((_MAX_RESTARTS - 1) << _RESTART_BIT)


class EpisodeRun:
  """One episode: its transcript, its slot, and its `generator`."""

  def __init__(
    self,
    spec: EpisodeSpec,
    engine: Engine,
    renderer: rendering.Renderer,
    max_length: int,
    remote: env_calls.Workers | None = None,
  ):
    """Prepares an episode; nothing runs before the generator does.

    Args:
      spec: the episode to run.
      engine: decodes the policy's turns.
      renderer: turns messages into tokens.
      max_length: the most tokens of a sample.
      remote: the worker processes of blocking environments; None = none.
    """
    assert spec.env.max_turns >= 1 and spec.max_tokens >= 1
    assert uid_of(spec.uid) == spec.uid, f'uids leave bits for restarts: {spec}'
    self._spec, self._engine, self._max_length = spec, engine, max_length
    renderer = renderer.with_tools(spec.task.tools)
    self._stop_ids, self._style = renderer.stop_ids, renderer.style
    self._transcript = transcript.Transcript(renderer, spec.keep_exchanges)
    self.env: env_calls.EpisodeCalls = env_calls.Calls(spec.env, spec.task)
    if remote is not None and spec.env.blocking:
      self.env = remote.episode(spec.task)
    self._slot: int | None = None  # id of the request that holds a slot
    self.blocking = spec.env.blocking
    self.generator = self._run()

  def _run(self) -> Generator[Call | None, Any, types.Rollout]:
    try:
      return (yield from self._episode())
    except EnvError as error:
      self._release_slot()
      yield self.env.abandon
      return types.Rollout(
        self._spec.uid,
        self._spec.task,
        self._transcript.messages,
        (),
        types.Score(None),
        'error',
        error=str(error),
      )

  def _episode(self) -> Generator[Call | None, Any, types.Rollout]:
    """Runs the episode to its end, or until the environment fails."""
    messages, stop_reason = (yield from self._call(self.env.open)), None
    while stop_reason is None:
      ids, messages = self._append_environment(messages), ()
      if self._tokens_left < 1:
        stop_reason = 'overflow'
        break
      self._request_turn(ids)
      completion = yield
      if not len(completion.ids):  # the engine's cache was full
        stop_reason = 'overflow'
        break
      cut = self._cut_reason(completion)
      text = self._transcript.append_completion(completion)
      messages, reward, done = yield from self._call(
        self.env.step, text, completion.stop_reason != 'eos', self._style
      )
      self._transcript.add_outcome(reward, cut or 'eos')
      stop_reason = self._stop_reason(cut, done)
    self._release_slot()
    turns = self._transcript.turns()
    score = yield from self._call(self.env.end, bool(turns))
    return self._rollout(messages, turns, score, stop_reason)

  def _rollout(self, unseen, turns, score, stop_reason: str) -> types.Rollout:
    """Builds the rollout; `unseen`: messages after the policy's last turn."""
    spec = self._spec
    return types.Rollout(
      spec.uid,
      spec.task,
      (*self._transcript.messages, *unseen),
      self._transcript.samples(spec.task, spec.temperature or 1.0),
      score,
      stop_reason,
      turns=turns,
    )

  def _call(self, fn: Callable[..., Any], *args):
    """Yields a call into the environment; returns its result."""
    result = yield functools.partial(self.env.caught, fn, *args)
    if isinstance(result, calls.Late):
      raise env_calls.late(self.env.where, self.env.method, result)
    if isinstance(result, EnvError):
      raise result
    return result

  def _append_environment(self, messages: types.Messages) -> np.ndarray:
    """Appends the environment's messages; returns the ids to decode after."""
    try:
      return self._transcript.append_environment(messages)
    except ValueError as error:  # the template refuses them
      text = f'{self.env.where}: {errors.describe(error)}'
      raise EnvError(text) from error

  def _request_turn(self, ids: np.ndarray) -> None:
    """Requests the policy's next turn, which continues these ids."""
    spec = self._spec
    budget = min(spec.max_tokens, self._tokens_left)
    # Another id after each restart, and with it other random numbers.
    assert self._transcript.restarts < _MAX_RESTARTS
    id = spec.uid | self._transcript.restarts << _RESTART_BIT
    if self._slot == id:
      self._engine.extend(id, ids, budget)
      return
    self._release_slot()
    hold = spec.env.max_turns > 1  # keep the slot between turns
    self._engine.submit(
      requests.Request(
        id=id,
        ids=ids,
        max_tokens=budget,
        stop_ids=self._stop_ids,
        sampling=requests.Sampling(temperature=spec.temperature),
        hold=hold,
      )
    )
    self._slot = id if hold else None

  def _release_slot(self) -> None:
    slot, self._slot = self._slot, None
    if slot is not None:
      self._engine.release(slot)

  @property
  def _tokens_left(self) -> int:
    """Tokens by which the episode may still grow."""
    left = self._max_length - len(self._transcript)
    budget = self._spec.max_episode_tokens
    if budget is None:
      return left
    return min(left, budget - self._transcript.num_added)

  def _cut_reason(self, completion: requests.Completion) -> str | None:
    """Returns the budget that cut a turn not yet appended; None = an eos."""
    if completion.stop_reason == 'eos':
      return None
    if self._tokens_left < self._spec.max_tokens:
      return 'overflow'
    return completion.stop_reason

  def _stop_reason(self, cut: str | None, done: bool) -> str | None:
    """Returns why the episode ends with this turn; None if it continues."""
    max_turns = self._spec.env.max_turns
    if cut == 'overflow':
      return cut
    if not done and self._transcript.num_turns < max_turns:
      return None
    if cut is not None:
      return cut
    return 'eos' if max_turns == 1 else 'env_done' if done else 'max_turns'
