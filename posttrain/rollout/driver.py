"""Plays environments against the decode engine, many episodes at once.

1. Every episode is made, reset, and its prompt submitted, in the order given:
   members of a group stand next to each other, so that the engine prefills
   their common prompt once.
2. The engine is polled. Each turn that stops goes to its episode at once,
   which answers; the slot is extended and goes on, or it is released and the
   episode graded. Nobody waits for another's turn. An episode whose history
   the chat template rewrites goes on in another slot, with a new prompt.
3. Rollouts come back in the order of the plays.

Order depends on completions as the engine returns them, never on time. An
environment that raises costs its own episode and no other: the rollout is an
'error' with the exception's words, no samples and no reward.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from posttrain import types
from posttrain.chat import messages as forms
from posttrain.chat import renderer as chat
from posttrain.decode import requests
from posttrain.envs import base
from posttrain.rollout import transcript as transcripts

# Where in a request's id the restarts are counted; the other bits are the uid.
_RESTART_BIT, _MAX_RESTARTS = 50, 2**12


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


class Engine(Protocol):
  """What the driver asks of `decode.engine`."""

  def submit(self, request: requests.Request) -> None:
    """Queues a request."""

  def extend(self, id: int, ids: np.ndarray, max_tokens: int) -> None:
    """Lets a held slot that has stopped go on behind more tokens."""

  def poll(self) -> list[requests.Completion]:
    """Runs until a request stops; returns all that did."""

  def release(self, id: int) -> None:
    """Frees a held slot."""


class Driver:
  """Plays episodes to their ends."""

  def __init__(self, engine: Engine, renderer: chat.Renderer, max_length: int):
    """Args: max_length: tokens of an episode: the longest that can train."""
    self._engine = engine
    self._renderer = renderer
    self._max_length = max_length

  def play(self, plays: Sequence[Play]) -> list[types.Rollout]:
    """Returns one rollout per play, in order.

    A rollout's `messages` are all that was said; its one sample (or several,
    see `transcript`) ends with the last token that the policy sampled. How it
    stops:

      error: the environment raised, its messages cannot be rendered, or its
        reward is not finite. `error` says '<env>/<task id>: <Type>: <words>'.
      overflow: `max_length`, or the engine's capacity, cut the last turn, or
        left no token for the next one. Where the prompt itself leaves none
        there is no sample, and no reward either: nobody answered.
      max_tokens: the last turn was cut at the play's `max_tokens`.
      env_done, max_turns: the environment said done; it has no turn left.
      eos: the one turn of a single-turn environment came to its end.
    """
    games = {play.uid: _Game(play, self._renderer) for play in plays}
    assert len(games) == len(plays), 'the uid of a play must be unique'
    rollouts = {}
    with contextlib.ExitStack() as stack:
      for uid, game in games.items():
        stack.callback(game.abandon)  # closes it where we do not get so far
        rollouts[uid] = self._begin(game)
      waiting = {uid for uid, rollout in rollouts.items() if rollout is None}
      while waiting:
        completions = self._engine.poll()
        assert completions, f'the engine must answer requests {waiting}'
        for completion in completions:
          uid = _uid(completion.id)
          rollouts[uid] = self._turn(games[uid], completion)
          if rollouts[uid] is not None:
            waiting.remove(uid)
    return list(rollouts.values())

  def _begin(self, game: '_Game') -> types.Rollout | None:
    """Submits the first turn; a rollout if it ends before that."""
    try:
      prompt = game.reset()
      if self._room(game) < 1:
        return game.finish('overflow')
    except _EnvError as error:
      return game.fail(error)
    return self._submit(game, prompt)

  def _submit(self, game: '_Game', prompt: np.ndarray) -> None:
    self._engine.submit(requests.Request(
        id=game.request_id, ids=prompt, max_tokens=self._budget(game),
        stop_ids=self._renderer.stop_ids,
        sampling=requests.Sampling(temperature=game.play.temperature),
        hold=game.holds,
    ))

  def _turn(
      self, game: '_Game', completion: requests.Completion
  ) -> types.Rollout | None:
    """Hands a turn to its episode; a rollout if that ends it."""
    try:
      stop_reason = self._advance(game, completion)
      if stop_reason is None:
        return None
      rollout = game.finish(stop_reason)
    except _EnvError as error:
      rollout = game.fail(error)
    if game.holds:
      self._engine.release(completion.id)
    return rollout

  def _advance(
      self, game: '_Game', completion: requests.Completion
  ) -> str | None:
    """Goes on to the next turn; returns why not, if the episode ends."""
    if not len(completion.ids):
      return 'overflow'  # the engine had no room for the turn
    cut = self._cut(game, completion)
    done = game.step(completion)
    stop_reason = _stop_reason(game, cut, done)
    if stop_reason is not None:
      return stop_reason
    ids = game.answer()
    if self._room(game) < 1:
      return 'overflow'
    if game.request_id == completion.id:
      self._engine.extend(completion.id, ids, self._budget(game))
    else:
      self._engine.release(completion.id)
      self._submit(game, ids)
    return None

  def _room(self, game: '_Game') -> int:
    """Tokens that the episode may yet grow by."""
    return self._max_length - len(game.transcript)

  def _budget(self, game: '_Game') -> int:
    return min(game.play.max_tokens, self._room(game))

  def _cut(
      self, game: '_Game', completion: requests.Completion
  ) -> str | None:
    """What cut a turn off, which is not yet in the transcript; or None."""
    if completion.stop_reason == 'eos':
      return None
    if self._room(game) < game.play.max_tokens:
      return 'overflow'
    return completion.stop_reason


def _stop_reason(game: '_Game', cut: str | None, done: bool) -> str | None:
  """Why the episode ends with this turn; None if it goes on."""
  max_turns = game.play.env.max_turns
  if cut == 'overflow':
    return cut
  if not done and game.transcript.turns < max_turns:
    return None
  if cut is not None:
    return cut
  return 'eos' if max_turns == 1 else 'env_done' if done else 'max_turns'


def _uid(request_id: int) -> int:
  """The episode of a request, see `_Game.request_id`."""
  return request_id & ~((_MAX_RESTARTS - 1) << _RESTART_BIT)


class _EnvError(Exception):
  """The environment failed; says which, at what, and how."""


@contextlib.contextmanager
def _guard(task: types.Task, kind: type = Exception) -> Iterator[None]:
  """Around calls into the environment, and around no code of ours."""
  try:
    yield
  except kind as error:
    where = f'{task.env}/{task.id}'
    raise _EnvError(f'{where}: {type(error).__name__}: {error}') from error


def _checked(messages: types.Messages) -> types.Messages:
  messages = tuple(messages)
  for index, message in enumerate(messages):
    forms.check(message, f'messages[{index}] of the environment')
  return messages


class _Game:
  """One episode in play: the environment's side and the transcript."""

  def __init__(self, play: Play, renderer: chat.Renderer):
    assert play.env.max_turns >= 1 and play.max_tokens >= 1
    self.play = play
    self.holds = play.env.max_turns > 1  # its slot, between turns
    self.transcript = transcripts.Transcript(renderer)
    self._episode: base.Episode | None = None
    self._answer: types.Messages = ()
    assert _uid(play.uid) == play.uid, f'uids leave bits for restarts: {play}'

  @property
  def request_id(self) -> int:
    """Another after each restart, and with it other random numbers."""
    assert self.transcript.restarts < _MAX_RESTARTS
    return self.play.uid | self.transcript.restarts << _RESTART_BIT

  def reset(self) -> np.ndarray:
    """Returns the ids of the prompt."""
    with _guard(self.play.task):
      self._episode = self.play.env.make(self.play.task)
      self._answer = _checked(self._episode.reset())
    return self.answer()

  def step(self, completion: requests.Completion) -> bool:
    """Takes a turn; returns whether the environment is done."""
    text = self.transcript.say(completion)
    truncated = completion.stop_reason != 'eos'
    with _guard(self.play.task):
      out = self._episode.step(text, truncated)
      self._answer = _checked(out.messages)
      return bool(out.done)

  def answer(self) -> np.ndarray:
    """Appends what the environment said last; returns the ids it adds."""
    messages, self._answer = self._answer, ()
    # What the template refuses is a ValueError.
    with _guard(self.play.task, ValueError):
      return self.transcript.hear(messages)

  def finish(self, stop_reason: str) -> types.Rollout:
    """Grades the episode and closes it."""
    play, score, samples = self.play, types.Score(None), ()
    if self.transcript.turns:
      score = self._grade()
      samples = self.transcript.samples(play.task, play.temperature or 1.0)
    with _guard(play.task):
      self._close()
    return types.Rollout(
        play.uid, play.task, (*self.transcript.messages, *self._answer),
        samples, score, stop_reason,
    )

  def _grade(self) -> types.Score:
    with _guard(self.play.task):
      score = self._episode.grade()
      if score.reward is not None and not math.isfinite(score.reward):
        raise ValueError(
            f'reward must be finite: got {score.reward!r}; None says that an '
            'episode is not scorable'
        )
      return score

  def fail(self, error: _EnvError) -> types.Rollout:
    """Closes the episode, whatever state it is in."""
    self.abandon()
    play = self.play
    return types.Rollout(
        play.uid, play.task, self.transcript.messages, (), types.Score(None),
        'error', error=str(error),
    )

  def abandon(self) -> None:
    """Closes an episode that is open; it has failed, or another's has."""
    with contextlib.suppress(Exception):
      self._close()

  def _close(self) -> None:
    episode, self._episode = self._episode, None
    if episode is not None:
      episode.close()
