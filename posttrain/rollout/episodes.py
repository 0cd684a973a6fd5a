"""Episodes: their transcripts, their calls and requests, and many at once.

1. `Transcript` is the conversation of an episode as messages and as tokens:

       prompt | header  sampled ids | close, environment, header  sampled ids |
       mask:    False   True          False                       True

   Sampled ids are kept as they were sampled, whatever text they decode to; the
   environment's messages are tokenized once and appended. Only this class
   records which tokens the policy sampled. If the history changes, because the
   chat template rewrites earlier turns (it drops thoughts, say), or because
   only the last exchanges are in the policy's context (an exchange is a turn of
   the policy with the environment's reply; the prompt always stays), the
   episode continues as another sample, which begins with the new history,
   masked out: so each sampled token is trained in exactly one sample, the one
   with the history that it was sampled after.
2. `EpisodeRun` is one running episode, a generator. It submits its own turns to
   the engine, and yields

       a call into its environment, and is sent the call's result
       None, and is sent the completion of the turn that it has requested

   until it returns its rollout. The caller decides when, and in which thread,
   the environment is called; the transcript belongs to the caller's thread.
3. `Driver` makes, resets and submits every episode in the order given: members
   of a group are neighbours, so that the engine prefills their common prompt
   once. Then it polls the engine. A turn that stops is passed to its
   environment at once; the slot is extended with the environment's reply, or it
   is released and the episode graded. Episodes do not wait for each other. One
   whose history has changed continues in another slot, with a new prompt.
   Rollouts are returned in the order of the specs.
4. `run_all` does so for several drivers, each with an engine of its own: while
   one waits for its server the others go on. What a driver does is the same as
   alone.

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

Axes: T tokens of a sample.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from posttrain import processes, schema, types
from posttrain.chat import rendering, tool_calls
from posttrain.decode import requests
from posttrain.envs import base
from posttrain.rollout import calls, env_calls, side_by_side
from posttrain.util import errors


class Transcript:
  """The conversation of one episode, from its prompt on."""

  def __init__(
    self, renderer: rendering.Renderer, keep_exchanges: int | None = None
  ):
    """Starts an empty conversation.

    Args:
      renderer: turns messages into tokens.
      keep_exchanges: the number of last exchanges in the policy's context, at
        least 1; None = all.
    """
    self._renderer, self._keep = renderer, keep_exchanges
    self._parts = [_Part(rendering.EMPTY, ())]
    self._prompt_messages = 0  # number of messages of the prompt
    self._turn_messages: list[int] = []  # index of each turn's message
    self.messages: types.Messages = ()  # the whole conversation
    self.turns: tuple[types.Turn, ...] = ()  # those of the policy
    self.num_added = 0  # tokens after the prompt; a repeated history is none

  def __len__(self) -> int:
    """Returns the number of tokens of the current sample."""
    return len(self._parts[-1].rendered)

  @property
  def ids(self) -> np.ndarray:
    """The tokens of the current sample, i32[T]."""
    return self._parts[-1].rendered.ids

  @property
  def restarts(self) -> int:
    """The number of times that the history changed."""
    return len(self._parts) - 1

  def append_environment(self, messages: Sequence[types.Message]) -> np.ndarray:
    """Appends the environment's messages, and the header of the next turn.

    A turn of the policy that was cut off is closed first, with an eos that was
    not sampled.

    Returns:
      The appended ids, i32[n]; if the history has changed, and `restarts` with
      it, all ids of the new history.

    Raises:
      ValueError: the messages cannot be rendered.
    """
    conversation = (*self.messages, *messages)
    part = self._parts[-1]
    extended = (*part.visible, *range(len(self.messages), len(conversation)))
    visible, rendered, keep = extended, None, self._keep
    if keep is not None and len(self._turn_messages) > keep:
      first, given = self._turn_messages[-keep], self._prompt_messages
      visible = tuple(i for i in extended if i < given or i >= first)
    if visible == extended:
      with contextlib.suppress(rendering.Rewritten):
        rendered = self._renderer.extend(
          part.rendered,
          tuple(conversation[i] for i in part.visible),
          messages,
          add_generation_prompt=True,
        )
    if rendered is not None:
      start = len(part.rendered)
      assert np.array_equal(rendered.ids[:start], part.rendered.ids), (
        'the ids that the engine holds must be a prefix of the new ids'
      )
      part.rendered = rendered
      num_new = len(rendered) - start
    else:
      start, num_old = 0, len(visible) - len(messages)
      rendered = self._renderer.render(
        [conversation[i] for i in visible],
        add_generation_prompt=True,
        continue_final_message=bool(messages),
      )
      self._parts.append(_Part(rendered, visible))
      is_new = (rendered.messages < 0) | (rendered.messages >= num_old)
      num_new = int(is_new.sum())
    # A turn that is to be continued becomes a message with its completion.
    end = -1 if rendered.given else None
    self._parts[-1].visible = visible[:end]
    self.messages = conversation[:end]
    if self._turn_messages:
      self.num_added += num_new
    else:
      self._prompt_messages = len(self.messages)
    return rendered.ids[start:]

  def append_completion(self, completion: requests.Completion) -> str:
    """Appends the policy's turn; returns its text without the stop token.

    The text begins with the tag of a thought that the prompt opens, and with
    what the prompt has of the turn.
    """
    ids = completion.ids
    if completion.stop_reason == 'eos':
      assert ids[-1] in self._renderer.stop_ids, 'eos is a stop token'
      ids = ids[:-1]
    text = self._renderer.tokenizer.decode(ids.tolist())
    part = self._parts[-1]
    part.turns.append((len(self), completion))
    part.rendered = self._renderer.append(part.rendered, completion.ids)
    part.visible += (len(self.messages),)
    self._turn_messages.append(len(self.messages))
    text = part.rendered.given + text
    self.messages += ({'role': 'assistant', 'content': text},)
    self.num_added += len(completion.ids)
    return tool_calls.THOUGHT * part.rendered.thinking + text

  def add_outcome(self, reward: float, stop_reason: str) -> None:
    """Records the last turn's reward and stop reason."""
    sampled = [part for part in self._parts if part.turns]
    start, turn = sampled[-1].turns[-1]
    place = len(sampled) - 1, start, len(turn.ids)
    # An episode that was held finds its own sampled tokens again.
    cached = turn.cached if len(sampled[-1].turns) == 1 else 0
    self.turns += (types.Turn(*place, reward, stop_reason, cached),)

  def samples(
    self, task: types.Task, temperature: float
  ) -> tuple[types.Sample, ...]:
    """Returns the samples, each up to the last token that the policy sampled.

    Later messages of the environment precede no sampled token. There is one
    sample, and one more for each restart that was followed by a turn; none if
    the episode has no turn.

    Args:
      task: the episode's task.
      temperature: the temperature of the sampled tokens; the others have 1.
    """
    samples = []
    for part in self._parts:
      if not part.turns:
        continue
      start, last = part.turns[-1]
      n = start + len(last.ids)
      mask, logprobs = np.zeros(n, bool), np.zeros(n, np.float32)
      versions = np.full(n, -1, np.int32)
      for start, turn in part.turns:
        place = slice(start, start + len(turn.ids))
        mask[place] = True
        logprobs[place] = turn.logprobs
        versions[place] = turn.version
      recorded = [x.routes for _, x in part.turns if x.routes is not None]
      routes = None
      if recorded:  # the last turn has those of all turns
        routes = np.full((n, *recorded[-1].shape[1:]), -1, np.int16)
        routes[: len(recorded[-1])] = recorded[-1]
      rendered = part.rendered
      messages, indices = (
        rendered.messages[:n],
        np.array(part.visible, np.int32),
      )
      samples.append(
        types.Sample(
          env=task.env,
          row=task.id,
          ids=rendered.ids[:n],
          # Not the renderer's `sampled`, which includes assistant turns of the
          # prompt and of the environment.
          mask=mask,
          roles=rendered.roles[:n],
          is_content=rendered.is_content[:n],
          sampler_logprobs=logprobs,
          temperatures=np.where(mask, temperature, 1).astype(np.float32),
          versions=versions,
          routes=routes,
          message_ids=np.where(messages < 0, messages, indices[messages]),
          task=task,
        )
      )
    return tuple(samples)


@dataclasses.dataclass
class _Part:
  """One sample: a history, and the turns that continue it."""

  rendered: rendering.Rendered  # its `messages` are indices into `visible`
  visible: tuple[int, ...]  # indices of the conversation's rendered messages
  # (index of the first token, completion) of each turn.
  turns: list[tuple[int, requests.Completion]] = dataclasses.field(
    default_factory=list
  )


# The bits of a request id that count restarts; the other bits are the uid.
_RESTART_BIT, _MAX_RESTARTS = 50, 2**12

# A call into an environment; returns its `EnvError`, if any. The caller may
# answer with `calls.Late` instead of the result.
Call = Callable[[], Any]


def hold() -> None:
  """Marks an episode that goes on in the next round.

  The episode yields this function, which is compared and never called.
  """


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


@dataclasses.dataclass(frozen=True)
class Round:
  """A part of a play, with one version of the weights, or several of them.

  Once it is over, an episode is held at its next boundary: before a turn, or
  after `tokens` sampled ones. By default it is a whole play.
  """

  is_over: Callable[[], bool] = lambda: False
  # Takes the number of running episodes; returns further ones to begin.
  more: Callable[[int], Sequence[EpisodeSpec]] = lambda _: ()
  tokens: int | None = None  # None = before turns alone
  # Whether a held episode keeps its slot, and with it the cache of the weights
  # that it was sampled with; else its history is prefilled anew.
  keep_cache: bool = False


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
    remote: env_calls.Workers | None,
    round: Round,
  ):
    """Prepares an episode; nothing runs before the generator does.

    Args:
      spec: the episode to run.
      engine: decodes the policy's turns.
      renderer: turns messages into tokens.
      max_length: the most tokens of a sample.
      remote: the worker processes of blocking environments; None = none.
      round: when the episode is held.
    """
    assert spec.env.max_turns >= 1 and spec.max_tokens >= 1
    assert uid_of(spec.uid) == spec.uid, f'uids leave bits for restarts: {spec}'
    self.spec, self._engine, self._max_length = spec, engine, max_length
    renderer = renderer.of(spec.task)
    self._stop_ids, self._style = renderer.stop_ids, renderer.style
    self._transcript = Transcript(renderer, spec.keep_exchanges)
    self.env: env_calls.EpisodeCalls = env_calls.Calls(spec.env, spec.task)
    if remote is not None and spec.env.blocking:
      self.env = remote.episode(spec.task)
    self.slot: int | None = None  # id of the request that holds a slot
    self._round = round
    self.blocking = spec.env.blocking
    self.generator = self._run()

  def _run(self) -> Generator[Call | None, Any, types.Rollout]:
    try:
      return (yield from self._episode())
    except env_calls.EnvError as error:
      self.release_slot()
      yield self.env.abandon
      return types.Rollout(
        self.spec.uid,
        self.spec.task,
        self._transcript.messages,
        (),
        types.Score(None),
        'error',
        error=str(error),
      )

  def _episode(self) -> Generator[Call | None, Any, types.Rollout]:
    """Runs the episode to its end, or until the environment fails."""
    spec, transcript = self.spec, self._transcript
    max_turns = spec.env.max_turns
    messages, stop_reason = (yield from self._call('open')), None
    while stop_reason is None:
      # 1. The environment's messages, and the policy's turn.
      try:
        ids, messages = transcript.append_environment(messages), ()
      except ValueError as error:  # the template refuses them
        text = f'{self.env.where}: {errors.describe(error)}'
        raise env_calls.EnvError(text) from error
      if self._tokens_left < 1:
        stop_reason = 'overflow'
        break
      completion = yield from self._turn(ids)
      if not len(completion.ids):  # the engine's cache was full
        stop_reason = 'overflow'
        break
      # 2. The budget that cut it, if one did.
      cut = None if completion.stop_reason == 'eos' else completion.stop_reason
      if cut and self._tokens_left < spec.max_tokens:
        cut = 'overflow'
      # 3. The environment's answer to it.
      text = transcript.append_completion(completion)
      messages, reward, done = yield from self._call(
        'step', text, completion.stop_reason != 'eos', self._style
      )
      transcript.add_outcome(reward, cut or 'eos')
      # 4. Whether that ends the episode.
      if cut == 'overflow' or done or len(transcript.turns) >= max_turns:
        end = 'eos' if max_turns == 1 else 'env_done' if done else 'max_turns'
        stop_reason = cut or end
    self.release_slot()
    score = yield from self._call('end', bool(transcript.turns))
    return types.Rollout(
      spec.uid,
      spec.task,
      (*transcript.messages, *messages),
      transcript.samples(spec.task, spec.temperature or 1.0),
      score,
      stop_reason,
      turns=transcript.turns,
    )

  def _call(self, method: str, *args):
    """Yields a call into the environment; returns its result."""
    result = yield functools.partial(self.env.caught, method, *args)
    if isinstance(result, calls.Late):
      raise env_calls.failure(self.env.where, self.env.method, result)
    if isinstance(result, env_calls.EnvError):
      raise result
    return result

  def _turn(
    self, ids: np.ndarray
  ) -> Generator[Call | None, Any, requests.Completion]:
    """Returns the policy's next turn, which continues these ids.

    It has several pieces where the episode may be held within it.
    """
    left = min(self.spec.max_tokens, self._tokens_left)
    most = self._round.tokens or left
    pieces: list[requests.Completion] = []
    while True:
      while self._round.is_over():
        if not self._round.keep_cache:
          self.release_slot()
        yield hold
      self._request(ids, [x.ids for x in pieces], min(most, left))
      pieces.append((yield))
      left -= len(pieces[-1].ids)
      if pieces[-1].stop_reason != 'max_tokens' or not left:
        break
      ids = ids[:0]
    if len(pieces) == 1:
      return pieces[0]
    return dataclasses.replace(
      pieces[-1],
      ids=np.concatenate([x.ids for x in pieces]),
      logprobs=np.concatenate([x.logprobs for x in pieces]),
      cached=pieces[0].cached,
      version=np.repeat(
        [x.version for x in pieces], [len(x.ids) for x in pieces]
      ),
    )

  def _request(
    self, ids: np.ndarray, pieces: Sequence[np.ndarray], budget: int
  ) -> None:
    """Requests tokens after these ids, or after the whole history.

    Args:
      ids: tokens to append to the slot; not used if the episode has none.
      pieces: what the turn has sampled, which the transcript does not have.
      budget: the most tokens.
    """
    spec = self.spec
    # Another id after each restart, and with it other random numbers.
    assert self._transcript.restarts < _MAX_RESTARTS
    id = spec.uid | self._transcript.restarts << _RESTART_BIT
    if self.slot == id:
      self._engine.extend(id, ids, budget)
      return
    self.release_slot()
    # Keep the slot between turns, and between the pieces of one.
    keeps_slot = spec.env.max_turns > 1 or self._round.tokens is not None
    self._engine.submit(
      requests.Request(
        id=id,
        ids=np.concatenate([self._transcript.ids, *pieces]),
        max_tokens=budget,
        stop_ids=self._stop_ids,
        sampling=requests.Sampling(temperature=spec.temperature),
        hold=keeps_slot,
      )
    )
    self.slot = id if keeps_slot else None

  def release_slot(self) -> None:
    """Frees the slot between two turns; the history is prefilled anew."""
    slot, self.slot = self.slot, None
    if slot is not None:
      self._engine.release(slot)

  @property
  def _tokens_left(self) -> int:
    """Tokens by which the episode may still grow."""
    left = self._max_length - len(self._transcript)
    budget = self.spec.max_episode_tokens
    if budget is None:
      return left
    return min(left, budget - self._transcript.num_added)


CLOSE_SECONDS = 10.0  # the time limit of closing an episode after an exception


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
    self.held: dict[int, EpisodeRun] = {}  # by uid, in the order of their begin

  def run(self, specs: Sequence[EpisodeSpec]) -> list[types.Rollout]:
    """Returns one rollout per spec, in order.

    Each process of a run plays its share of the tasks and gets all rollouts.

    A rollout's `messages` are the whole conversation; its one sample (or
    several, see `Transcript`) ends with the last token that the policy sampled.
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
    self,
    specs: Sequence[EpisodeSpec],
    ended: Callable[[types.Rollout], object] = lambda _: None,
    round: Round = Round(),
  ) -> side_by_side.Task[list[types.Rollout]]:
    """Runs the episodes of this process; a task of `side_by_side`.

    Args:
      specs: the episodes.
      ended: called with each rollout as soon as it has ended.
      round: goes on with held episodes too, begins further ones, and may hold
        some of all these.

    Returns:
      The rollouts of the specs that have ended, in order.
    """
    runs, self.held = self.held, {}
    rollouts: dict[int, types.Rollout] = {}

    def begin(specs: Sequence[EpisodeSpec]) -> list[tuple[int, Any]]:
      new = {
        spec.uid: EpisodeRun(
          spec,
          self._engine,
          self._renderer,
          self._max_length,
          self._remote,
          round,
        )
        for spec in specs
      }
      is_unique = len(new) == len(specs) and new.keys().isdisjoint(runs)
      assert is_unique, 'the uid of an episode must be unique'
      runs.update(new)
      if self._remote is not None and any(x.blocking for x in new.values()):
        self._remote.begin()
      return [(uid, None) for uid in new]

    begin(specs)
    with contextlib.ExitStack() as stack:
      stack.callback(getattr(self._engine, 'drop', lambda: None))
      stack.callback(_close, runs.values(), self.env_timeout)
      pool = stack.enter_context(
        calls.Pool(
          self._cfg.env_threads, self._cfg.env_chunks, self.env_timeout
        )
      )
      results = [(uid, None) for uid in runs]
      num_running = len(runs)
      while True:
        for uid, result in results:
          rollout = self._advance(runs[uid], uid, result, pool)
          if rollout is not None:
            rollouts[uid] = rollout
            ended(rollout)
          elif uid in self.held:
            del runs[uid]
          else:
            continue
          num_running -= 1
        results = begin(round.more(num_running))
        num_running += len(results)
        if not num_running:
          break
        if not results:
          results = yield from self._wait(pool, num_running)
    return [rollouts[spec.uid] for spec in specs if spec.uid in rollouts]

  def paused(self) -> contextlib.AbstractContextManager[None]:
    """Leaves the engine to others meanwhile; held episodes keep their cache."""
    engine: Any = self._engine
    if any(run.slot is not None for run in self.held.values()):
      return engine.aside()
    return contextlib.nullcontext()

  def close(self) -> None:
    """Ends the held episodes."""
    for run in self.held.values():
      run.release_slot()
    _close(self.held.values(), self.env_timeout)
    self.held = {}

  def _advance(
    self, run: EpisodeRun, uid: int, result: Any, pool: calls.Pool
  ) -> types.Rollout | None:
    """Sends an episode its result; returns the rollout if that ends it.

    If the episode is held then, it is in `held`.
    """
    try:
      while (call := run.generator.send(result)) is not None:
        if call is hold:
          self.held[uid] = run
          break
        if run.blocking:
          pool.add(uid, call, run.env.abandon)
          break
        start = time.perf_counter()
        try:
          result = calls.inline(call, self.env_timeout, run.env.abandon)
        except calls.Late as error:
          result = error
        self.env_seconds += time.perf_counter() - start
    except StopIteration as end:
      return end.value
    return None

  def _wait(
    self, pool: calls.Pool, num_running: int
  ) -> Generator[side_by_side.Futures, None, list[tuple[int, Any]]]:
    """Waits for the next results; returns (uid, result) pairs."""
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
    return [(uid_of(x.id), x) for x in completions]


def run_all(
  plays: Sequence[tuple[Driver, Sequence[EpisodeSpec]]],
  ended: Callable[[types.Rollout], object] = lambda _: None,
) -> list[list[types.Rollout]]:
  """Returns the rollouts of each driver, all of which run side by side.

  Each process plays its share of every driver's tasks, by models on its own
  devices or on servers, without waiting for other processes. Then they exchange
  the rollouts, driver by driver, so in the same order in all of them.

  Args:
    plays: drivers, each with other specs and another engine.
    ended: called with each rollout of this process as soon as it has ended.

  Raises:
    Exception: the first failure in the order of drivers; see `side_by_side`.
  """
  shares = [processes.share(specs, _task) for _, specs in plays]
  results = side_by_side.run(
    [
      driver.play(own, ended)
      for (driver, _), own in zip(plays, shares, strict=True)
    ]
  )
  return [
    processes.divided(specs, lambda _, own=own: own.result(), _task)
    for (_, specs), own in zip(plays, results, strict=True)
  ]


def _task(spec: EpisodeSpec) -> int:
  """Returns a key that specs of one task share."""
  return id(spec.task)


def _close(runs: Iterable[EpisodeRun], timeout: float) -> None:
  """Closes the episodes that are still open, after an exception."""
  for run in runs:
    if run.env.is_open:
      try:
        calls.inline(run.env.abandon, min(timeout, CLOSE_SECONDS))
      except calls.Late:
        break  # the others may hang as well
