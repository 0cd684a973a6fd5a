"""Runs many episodes at once against the decode engine.

1. Every episode is made, reset, and its prompt submitted, in the order given:
   members of a group are neighbours, so that the engine prefills their common
   prompt once.
2. The engine is polled. A turn that stops is passed to its environment at
   once; then the slot is extended with the environment's reply, or it is
   released and the episode graded. Episodes do not wait for each other. An
   episode whose history has changed continues in another slot, with a new
   prompt: the chat template rewrote the history, or only the end of it is in
   the policy's context.
3. Rollouts are returned in the order of the specs.

`run_all` does so for several drivers, each with an engine of its own: while one
waits for its server the others go on. What a driver does is the same as alone.

An environment with `blocking` is called in threads, all episodes concurrently,
while the engine decodes the others; see `calls.Pool`. With worker processes,
see `remote`, the threads wait for those; results and order are the same. The
other environments are called one at a time, in one thread; with `overlap` while
the device decodes the next chunk. Each call has a time limit; one that exceeds
it fails.

Order depends on the order of completions, and on the number of decoded chunks,
never on time. An environment that raises ends its own episode and no other:
the rollout's stop reason is 'error', with the exception's text, no samples and
no reward.
"""

import contextlib
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from posttrain import processes, schema, types
from posttrain.chat import rendering
from posttrain.rollout import calls, env_calls, episode, side_by_side

CLOSE_SECONDS = 10.0  # the time limit of closing an episode after an exception

Engine, EpisodeSpec = episode.Engine, episode.EpisodeSpec


class Driver:
  """Runs episodes to their ends."""

  def __init__(
    self,
    engine: Engine,
    renderer: rendering.Renderer,
    max_length: int,
    cfg: schema.Rollout | None = None,
    remote: env_calls.Workers | None = None,
  ):
    """Makes a driver.

    Args:
      engine: decodes the policy's turns. Some attributes are optional: `step`
        (one chunk) is used while environments run in threads, `launch` with
        `cfg.overlap`; `futures`, one of which `poll` waits for, lets other
        drivers go on meanwhile; and `drop`, called at the end, removes what
        an exception has left.
      renderer: turns messages into tokens.
      max_length: the most tokens of a sample that can train.
      cfg: how environments are called; None = the defaults.
      remote: the worker processes of blocking environments; None = none.
    """
    self._engine = engine
    self._renderer = renderer
    self._max_length = max_length
    self._cfg = cfg or schema.Rollout()
    self._remote = remote
    self._step = getattr(engine, 'step', engine.poll)
    self._launch = None
    if self._cfg.overlap:
      self._launch = getattr(engine, 'launch', None)
    # Seconds spent in environments so far, except those called in threads.
    self.env_seconds = 0.0
    self.env_timeout = self._cfg.env_timeout

  def run(self, specs: Sequence[EpisodeSpec]) -> list[types.Rollout]:
    """Returns one rollout per spec, in order.

    Each process of a run plays its share of the tasks and gets all rollouts.

    A rollout's `messages` are the whole conversation; its one sample (or
    several, see `transcript`) ends with the last token that the policy sampled.
    Stop reasons:

      error: the environment raised, exceeded its time limit, or returned what
        cannot be used. `error` is '<env>/<task id>: <Type>: <text> (<method>,
        <file>:<line>)'.
      overflow: `max_length`, the spec's `max_episode_tokens`, or the engine's
        capacity, cut the last turn, or left no token for the next one. If the
        prompt itself leaves none, there is no sample and no reward.
      max_tokens: the last turn was cut at the spec's `max_tokens`.
      env_done, max_turns: the environment was done; no turn was left.
      eos: the one turn of a single-turn environment ended with an eos.
    """
    (rollouts,) = run_all([(self, specs)])
    return rollouts

  def play(
    self, specs: Sequence[EpisodeSpec]
  ) -> side_by_side.Task[list[types.Rollout]]:
    """Runs the episodes of this process; a task of `side_by_side`."""
    runs = {
      spec.uid: episode.EpisodeRun(
        spec, self._engine, self._renderer, self._max_length, self._remote
      )
      for spec in specs
    }
    assert len(runs) == len(specs), 'the uid of an episode must be unique'
    rollouts: dict[int, types.Rollout] = {}
    if self._remote is not None and any(x.blocking for x in runs.values()):
      self._remote.begin()
    with contextlib.ExitStack() as stack:
      stack.callback(getattr(self._engine, 'drop', lambda: None))
      stack.callback(_close, runs.values(), self.env_timeout)
      pool = stack.enter_context(
        calls.Pool(
          self._cfg.env_threads, self._cfg.env_chunks, self.env_timeout
        )
      )
      results: list[tuple[int, Any]] = [(uid, None) for uid in runs]
      while len(rollouts) < len(specs):
        for uid, result in results:
          rollout = self._advance(runs[uid], uid, result, pool)
          if rollout is not None:
            rollouts[uid] = rollout
        results = yield from self._wait(pool, len(specs) - len(rollouts))
    return [rollouts[spec.uid] for spec in specs]

  def _advance(
    self, run: episode.EpisodeRun, uid: int, result: Any, pool: calls.Pool
  ) -> types.Rollout | None:
    """Sends an episode its result; returns the rollout if that ends it."""
    try:
      call = run.generator.send(result)
      while call is not None:
        if run.blocking:
          pool.add(uid, call, run.env.abandon)
          break
        start = time.perf_counter()
        try:
          result = calls.inline(call, self.env_timeout, run.env.abandon)
        except calls.Late as late:
          result = late
        self.env_seconds += time.perf_counter() - start
        call = run.generator.send(result)
    except StopIteration as end:
      return end.value
    return None

  def _wait(
    self, pool: calls.Pool, num_running: int
  ) -> Generator[side_by_side.Futures, None, list[tuple[int, Any]]]:
    """Waits for the next results; returns (uid, result) pairs."""
    if not num_running:
      return []
    yield ()  # others send their requests before this one waits
    if due := pool.due(idle=len(pool) == num_running):
      return due
    yield getattr(self._engine, 'futures', ())
    if len(pool):
      completions = self._step()
      pool.tick()
    else:
      completions = self._engine.poll()
      assert completions, f'the engine must complete {num_running} requests'
    if self._launch is not None:
      self._launch()
    return [(episode.uid_of(x.id), x) for x in completions]


def run_all(
  plays: Sequence[tuple[Driver, Sequence[EpisodeSpec]]],
) -> list[list[types.Rollout]]:
  """Returns the rollouts of each driver, all of which run side by side.

  Each process plays its share of every driver's tasks, by models on its own
  devices or on servers, without waiting for other processes. Then they exchange
  the rollouts, driver by driver, so in the same order in all of them.

  Args:
    plays: drivers, each with other specs and another engine.

  Raises:
    Exception: the first failure in the order of drivers; see `side_by_side`.
  """
  shares = [processes.share(specs, _task) for _, specs in plays]
  results = side_by_side.run(
    [driver.play(own) for (driver, _), own in zip(plays, shares, strict=True)]
  )
  return [
    processes.divided(specs, lambda _, own=own: own.result(), _task)
    for (_, specs), own in zip(plays, results, strict=True)
  ]


def _task(spec: EpisodeSpec) -> int:
  """Returns a key that specs of one task share."""
  return id(spec.task)


def _close(runs: Iterable[episode.EpisodeRun], timeout: float) -> None:
  """Closes the episodes that are still open, after an exception."""
  for run in runs:
    if run.env.is_open:
      try:
        calls.inline(run.env.abandon, min(timeout, CLOSE_SECONDS))
      except calls.Late:
        break  # the others may hang as well
