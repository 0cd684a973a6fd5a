"""The slot engine: many requests through one jitted decode loop.

    engine.set_params(params, version=0)
    for completion in engine.generate(requests): ...

or, for whoever has something to say between the turns:

    engine.submit(request)           # queued; with hold=True the slot is kept
    for completion in engine.poll(): # decodes until something has stopped
      engine.extend(completion.id, ids, max_tokens)   # or engine.release(id)

1. Queued requests wait for free slots. Neighbours with the same prompt are
   admitted together, and their prompt is prefilled once.
2. The loop runs until all have stopped; while a request waits for a slot, or
   holds one, for `chunk` tokens at a time.
3. What a request gets depends on the weights, the seed, its id and its prompt;
   on its slot, its company and the chunks only as far as matrix products round
   differently. Scheduling depends on token counts alone, so that a rerun is
   bitwise the same.

Axes: B slots, R scratch rows, C tokens of a prefill chunk, S cache slots.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from posttrain import schema, scoring
from posttrain.decode import loop, requests
from posttrain.models import transformer

STOP_IDS = 8  # a request has at most so many


@dataclasses.dataclass
class _Seat:
  """A request in flight."""

  request: requests.Request
  order: int  # of submission
  slot: int | None = None
  # The turn: tokens to feed, where the first of them goes, where what is drawn
  # ends, and whether the cache rather than the request sets that end.
  feed: np.ndarray | None = None
  start: int = 0
  limit: int = 0
  cut: bool = False
  # Behind the turn: tokens in the cache, and the last drawn, which is not.
  length: int = 0
  token: int = -1
  held: bool = False  # stopped, and keeps its slot

  @property
  def prompt_end(self) -> int:
    return self.start + len(self.feed)


class Engine:
  """Decodes with one set of weights at a time."""

  def __init__(
      self,
      model: schema.Model,
      *,
      slots: int,
      capacity: int | None = None,
      chunk: int = 16,
      prefill_rows: int = 16,
      prefill_tokens: int = 32,
      seed: int = 0,
      mesh: Mesh | None = None,
  ):
    """Makes an engine without weights.

    Args:
      model: its options, with the vocabulary resolved.
      slots: sequences decoded at a time.
      capacity: tokens of a sequence, prompt included; None = what the requests
        need, in buckets, each of which compiles anew.
      chunk: tokens between two looks at the slots, while a request waits for
        one or holds one.
      prefill_rows: prompts prefilled at a time.
      prefill_tokens: tokens of a prompt that go in at a time.
      seed: of every draw.
      mesh: splits slots over its axes data and fsdp; weights are whole on
        every device. None = one device.

    Raises:
      ValueError: the slots do not divide over the mesh.
    """
    self.slots, self.capacity = slots, capacity
    self._grows = capacity is None
    self._model, self._seed, self._chunk = model, seed, chunk
    self._rows, self._width = min(prefill_rows, slots), prefill_tokens
    self._place = _placement(mesh, slots)
    self._params = self._view = self._state = self._asked = None
    self._version = -1
    self._submitted = 0
    self._in_flight: dict[int, _Seat] = {}
    self._queue: collections.deque[_Seat] = collections.deque()
    self._extended: collections.deque[_Seat] = collections.deque()
    self._taken: list[_Seat | None] = [None] * slots
    self._ready: list[requests.Completion] = []

  def set_params(self, params: Any, version: int) -> None:
    """Decodes with other weights from here on.

    Args:
      params: the model's parameters. Decoding has its own copy; `score` reads
        these, so they must live until the next call.
      version: what completions say sampled them.

    Raises:
      ValueError: a request is in flight, whose cache the old weights made; or
        the tree differs from the last one's.
    """
    if self._in_flight:
      raise ValueError(
          'weights must be set while no request is in flight: got '
          f'{len(self._in_flight)}; poll and release them first'
      )
    if self._params is not None:
      _check_same(self._params, params)
    self._params, self._version = params, version
    self._view = _view(params, self._model, self._place)

  def submit(self, request: requests.Request) -> None:
    """Queues a request.

    Raises:
      ValueError: its id is in flight or out of range, its prompt is empty, it
        has too many stop ids, or asks for no token.
    """
    name, ids = f'request {request.id}', np.asarray(request.ids, np.int32)
    _require(request.id not in self._in_flight, name, 'not be in flight',
             request.id)  # fmt: skip
    _require(0 <= request.id < 2**63, name, 'have an id in [0, 2**63)',
             request.id)  # fmt: skip
    _require(ids.ndim == 1 and ids.size, name, 'have a prompt of some tokens',
             ids.shape)  # fmt: skip
    _require(len(request.stop_ids) <= STOP_IDS, name,
             f'have at most {STOP_IDS} stop ids', request.stop_ids)  # fmt: skip
    seat = _Seat(request, self._submitted)
    if self._begin(seat, ids, 0, request.max_tokens):
      self._queue.append(seat)
    self._submitted += 1

  def extend(self, id: int, ids: np.ndarray, max_tokens: int) -> None:
    """Appends tokens to a held sequence, and goes on.

    Args:
      id: of a request that was submitted with `hold` and has stopped.
      ids: i32[n], what follows the tokens drawn so far; may be empty.
      max_tokens: of the next completion.

    Raises:
      ValueError: the request is not held, or asks for no token.
    """
    seat = self._held(id, 'extended')
    ids = np.concatenate([[seat.token], np.asarray(ids)]).astype(np.int32)
    if self._begin(seat, ids, seat.length, max_tokens):
      seat.held = False
      self._extended.append(seat)

  def release(self, id: int) -> None:
    """Forgets a held request; its slot is free."""
    self._leave(self._held(id, 'released'))

  def poll(self) -> list[requests.Completion]:
    """Decodes until something has stopped; [] if nothing is in flight.

    Returns:
      What has stopped, in the order of submission.

    Raises:
      ValueError: requests wait, and every slot is held.
    """
    assert self._view is not None, 'set_params comes first'
    while not self._ready and any(
        not seat.held for seat in self._in_flight.values()
    ):
      self._admit()
      if all(seat is None or seat.held for seat in self._taken):
        raise ValueError(
            f'{len(self._queue)} requests must find free slots: all '
            f'{self.slots} are held; extend or release held requests before '
            'polling, or raise the number of slots'
        )
      # Whoever holds a slot may have something to say, and a free one is used.
      waits = self._queue or any(
          seat is not None and seat.request.hold for seat in self._taken
      )
      self._state = _decode(
          self._view, self._model, self._state, self._asked,
          self._chunk if waits else self.capacity, self._place,
      )  # fmt: skip
      self._harvest()
    done, self._ready = self._ready, []
    return done

  def generate(
      self, asked: Sequence[requests.Request]
  ) -> list[requests.Completion]:
    """Answers all requests, in their order; none may be held."""
    assert not any(request.hold for request in asked), 'poll what you hold'
    for request in asked:
      self.submit(request)
    done = {}
    while len(done) < len(asked):
      done |= {completion.id: completion for completion in self.poll()}
    return [done[request.id] for request in asked]

  def score(
      self, sequences: Sequence[np.ndarray], temperature: float = 1.0
  ) -> list[np.ndarray]:
    """Logprobs of every token of each sequence, under the engine's weights.

    Args:
      sequences: i32[T] each, prompt and completion.
      temperature: > 0.

    Returns:
      f32[T] each, in nats, by `scoring.score`; entry 0 is 0.
    """
    width = bucket(max(len(ids) for ids in sequences))
    scorer = scoring.Scorer(self._model, self._rows, width)
    temperatures = [
        np.full(len(ids), temperature, np.float32) for ids in sequences
    ]
    return scorer(self._params, sequences, temperatures)

  def _held(self, id: int, what: str) -> _Seat:
    seat = self._in_flight.get(id)
    _require(seat is not None and seat.held, f'request {id}',
             f'be held to be {what}', 'one that is not')  # fmt: skip
    return seat

  def _begin(self, seat: _Seat, ids, start: int, max_tokens: int) -> bool:
    """Sets up a turn. One without room for a token ends here: False."""
    _require(max_tokens > 0, f'request {seat.request.id}',
             'ask for a token at least', max_tokens)  # fmt: skip
    seat.feed, seat.start = ids, start
    end = seat.prompt_end + max_tokens
    if self._grows:
      self.capacity = max(self.capacity or 0, bucket(end))
    seat.limit = min(end, self.capacity)
    seat.cut = end > self.capacity
    self._in_flight[seat.request.id] = seat
    if seat.prompt_end < seat.limit:
      return True
    nothing = np.zeros(0)
    self._finish(seat, nothing, nothing, 'overflow')
    return False

  def _admit(self) -> None:
    """Fills free slots: extensions first, then the queue, in their order."""
    if not (self._extended or self._queue):
      return
    self._state = _fit(
        self._state, self._model, self.slots, self.capacity, self._place
    )
    while group := self._next_entries():
      for entry in group:
        for seat in entry:
          self._taken[seat.slot] = seat
      self._asked = self._ask()
      self._fill(group)

  def _next_entries(self) -> list[list[_Seat]]:
    """Up to R scratch rows, each with the seats that it goes to."""
    entries = []
    while self._extended and len(entries) < self._rows:
      entries.append([self._extended.popleft()])
    free = [slot for slot, seat in enumerate(self._taken) if seat is None]
    while self._queue and len(entries) < self._rows:
      run = self._run()
      if len(run) > len(free):
        break
      for seat in run:
        self._queue.popleft()
        seat.slot = free.pop(0)
      entries.append(run)
    return entries

  def _run(self) -> list[_Seat]:
    """The queue's head and what follows it with the same prompt."""
    first, run = self._queue[0], []
    for seat in self._queue:
      same = np.array_equal(seat.feed, first.feed)
      if not same or len(run) == self.slots:
        break
      run.append(seat)
    return run

  def _fill(self, entries: list[list[_Seat]]) -> None:
    """Prefills the entries' tokens and puts the rows into their slots."""
    heads = [entry[0] for entry in entries]
    longest = max(len(seat.feed) for seat in heads)
    tokens = np.zeros((self._rows, -(-longest // self._width) * self._width))
    tokens, start, count, source = tokens.astype(np.int32), *np.zeros(
        (3, self._rows), np.int32
    )
    for row, seat in enumerate(heads):
      tokens[row, : len(seat.feed)] = seat.feed
      start[row], count[row] = seat.start, len(seat.feed)
      source[row] = seat.slot  # whose cache goes before; a new one has none
    scratch, logits = _load(self._state, self._model, source)
    for at in range(0, tokens.shape[1], self._width):
      scratch, logits = _prefill(
          self._view, self._model, scratch, logits,
          tokens[:, at : at + self._width], start + at,
          np.clip(count - at, 0, self._width),
      )  # fmt: skip
    place = np.full(self.slots, self.slots, np.int32)
    row, length = np.zeros((2, self.slots), np.int32)
    filled = ((r, seat) for r, entry in enumerate(entries) for seat in entry)
    for i, (r, seat) in enumerate(filled):
      place[i], row[i], length[i] = seat.slot, r, seat.prompt_end
    self._state = _place_rows(
        self._state, self._asked, scratch, logits, place, row, length,
        self._place,
    )  # fmt: skip

  def _ask(self) -> loop.Slots:
    """What the slots' requests ask for, as arrays."""
    fields = {
        'high': np.uint32, 'low': np.uint32, 'limit': np.int32,
        'temperature': np.float32, 'top_k': np.int32, 'top_p': np.float32,
        'min_p': np.float32,
    }  # fmt: skip
    fields = {k: np.zeros(self.slots, kind) for k, kind in fields.items()}
    stop_ids = np.full((self.slots, STOP_IDS), -1, np.int32)
    for slot, seat in enumerate(self._taken):
      if seat is None:
        continue
      request = seat.request
      asks = {
          **vars(request.sampling), 'limit': seat.limit,
          'high': request.id >> 32, 'low': request.id & 0xFFFFFFFF,
      }  # fmt: skip
      for name, value in asks.items():
        fields[name][slot] = value
      stop_ids[slot, : len(request.stop_ids)] = request.stop_ids
    keys = _keys(self._seed, fields.pop('high'), fields.pop('low'))
    return loop.Slots(keys=keys, stop_ids=stop_ids, **fields)

  def _harvest(self) -> None:
    """Collects what has stopped."""
    active, length = jax.device_get((self._state.active, self._state.length))
    done = [
        seat for seat in self._taken
        if seat is not None and not seat.held and not active[seat.slot]
    ]  # fmt: skip
    if not done:
      return
    ids, logprobs = jax.device_get((self._state.ids, self._state.logprobs))
    for seat in sorted(done, key=lambda seat: seat.order):
      seat.length = int(length[seat.slot])
      turn = (seat.slot, slice(seat.prompt_end, seat.length + 1))
      seat.token = int(ids[turn][-1])
      if seat.token in seat.request.stop_ids:
        reason = 'eos'
      else:
        reason = 'overflow' if seat.cut else 'max_tokens'
      self._finish(seat, ids[turn], logprobs[turn], reason)

  def _finish(self, seat: _Seat, ids, logprobs, reason: str) -> None:
    self._ready.append(
        requests.Completion(
            seat.request.id, np.array(ids, np.int32),
            np.array(logprobs, np.float32), reason, self._version,
        )
    )  # fmt: skip
    seat.held = True
    if not seat.request.hold:
      self._leave(seat)

  def _leave(self, seat: _Seat) -> None:
    del self._in_flight[seat.request.id]
    if seat.slot is not None:
      self._taken[seat.slot] = None


def bucket(tokens: int) -> int:
  """The capacity for so many tokens: 32, 48, 64, 96, 128, 192, ..."""
  size = 32
  while size < tokens:
    size += size // 2
    if size < tokens:
      size = size // 3 * 4
  return size


def _require(ok: bool, name: str, must: str, got) -> None:
  if not ok:
    raise ValueError(f'{name} must {must}: got {got!r}')


def _check_same(old, new) -> None:
  """Raises unless two trees agree in structure, shapes and dtypes."""
  def describe(params):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), params)

  if describe(old) != describe(new):
    raise ValueError(
        'weights must keep their tree, shapes and dtypes: got '
        f'{describe(new)}, expected {describe(old)}'
    )


def _placement(mesh: Mesh | None, slots: int) -> NamedSharding | None:
  """How the slots lie on the mesh; None on one device."""
  if mesh is None or mesh.size == 1:
    return None
  ways = mesh.shape['data'] * mesh.shape['fsdp']
  _require(slots % ways == 0, 'config rollout.slots',
           f'be a multiple of data x fsdp = {ways}', slots)  # fmt: skip
  return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def _pin(state: loop.State, place: NamedSharding | None) -> loop.State:
  return (
      state if place is None else jax.lax.with_sharding_constraint(state, place)
  )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _view(params, model, place):
  view = transformer.decode_view(params, model)
  if place is None:
    return view
  whole = NamedSharding(place.mesh, PartitionSpec())
  return jax.lax.with_sharding_constraint(view, whole)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _fit_jit(state, model, slots, capacity, place):
  """An empty state, or a state with room for more tokens."""
  new = loop.init(model, slots, capacity)
  if state is not None:
    new = jax.tree.map(
        lambda wide, old: jax.lax.dynamic_update_slice(
            wide, old, (0,) * old.ndim
        ),
        new, state,
    )  # fmt: skip
  return _pin(new, place)


def _fit(state, model, slots, capacity, place):
  if state is not None and state.ids.shape[1] >= capacity:
    return state
  return _fit_jit(state, model, slots, capacity, place)


@functools.partial(jax.jit, static_argnums=1)
def _load(state, model, source):
  logits = jnp.zeros((len(source), model.vocab_size), jnp.float32)
  return loop.load(state.cache, source), logits


_prefill = jax.jit(loop.prefill, static_argnums=1, donate_argnums=(2, 3))
_keys = jax.jit(loop.request_keys)


@functools.partial(jax.jit, static_argnums=7, donate_argnums=0)
def _place_rows(state, slots, scratch, logits, place, row, length, sharding):
  state = loop.admit(state, slots, scratch, logits, place, row, length)
  return _pin(state, sharding)


@functools.partial(jax.jit, static_argnums=(1, 5), donate_argnums=2)
def _decode(view, model, state, slots, steps, place):
  return _pin(loop.decode(view, model, state, slots, steps), place)
