"""The slot engine: many requests through one jitted decode loop.

    engine.set_params(params, version=0)
    for completion in engine.generate(requests): ...

or, to continue sequences between turns:

    engine.submit(request)           # queued; with hold=True the slot is kept
    for completion in engine.poll(): # decodes until a request has stopped
      engine.extend(completion.id, ids, max_tokens)   # or engine.release(id)

`launch` starts a chunk and returns at once; `step` is a poll of one chunk.

1. Queued requests wait for free slots. Neighbours with the same prompt are
   admitted together, and their prompt is prefilled once; with `prefix_cache`
   also what a prompt has in common with those in the slots (`schedule`).
2. The loop runs until all have stopped; while a request waits for a slot or its
   prompt, or holds a slot, for `chunk` tokens at a time. Between two chunks at
   most `prefill_rows` x `prefill_tokens` tokens are prefilled, of episodes also
   more, until at least as many slots decode as are fed; while no slot
   decodes, all that have slots.
3. A completion depends on the weights, the seed, the request's id and its
   prompt; on its slot, the other requests and the chunks only as far as matrix
   products round differently. Scheduling depends on token counts alone, so that
   a rerun is bitwise the same.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from posttrain import schema, scoring, sharding
from posttrain.decode import loop, requests, schedule
from posttrain.models import lora
from posttrain.ops import attention
from posttrain.util import watchdog

_LONG_CHUNK = 256  # tokens of a decode call while no request waits


@dataclasses.dataclass(frozen=True)
class Options:
  """The sizes of an engine, and what it shares between prompts."""

  slots: int  # sequences decoded at a time
  # Tokens of a sequence, prompt included; None = as many as the requests need,
  # in buckets, each of which compiles anew.
  capacity: int | None = None
  # Tokens per decode call while a request waits for a slot or holds one.
  chunk: int = 16
  # The most prompts prefilled at a time, and between two chunks of decoding,
  # rounded up to as many on each device; a call for few prompts has an eighth
  # of these rows.
  prefill_rows: int = 16
  prefill_tokens: int = 32  # tokens of a prompt per prefill chunk
  seed: int = 0  # of all draws
  # Copies what prompts under the same weights have in common, in whole prefill
  # chunks; not with delta layers, which keep the state after the last token
  # alone.
  prefix_cache: bool = True
  # Neighbours whose prompt is stored, and read by decoding, once for all; and
  # tokens that are stored so, at most. Slots hold the capacity without these: a
  # sequence with a shorter prompt has fewer tokens. 0 = none, as of requests
  # that fit in a slot. Without a prefix cache, and with a fixed capacity.
  group_size: int = 1
  prompt_tokens: int = 0
  # Of keys and values in the cache: 'auto' = the compute dtype, or 'int8'.
  cache_dtype: str = 'auto'
  # Whether decoding reads every slot to its end, so that the bits of a sequence
  # do not depend on the length of others; with one row per prefill (and a
  # fixed capacity) on no other sequence at all.
  exact: bool = False


class Engine:
  """Decodes with one set of weights at a time."""

  def __init__(
    self, model: schema.Model, options: Options, mesh: Mesh | None = None
  ):
    """Makes an engine without weights.

    Args:
      model: model options, with the vocabulary resolved.
      options: the engine's.
      mesh: splits slots over its axes data, sequence, fsdp and expert, and
        weights over tensor and expert. None = one device.

    Raises:
      ValueError: the slots do not divide over the mesh.
    """
    slots = options.slots
    self.slots, self.capacity = slots, options.capacity or 0
    self._model, self._options = model, options
    self._mesh, self._sharding = mesh, loop.placement(mesh, slots)
    ways = 1 if mesh is None else sharding.batch_ways(mesh)
    rows, width = min(options.prefill_rows, slots), options.prefill_tokens
    tokens, size = options.prompt_tokens, options.group_size
    self._store = schedule.Store.make(slots, ways, tokens, size)
    if tokens:
      assert options.capacity and not options.prefix_cache, options
    self._shapes = schedule.Shapes(slots, rows, width, ways, tokens > 0)
    self._params = self._view = self._state = self._slot_options = None
    self._version = -1
    self._schedule = self._new_schedule()
    self._ready: list[requests.Completion] = []
    self._launched = False  # whether a chunk runs that was not waited for
    self._stopped = False

  def take_free_slots(self) -> None:
    """Lets neighbours with the same prompt take free slots at once.

    By default they wait until there are slots for all of them, so that their
    prompt is prefilled once.
    """
    self._schedule.share_prefill = False

  def set_params(self, params: Any, version: int, decodes: bool = True) -> None:
    """Sets the weights that decode from now on.

    Args:
      params: the model's parameters, on the engine's devices or on those of
        all processes, which then call this together. Decoding has its own copy;
        `score` reads these, so they must not be deleted before the next call.
      version: the version that completions report.
      decodes: false where only `score` is called with them.

    The cache of a held request stays that of the old weights; no other request
    may be in flight.
    """
    in_flight = self._schedule.in_flight.values()
    assert all(x.held for x in in_flight), 'hold or release all requests first'
    old = params if self._params is None else self._params
    # Factors of any rank beside a matrix decode as the matrix does.
    shapes, before = (
      {k: getattr(x, 'kernel', x).shape for k, x in lora.matrices(y).items()}
      for y in (params, old)
    )
    assert shapes == before, 'they need another engine'
    self._params, self._version = params, version
    self._schedule.forget()
    self._view = None  # freed first
    if not decodes:
      return
    if self._mesh is None or sharding.is_local(params):
      self._view = loop.view(params, self._model, self._sharding)
    else:
      self._view = loop.local_view(params, self._model, self._mesh)

  def stop(self) -> None:
    """Makes decoding raise `requests.Stopped`, also in another thread."""
    self._stopped = True

  @contextlib.contextmanager
  def aside(self) -> Iterator[None]:
    """Sets held requests aside, with their cache; others have one of their own.

    The others must be released by the end. Weights may be set meanwhile.
    """
    kept = self._schedule, self._state, self._slot_options
    self._schedule = self._new_schedule()
    self._state = self._slot_options = None
    try:
      yield
    finally:
      self._schedule, self._state, self._slot_options = kept
      self._schedule.forget()

  def sleep(self) -> None:
    """Frees the cache until the next request; none may be in flight."""
    assert not self._schedule.in_flight, 'release all requests first'
    self._state = self._slot_options = None
    self._launched = False
    self._schedule.forget()

  def warm_up(self) -> None:
    """Compiles the programs of prefill, for an engine with a fixed capacity.

    Raises:
      ValueError: no weights are set.
    """
    self._need_weights()
    assert self._options.capacity, 'an engine that grows compiles as it grows'
    self._state = self._fit()
    for count, length in self._shapes.calls(self.capacity):
      # A call that feeds no token.
      self._prefill(schedule.Call([[]] * self._shapes.ways, count, length))
    self._copy([])

  def submit(self, request: requests.Request) -> None:
    """Queues a request.

    Raises:
      ValueError: its id is in flight or out of range, its prompt is empty, it
        has too many stop ids, or max_tokens is not >= 1.
    """
    self._schedule.check(request)
    entry = self._schedule.new(request)
    self._begin(entry, entry.request.ids, 0, request.max_tokens)

  def extend(self, id: int, ids: np.ndarray, max_tokens: int) -> None:
    """Appends tokens to a held sequence, and queues its next turn.

    Args:
      id: the id of a request that was submitted with `hold` and has stopped.
      ids: i32[n], appended to the tokens drawn so far; may be empty.
      max_tokens: the most tokens of the next completion.

    Raises:
      ValueError: the request is not held, or max_tokens is not >= 1.
    """
    entry = self._schedule.held(id)
    what = f'request {id}'
    requests.require(max_tokens > 0, what, 'have max_tokens >= 1', max_tokens)
    ids = np.concatenate([[entry.token], np.asarray(ids)]).astype(np.int32)
    self._begin(entry, ids, entry.length, max_tokens)

  @property
  def in_flight(self) -> list[int]:
    """The ids of the requests that wait, decode or hold a slot."""
    return list(self._schedule.in_flight)

  def release(self, id: int) -> None:
    """Removes a held request; its slot is free."""
    self._schedule.remove(self._schedule.held(id))

  def poll(self) -> list[requests.Completion]:
    """Decodes until a request has stopped; [] if none is in flight.

    Returns:
      Completions of the stopped requests, in the order of submission.

    Raises:
      ValueError: no weights are set; or requests wait, and what they need is
        held.
    """
    self._need_weights()
    self._harvest()  # the launched chunk
    in_flight = self._schedule.in_flight.values()
    while not self._ready and not all(entry.held for entry in in_flight):
      self._decode()
      requests.require(
        not all(entry.held for entry in self._schedule.in_slots),
        f'{self._schedule.num_waiting} requests',
        'find free slots',
        0,
        f': all {self.slots}{", or all stored prompts," * bool(self._store)} '
        'are held; extend or release held requests before polling, or raise '
        'the number of slots',
      )
      self._harvest()
    return self._collect()

  def step(self) -> list[requests.Completion]:
    """Admits waiting requests, decodes a chunk, and returns completions.

    If a chunk was launched, it is that one. Does nothing if all slots are held.
    """
    self.launch()
    self._harvest()
    return self._collect()

  def launch(self) -> None:
    """Starts the chunk that `step` or `poll` will wait for.

    Returns while the device decodes. Requests submitted, extended or released
    before the wait take effect after the chunk.
    """
    self._need_weights()
    if not self._launched:
      self._decode(self._options.chunk)

  def partial(self) -> dict[int, tuple[np.ndarray, np.ndarray, int]]:
    """Returns (ids i32[n], logprobs f32[n], cached) of unfinished turns, by id.

    `cached` is that of `requests.Completion`.
    """
    if self._state is None:
      return {}
    length, ids, logprobs = jax.device_get(
      (self._state.length, self._state.ids, self._state.logprobs)
    )
    return {
      entry.request.id: (ids[turn].copy(), logprobs[turn].copy(), entry.cached)
      for entry in self._schedule.in_slots
      if not entry.held
      for turn in [entry.turn(length[entry.slot] if entry.active else 0)]
    }

  def cancel(self, id: int) -> None:
    """Removes a request, or its completion if not collected; frees its slot.

    Raises:
      ValueError: no such request is in flight.
    """
    ready = [x for x in self._ready if x.id != id]
    if len(ready) == len(self._ready) or id in self._schedule.in_flight:
      if (slot := self._schedule.cancel(id)) >= 0:
        self._state = loop.stop(self._state, slot, self._sharding)
    self._ready = ready

  def generate(
    self, batch: Sequence[requests.Request]
  ) -> list[requests.Completion]:
    """Returns the completion of each request, in order.

    No other request may be in flight, or not polled yet.

    Raises:
      ValueError: no weights are set, or `submit` refuses a request. No request
        is queued then.
    """
    self._need_weights()
    assert not (self._schedule.in_flight or self._ready), 'poll them first'
    assert len({x.id for x in batch}) == len(batch), 'an id occurs twice'
    for request in batch:
      assert not request.hold, 'a held request is submitted and polled'
      self._schedule.check(request)
    for request in batch:
      self.submit(request)
    completions = {}
    while len(completions) < len(batch):
      completions |= {x.id: x for x in self.poll()}
    return [completions[request.id] for request in batch]

  def score(
    self,
    sequences: Sequence[np.ndarray],
    temperature: float = 1.0,
    reads: str = 'logprobs',
  ) -> list[np.ndarray]:
    """Returns the logprobs of each sequence's tokens under the weights.

    Where these are on the devices of all processes, all must call it.

    Args:
      sequences: i32[T] each, prompt and completion.
      temperature: > 0.
      reads: what to compute of each token, one of `scoring.READS`.

    Returns:
      f32[T] each, in nats, by `scoring.score`; entry 0 is 0. With
      'logprobs_and_top' f32[T, 2], beside whether a token is the most likely.

    Raises:
      ValueError: no weights are set.
    """
    self._need_weights()
    width = schedule.bucket(max(map(len, sequences)))
    mesh, rows = self._mesh, self._shapes.row_counts[-1] * self._shapes.ways
    if mesh is not None and not sharding.is_local(self._params):
      mesh = jax.tree.leaves(self._params)[0].sharding.mesh
      rows *= jax.process_count()
    scorer = scoring.Scorer(self._model, rows, width, mesh, reads)
    temperatures = [np.full(len(x), temperature, np.float32) for x in sequences]
    return scorer(self._params, sequences, temperatures)

  def _new_schedule(self) -> schedule.Schedule:
    shares = self._options.prefix_cache and not self._model.delta_layers
    chunk = self._shapes.width if shares else None
    return schedule.Schedule(self.slots, self._shapes.ways, chunk, self._store)

  def _need_weights(self) -> None:
    if self._params is None:
      raise ValueError(
        'weights must be set before decoding: got None; call set_params first'
      )

  def _begin(
    self,
    entry: schedule.RequestState,
    ids: np.ndarray,
    start: int,
    max_tokens: int,
  ) -> None:
    """Starts a turn, or ends it at once if the cache has no space for it."""
    if self._options.capacity is None:
      end = start + len(ids) + max_tokens
      self.capacity = max(self.capacity, schedule.bucket(end))
    if not self._schedule.begin(entry, ids, start, max_tokens, self.capacity):
      self._finish(entry, [], [], 'overflow')

  def _decode(self, steps: int | None = None) -> None:
    """Admits requests and starts decoding; `steps`: None = `poll`'s choice."""
    if self._stopped:
      raise requests.Stopped
    if self._schedule.num_waiting:
      self._admit()
    if not self._schedule.num_active:
      return
    # Chunks let waiting requests be prefilled and held ones be extended.
    # Otherwise they only let Ctrl-C and the watchdog through.
    long = min(self.capacity, _LONG_CHUNK)
    short = self._schedule.num_waiting or self._holds()
    most = self._options.chunk if short else long
    self._state = loop.decode(
      self._view,
      self._model,
      self._state,
      self._slot_options,
      (steps or most, self._min_active()),
      self._sharding,
      self._prompts(),
      self._options.exact,
    )
    self._launched = True

  def _prompts(self) -> attention.Shared | None:
    """Returns the prompts of `loop.decode` that are stored once."""
    groups = self._schedule.prompts()
    if groups is None:
      return None
    sizes, most = loop.lengths(self._options.prompt_tokens), np.max(groups[1])
    longest = next(x for x in sizes if x >= most)
    return attention.Shared(None, *groups, longest=longest)

  def _admit(self) -> None:
    """Prefills waiting requests into free slots; each draws a token.

    Until none waits or no slot is free; next to active slots, which must not
    wait long, at most a chunk of all rows, unless the slots that are fed are
    more than these, and of episodes, or the engine is exact: its decoding costs
    as much for few sequences as for all.
    """
    self._state, plan, shapes = self._fit(), self._schedule, self._shapes
    most = shapes.row_counts[-1]
    waits = plan.num_active and not self._options.exact
    left = most if waits else math.inf
    while True:
      plan.assign_slots()
      if copies := plan.copy():
        self._copy(copies)
      call = shapes.next_call(plan, self._state.ids.shape[1])
      if call is None:
        return
      if call.count > left and not (
        self._holds() and plan.num_fed > plan.num_active
      ):
        return
      left -= call.count
      logits = self._prefill(call)
      finished = [
        [x for x in groups if plan.feed(x, min(x.left, shapes.width))]
        for groups in call.rows
      ]
      if not any(finished):
        continue
      members = [
        (entry.slot, group.head.slot, size)
        for groups in finished
        for group in groups
        if (size := group.head.prompt_end - group.head.base)
        or self._model.delta_layers
        for entry in group.entries[1:]
      ]
      if members:
        self._copy(members)
      fields = plan.slot_options()
      keys = loop.request_keys(
        self._options.seed, fields.pop('high'), fields.pop('low')
      )
      self._slot_options = loop.Slots(keys=keys, **fields)
      drawing = shapes.drawing(call.rows, finished)
      self._state = loop.first(
        self._state, self._slot_options, logits, *drawing, self._sharding
      )

  def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
    """Copies the first tokens of slots, see `schedule.Shapes.copies`."""
    shapes = self._shapes
    most = shapes.row_counts[-1] * shapes.width
    copied = shapes.copies(copies)
    self._state = loop.share(self._state, *copied, most, self._sharding)

  def _prefill(self, call: schedule.Call) -> jax.Array:
    """Feeds a chunk to each row; returns the logits of `loop.prefill`."""
    shapes = self._shapes
    self._state, logits = loop.prefill(
      self._view,
      self._model,
      self._state,
      shapes.chunk(call),
      call.length,
      shapes.row_counts[-1],
      self._sharding,
    )
    return logits

  def _min_active(self) -> int:
    """Returns the number of active slots at which a chunk ends.

    While requests wait for slots or held ones may be extended, it ends early
    once an eighth of the slots have stopped, and there is space for the next
    requests: the stopped ones idle, but to admit others costs as much as a few
    tokens of all slots.
    """
    lacking = self._schedule.lacking
    if not lacking and not self._holds():
      return 0
    stops = max(self.slots // 8, lacking, 1)
    return max(self._schedule.num_active - stops, 0)

  def _holds(self) -> bool:
    """Returns whether a request in a slot may be extended."""
    return any(entry.request.hold for entry in self._schedule.in_slots)

  def _fit(self) -> loop.State:
    """Returns the state, allocated or widened to the capacity if need be."""
    sizes = self.slots, self.capacity, self._sharding
    store = self._store
    prompts = (store.count, store.tokens) if store else (0, 0)
    dtype = self._options.cache_dtype
    return loop.fit(self._state, self._model, *sizes, prompts, dtype)

  def _harvest(self) -> None:
    """Waits for the launched chunk; collects the requests that stopped."""
    launched, self._launched = self._launched, False
    if not launched:
      return
    assert self._state is not None
    active, length = jax.device_get((self._state.active, self._state.length))
    watchdog.progress()
    stopped = self._schedule.stopped(active)
    if not stopped:
      return
    ids, logprobs = jax.device_get((self._state.ids, self._state.logprobs))
    for entry in stopped:
      entry.length = int(length[entry.slot])
      turn = entry.turn(entry.length)
      entry.token = int(ids[turn][-1])
      self._finish(
        entry, ids[turn], logprobs[turn], entry.stop_reason, self._routes(entry)
      )

  def _routes(self, entry: schedule.RequestState) -> np.ndarray | None:
    """Returns `requests.Completion.routes` of a request that has stopped."""
    if self._model.routes == 'own':
      return None
    prompt, ways = entry.prompt_index, self._shapes.ways
    if self._store is not None:  # counted from the first one on its device
      device = entry.slot // (self.slots // ways)
      prompt += device * (self._store.count // ways)
    args = entry.slot, prompt, entry.base
    rows = np.asarray(loop.routes(self._state, *args))[: entry.length]
    return rows.reshape(len(rows), self._model.expert_layers, -1)

  def _collect(self) -> list[requests.Completion]:
    completions, self._ready = self._ready, []
    return completions

  def _finish(
    self,
    entry: schedule.RequestState,
    ids: Any,
    logprobs: Any,
    reason: str,
    routes: np.ndarray | None = None,
  ) -> None:
    ids, logprobs = np.array(ids, np.int32), np.array(logprobs, np.float32)
    self._ready.append(
      requests.Completion(
        entry.request.id,
        ids,
        logprobs,
        reason,
        self._version,
        entry.cached,
        routes,
      )
    )
    self._schedule.finish(entry)
