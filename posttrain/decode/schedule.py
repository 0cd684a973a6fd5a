"""Who sits in which slot, who waits, and whose turn comes next. Numpy only.

A request is `begun`: its turn's tokens are known. It waits (new ones in the
queue, extensions ahead of them), is `seated` (its tokens go into a slot), and
`finished` (it has stopped). A request that is held keeps its slot until it is
begun again or released.

Order depends on submission and token counts alone.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from posttrain.decode import requests

STOP_IDS = 8  # a request has at most so many


@dataclasses.dataclass
class Seat:
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

  @property
  def stop_reason(self) -> str:
    """Of the turn, once its last token is known."""
    if self.token in self.request.stop_ids:
      return 'eos'
    return 'overflow' if self.cut else 'max_tokens'

  def turn(self, length: int) -> tuple[int, slice]:
    """Where what the turn drew lies, once so many tokens are in the cache."""
    return self.slot, slice(self.prompt_end, int(length) + 1)


class Schedule:
  """The requests of an engine with so many slots."""

  def __init__(self, slots: int, patient: bool = True):
    """Args: slots: of the engine; patient: as of `Engine`."""
    self._patient = patient
    self._slots: list[Seat | None] = [None] * slots
    self._in_flight: dict[int, Seat] = {}
    self._queue: collections.deque[Seat] = collections.deque()
    self._extended: collections.deque[Seat] = collections.deque()
    self._submitted = 0

  def __len__(self) -> int:
    """Returns the number of requests in flight, held ones included."""
    return len(self._in_flight)

  @property
  def seated(self) -> Iterator[Seat]:
    return (seat for seat in self._slots if seat is not None)

  @property
  def waiting(self) -> int:
    return len(self._queue) + len(self._extended)

  @property
  def running(self) -> bool:
    """Whether a request in flight has not stopped."""
    return any(not seat.held for seat in self._in_flight.values())

  @property
  def pressing(self) -> bool:
    """Whether somebody waits for a slot, or may have something to say."""
    return bool(self.waiting) or any(s.request.hold for s in self.seated)

  def check_some_run(self) -> None:
    """Raises ValueError where nothing that is seated will ever stop."""
    if all(seat.held for seat in self.seated):
      slots = len(self._slots)
      raise ValueError(
        f'{self.waiting} requests must find free slots: all {slots} are '
        'held; extend or release held requests before polling, or raise the '
        'number of slots'
      )

  def check(self, request: requests.Request) -> None:
    """Raises ValueError for a request that `Engine.submit` must refuse."""
    ids = np.asarray(request.ids, np.int32)
    for ok, must, got in (
      (request.id not in self._in_flight, 'not be in flight', request.id),
      (0 <= request.id < 2**63, 'have an id in [0, 2**63)', request.id),
      (0 <= request.numbers < 2**63, 'have a key in [0, 2**63)', request.key),
      (ids.ndim == 1 and ids.size, 'have a prompt of some tokens', ids.shape),
      (
        len(request.stop_ids) <= STOP_IDS,
        f'have at most {STOP_IDS} stop ids',
        request.stop_ids,
      ),
      (request.max_tokens > 0, 'ask for a token at least', request.max_tokens),
    ):
      require(ok, request.id, must, got)

  def check_all(
    self, asked: Sequence[requests.Request], unread: set[int]
  ) -> None:
    """Raises ValueError for what `Engine.generate` must refuse.

    Args:
      asked: requests.
      unread: ids of completions that have not been polled.
    """
    for request in asked:
      require(
        not request.hold,
        request.id,
        'not ask to be held',
        request.hold,
        'submit and poll it',
      )
      self.check(request)
    for id, times in collections.Counter(r.id for r in asked).items():
      require(times == 1, id, 'be asked for once', times)
    if others := self._in_flight.keys() | unread:
      raise ValueError(
        f'generate must find no request in flight: got {sorted(others)[:8]}, '
        'expected none; poll and release them first'
      )

  def new(self, request: requests.Request) -> Seat:
    """Opens a seat for a request that has been checked."""
    ids = np.asarray(request.ids, np.int32)
    seat = Seat(dataclasses.replace(request, ids=ids), self._submitted)
    self._submitted += 1
    return seat

  def held(self, id: int, what: str) -> Seat:
    """Returns a request that is held; ValueError if it is not."""
    seat = self._in_flight.get(id)
    ok = seat is not None and seat.held
    require(ok, id, f'be held to be {what}', 'one that is not')
    return seat

  def begin(
    self,
    seat: Seat,
    ids: np.ndarray,
    start: int,
    max_tokens: int,
    capacity: int,
  ) -> bool:
    """Starts a turn; False if the cache has no room for a token of it.

    Args:
      seat: of the request.
      ids: i32[n], tokens to feed.
      start: position of the first of them.
      max_tokens: of what is drawn.
      capacity: tokens of a slot.
    """
    seat.feed, seat.start = ids, start
    end = seat.prompt_end + max_tokens
    seat.limit, seat.cut = min(end, capacity), end > capacity
    self._in_flight[seat.request.id] = seat
    if seat.prompt_end >= seat.limit:
      return False
    (self._queue if seat.slot is None else self._extended).append(seat)
    seat.held = False
    return True

  def seat_next(self, rows: int) -> list[list[Seat]]:
    """Gives out free slots, to what fits into so many scratch rows.

    Extensions come first, each with its own row. Of the queue, neighbours with
    the same prompt share a row, and wait until there are slots for all; of
    those that are more than the slots that are not held, the first go alone.
    Who is not patient takes the slots that there are.
    """
    entries = []
    while self._extended and len(entries) < rows:
      entries.append([self._extended.popleft()])
    free = [slot for slot, seat in enumerate(self._slots) if seat is None]
    while self._queue and free and len(entries) < rows:
      run = self._run()
      if len(run) > len(free):
        if self._patient:
          break
        run = run[: len(free)]
      for seat in run:
        self._queue.popleft()
        seat.slot = free.pop(0)
        self._slots[seat.slot] = seat
      entries.append(run)
    return entries

  def asks(self) -> dict[str, np.ndarray]:
    """What the seated requests ask for, by slot.

    Returns:
      `loop.Slots` by field, but for the keys: their ids as two u32[B] words,
      `high` and `low`. Zeros, and no stop ids, where nobody sits.
    """
    fields = {
      'high': np.uint32,
      'low': np.uint32,
      'limit': np.int32,
      'temperature': np.float32,
      'top_k': np.int32,
      'top_p': np.float32,
      'min_p': np.float32,
    }
    size = len(self._slots)
    fields = {k: np.zeros(size, kind) for k, kind in fields.items()}
    stop_ids = np.full((size, STOP_IDS), -1, np.int32)
    for seat in self.seated:
      request = seat.request
      asks = {
        **vars(request.sampling),
        'limit': seat.limit,
        'high': request.numbers >> 32,
        'low': request.numbers & 0xFFFFFFFF,
      }
      for name, value in asks.items():
        fields[name][seat.slot] = value
      stop_ids[seat.slot, : len(request.stop_ids)] = request.stop_ids
    return {**fields, 'stop_ids': stop_ids}

  def _run(self) -> list[Seat]:
    """The queue's head and what follows it with the same prompt.

    At most as many as will have slots once all that runs has stopped: nobody
    may wait for a slot that is held, since it can be held until they answer.
    """
    most = len(self._slots) - sum(seat.held for seat in self.seated)
    first, run = self._queue[0], []
    for seat in self._queue:
      same = np.array_equal(seat.feed, first.feed)
      if not same or len(run) == most:
        break
      run.append(seat)
    return run

  def stopped(self, active: np.ndarray) -> list[Seat]:
    """Those whose slots, bool[B], are not active any more, by submission."""
    done = (s for s in self.seated if not s.held and not active[s.slot])
    return sorted(done, key=lambda seat: seat.order)

  def finish(self, seat: Seat) -> None:
    """The turn has ended: the slot is held, or free."""
    seat.held = True
    if not seat.request.hold:
      self.leave(seat)

  def knows(self, id: int) -> bool:
    """Whether a request is in flight."""
    return id in self._in_flight

  def cancel(self, id: int) -> int | None:
    """Forgets a request that may run; returns the slot that it sat in."""
    seat = self._in_flight.get(id)
    require(seat is not None, id, 'be in flight to be cancelled', None)
    for queue in (self._queue, self._extended):
      for at in [i for i, other in enumerate(queue) if other is seat]:
        del queue[at]
    self.leave(seat)
    return seat.slot

  def leave(self, seat: Seat) -> None:
    """Forgets a request; its slot is free."""
    del self._in_flight[seat.request.id]
    if seat.slot is not None:
      self._slots[seat.slot] = None


def require(ok: bool, id: int, must: str, got, then: str = '') -> None:
  if not ok:
    then = then and f'; {then}'
    raise ValueError(f'request {id} must {must}: got {got!r}{then}')


def bucket(tokens: int) -> int:
  """The capacity for so many tokens: 32, 48, 64, 96, 128, 192, ..."""
  size = 32
  while size < tokens:
    size += size // 2
    if size < tokens:
      size = size // 3 * 4
  return size
