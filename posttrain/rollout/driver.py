"""Plays environments against the decode engine, many episodes at once.

1. Every episode is made, reset, and its prompt submitted, in the order given:
   members of a group stand next to each other, so that the engine prefills
   their common prompt once.
2. The engine is polled. Each turn that stops goes to its episode at once,
   which answers; the slot is extended and goes on, or it is released and the
   episode graded. Nobody waits for another's turn. An episode whose history
   is another than before goes on in another slot, with a new prompt: the chat
   template rewrites it, or the policy sees no more than the end of it.
3. Rollouts come back in the order of the plays.

An environment that is `blocking` is called in threads, all episodes side by
side, while the engine decodes the others; see `pool`. The others are called
here; with `overlap` while the device is at the next chunk.

Order depends on completions as the engine returns them, and on how many chunks
it has decoded, never on time. An environment that raises costs its own episode
and no other: the rollout is an 'error' with the exception's words, no samples
and no reward.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from posttrain import schema, types
from posttrain.chat import renderer as chat
from posttrain.rollout import episode, pool

Engine, Play = episode.Engine, episode.Play


class Driver:
  """Plays episodes to their ends."""

  def __init__(
    self,
    engine: Engine,
    renderer: chat.Renderer,
    max_length: int,
    cfg: schema.Rollout | None = None,
  ):
    """Makes a driver.

    Args:
      engine: decodes. Where it has them, `step` (a chunk) is asked while
        environments are called in threads, and `launch` by `cfg.overlap`.
      renderer: of what is said.
      max_length: tokens of a sample: the longest that can train.
      cfg: how environments are called; None = as by default.
    """
    self._engine = engine
    self._renderer = renderer
    self._max_length = max_length
    self._cfg = cfg or schema.Rollout()
    self._step = getattr(engine, 'step', engine.poll)
    self._launch = None
    if self._cfg.overlap:
      self._launch = getattr(engine, 'launch', None)
    # Spent in calls of environments so far, but for those in threads.
    self.env_seconds = 0.0

  def play(self, plays: Sequence[Play]) -> list[types.Rollout]:
    """Returns one rollout per play, in order.

    A rollout's `messages` are all that was said; its one sample (or several,
    see `transcript`) ends with the last token that the policy sampled. How it
    stops:

      error: the environment raised, its messages cannot be rendered, or a
        reward is not finite. `error` says '<env>/<task id>: <Type>: <words>'.
      overflow: `max_length`, the play's `max_episode_tokens`, or the engine's
        capacity, cut the last turn, or left no token for the next one. Where
        the prompt itself leaves none there is no sample, and no reward either:
        nobody answered.
      max_tokens: the last turn was cut at the play's `max_tokens`.
      env_done, max_turns: the environment said done; it has no turn left.
      eos: the one turn of a single-turn environment came to its end.
    """
    all_games = {
      play.uid: episode.Game(
        play, self._engine, self._renderer, self._max_length
      )
      for play in plays
    }
    assert len(all_games) == len(plays), 'the uid of a play must be unique'
    rollouts: dict[int, types.Rollout] = {}
    with contextlib.ExitStack() as stack:
      for game in all_games.values():
        stack.callback(game.abandon)  # closes it where we do not get so far
      calls = stack.enter_context(
        pool.Pool(self._cfg.env_threads, self._cfg.env_chunks)
      )
      told = [(uid, None) for uid in all_games]
      while len(rollouts) < len(plays):
        for uid, value in told:
          ended = self._go_on(all_games[uid], uid, value, calls)
          if ended is not None:
            rollouts[uid] = ended
        told = self._wait(calls, len(plays) - len(rollouts))
    return [rollouts[play.uid] for play in plays]

  def _go_on(
    self, game: episode.Game, uid: int, value: Any, calls: pool.Pool
  ) -> types.Rollout | None:
    """Tells a game what it waits for; a rollout if that ends it."""
    try:
      call = game.run.send(value)
      while call is not None:
        if game.blocking:
          calls.add(uid, call)
          break
        start = time.perf_counter()
        value = call()
        self.env_seconds += time.perf_counter() - start
        call = game.run.send(value)
    except StopIteration as end:
      return end.value
    return None

  def _wait(self, calls: pool.Pool, games_left: int) -> list[tuple[int, Any]]:
    """Returns what happens next, if anything: (uid, what it is told)."""
    if not games_left:
      return []
    if due := calls.due(idle=len(calls) == games_left):
      return due
    if len(calls):
      completions = self._step()
      calls.tick()
    else:
      completions = self._engine.poll()
      assert completions, f'the engine must answer {games_left} episodes'
    if self._launch is not None:
      self._launch()
    return [(episode.uid_of(done.id), done) for done in completions]
