"""One episode in play: what it wants next, of the environment or the engine.

A game is a generator. It gives its turns to the engine itself, and yields

    a call into its environment, to be sent what that returns
    None, to be sent the completion of the turn that the engine was asked for

until it returns its rollout. So who drives it decides when, and in which
thread, the environment is called; the transcript is the driving thread's.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any, Protocol

import numpy as np

from posttrain import types
from posttrain.chat import messages as forms
from posttrain.chat import renderer as chat
from posttrain.decode import requests
from posttrain.envs import base
from posttrain.rollout import transcript as transcripts
from posttrain.rollout.grading import functions

# Where in a request's id the restarts are counted; the other bits are the uid.
_RESTART_BIT, _MAX_RESTARTS = 50, 2**12

Call = Callable[[], Any]  # into an environment; returns an `EnvError` of it


@dataclasses.dataclass(frozen=True)
class Play:
  """An episode to play."""

  # Unique over the whole run; with the engine's seed it decides all draws.
  uid: int
  env: base.Env
  task: types.Task
  # 0 = greedy. Its samples then carry temperature 1, that of their logprobs:
  # a law of temperature 0 has none.
  temperature: float
  max_tokens: int  # of a turn, at least 1
  # That the episode may add to its prompt, at least 1; None = any number.
  max_episode_tokens: int | None = None
  # The last so many, at least 1, are what the policy sees; None = all.
  keep_exchanges: int | None = None


class Engine(Protocol):
  """What plays ask of `decode.engine`."""

  def submit(self, request: requests.Request) -> None:
    """Queues a request."""

  def extend(self, id: int, ids: np.ndarray, max_tokens: int) -> None:
    """Lets a held slot that has stopped go on behind more tokens."""

  def poll(self) -> list[requests.Completion]:
    """Runs until a request stops; returns all that did."""

  def release(self, id: int) -> None:
    """Frees a held slot."""


def uid_of(request_id: int) -> int:
  """Returns the episode of a request, see `Game`."""
  return request_id & ~((_MAX_RESTARTS - 1) << _RESTART_BIT)


class EnvError(Exception):
  """The environment failed; says which, at what, and how."""

  def __init__(self, task: types.Task, error: Exception):
    words = f'{task.env}/{task.id}: {type(error).__name__}: {error}'
    super().__init__(words)


class Game:
  """One episode: its transcript, its slot, and what it waits for."""

  def __init__(
    self, play: Play, engine: Engine, renderer: chat.Renderer, max_length: int
  ):
    """Args: max_length: tokens of a sample; others as of `Driver`."""
    assert play.env.max_turns >= 1 and play.max_tokens >= 1
    assert uid_of(play.uid) == play.uid, f'uids leave bits for restarts: {play}'
    self._play, self._engine, self._max_length = play, engine, max_length
    self._stop_ids = renderer.stop_ids
    self._transcript = transcripts.Transcript(renderer, play.keep_exchanges)
    self._side = _Side(play)
    self._slot: int | None = None  # the request that holds one, or will
    self.blocking = play.env.blocking
    self.run = self._run()

  def abandon(self) -> None:
    """Closes an episode that is open; it has failed, or another's has."""
    self._side.abandon()

  def _run(self) -> Generator[Call | None, Any, types.Rollout]:
    try:
      return (yield from self._episode())
    except EnvError as error:
      self._leave()
      yield self.abandon
      return types.Rollout(
        self._play.uid,
        self._play.task,
        self._transcript.messages,
        (),
        types.Score(None),
        'error',
        error=str(error),
      )

  def _episode(self) -> Generator[Call | None, Any, types.Rollout]:
    """Plays on until the end, or until the environment fails."""
    says, stop_reason = (yield from self._ask(self._side.open)), None
    while stop_reason is None:
      ids, says = self._hear(says), ()
      if self._room < 1:
        stop_reason = 'overflow'
        break
      self._speak(ids)
      completion = yield
      if not len(completion.ids):  # the engine had no room for the turn
        stop_reason = 'overflow'
        break
      cut = self._cut(completion)
      text = self._transcript.say(completion)
      says, reward, done = yield from self._ask(
        self._side.step, text, completion.stop_reason != 'eos'
      )
      self._transcript.credit(reward, cut or 'eos')
      stop_reason = self._stop_reason(cut, done)
    self._leave()
    turns = self._transcript.turns()
    score = yield from self._ask(self._side.end, bool(turns))
    return self._rollout(says, turns, score, stop_reason)

  def _rollout(self, unheard, turns, score, stop_reason: str) -> types.Rollout:
    play, transcript = self._play, self._transcript
    return types.Rollout(
      play.uid,
      play.task,
      (*transcript.messages, *unheard),
      transcript.samples(play.task, play.temperature or 1.0),
      score,
      stop_reason,
      turns=turns,
    )

  def _ask(self, fn: Callable[..., Any], *args):
    """Has the environment called; returns what it says."""
    found = yield functools.partial(self._guard, fn, *args)
    if isinstance(found, EnvError):
      raise found
    return found

  def _guard(self, fn: Callable[..., Any], *args) -> Any:
    """Around calls into the environment, and around no code of ours."""
    try:
      return fn(*args)
    except Exception as error:
      return EnvError(self._play.task, error)

  def _hear(self, messages: types.Messages) -> np.ndarray:
    """Appends what the environment said; returns the ids to go on behind."""
    try:
      return self._transcript.hear(messages)
    except ValueError as error:  # the template refuses them
      raise EnvError(self._play.task, error) from error

  def _speak(self, ids: np.ndarray) -> None:
    """Asks the engine for a turn behind these ids."""
    play = self._play
    budget = min(play.max_tokens, self._room)
    # Another after each restart, and with it other random numbers.
    assert self._transcript.restarts < _MAX_RESTARTS
    id = play.uid | self._transcript.restarts << _RESTART_BIT
    if self._slot == id:
      self._engine.extend(id, ids, budget)
      return
    self._leave()
    holds = play.env.max_turns > 1  # its slot, between turns
    self._engine.submit(
      requests.Request(
        id=id,
        ids=ids,
        max_tokens=budget,
        stop_ids=self._stop_ids,
        sampling=requests.Sampling(temperature=play.temperature),
        hold=holds,
      )
    )
    self._slot = id if holds else None

  def _leave(self) -> None:
    slot, self._slot = self._slot, None
    if slot is not None:
      self._engine.release(slot)

  @property
  def _room(self) -> int:
    """Tokens that the episode may yet grow by."""
    room, budget = self._max_length, self._play.max_episode_tokens
    room -= len(self._transcript)
    return (
      room if budget is None else min(room, budget - self._transcript.added)
    )

  def _cut(self, completion: requests.Completion) -> str | None:
    """What cut a turn off, which is not yet in the transcript; or None."""
    if completion.stop_reason == 'eos':
      return None
    if self._room < self._play.max_tokens:
      return 'overflow'
    return completion.stop_reason

  def _stop_reason(self, cut: str | None, done: bool) -> str | None:
    """Why the episode ends with this turn; None if it goes on."""
    max_turns = self._play.env.max_turns
    if cut == 'overflow':
      return cut
    if not done and len(self._transcript.said) < max_turns:
      return None
    if cut is not None:
      return cut
    return 'eos' if max_turns == 1 else 'env_done' if done else 'max_turns'


class _Side:
  """The environment's side of an episode: all calls into it, and checks.

  One call at a time, in whatever thread.
  """

  def __init__(self, play: Play):
    self._play = play
    self._episode: base.Episode | None = None

  def open(self) -> types.Messages:
    """Makes the episode; returns its prompt."""
    self._episode = self._play.env.make(self._play.task)
    return _checked(self._episode.reset())

  def step(
    self, text: str, truncated: bool
  ) -> tuple[types.Messages, float, bool]:
    """Takes a turn; returns what is said to it, its reward, and if it ends."""
    out = self._episode.step(text, truncated)
    if not abs(out.reward) <= functions.LARGEST:  # or NaN
      raise ValueError(
        'reward of a step must be finite, of a size of at most '
        f'{functions.LARGEST:g}: got {out.reward!r}'
      )
    return _checked(out.messages), float(out.reward), bool(out.done)

  def end(self, played: bool) -> types.Score:
    """Grades the episode, if anybody has played it, and closes it."""
    score = self._episode.grade() if played else types.Score(None)
    if not abs(score.reward or 0) <= functions.LARGEST:  # or NaN
      raise ValueError(
        f'reward must be finite, of a size of at most {functions.LARGEST:g}: '
        f'got {score.reward!r}; None says that an episode is not scorable'
      )
    self._close()
    return score

  def abandon(self) -> None:
    """Closes the episode, whatever state it is in."""
    with contextlib.suppress(Exception):
      self._close()

  def _close(self) -> None:
    episode, self._episode = self._episode, None
    if episode is not None:
      episode.close()


def _checked(messages: types.Messages) -> types.Messages:
  messages = tuple(messages)
  for index, message in enumerate(messages):
    forms.check(message, f'messages[{index}] of the environment')
  return messages
