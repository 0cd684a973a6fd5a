"""Who sits in which slot, who waits, and whose turn comes next. Numpy only.

A request is `begun`: its turn's tokens are known. It waits (new ones in the
queue, extensions ahead of them), is `seated` (its tokens go into a slot), and
`finished` (it has stopped). A request that is held keeps its slot until it is
begun again or released.

Order depends on submission and token counts alone.
"""

import collections
import dataclasses
from collections.abc import Iterator

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


class Schedule:
  """The requests of an engine with so many slots."""

  def __init__(self, slots: int):
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

  def new(self, request: requests.Request) -> Seat:
    """Checks a request and opens a seat for it.

    Raises:
      ValueError: see `Engine.submit`.
    """
    ids = np.asarray(request.ids, np.int32)
    for ok, must, got in (
        (request.id not in self._in_flight, 'not be in flight', request.id),
        (0 <= request.id < 2**63, 'have an id in [0, 2**63)', request.id),
        (ids.ndim == 1 and ids.size, 'have a prompt of some tokens', ids.shape),
        (len(request.stop_ids) <= STOP_IDS, f'have at most {STOP_IDS} stop ids',
         request.stop_ids),
    ):  # fmt: skip
      require(ok, request.id, must, got)
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
      self, seat: Seat, ids: np.ndarray, start: int, max_tokens: int,
      capacity: int,
  ) -> bool:  # fmt: skip
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
    the same prompt share a row, and wait until there are slots for all.
    """
    entries = []
    while self._extended and len(entries) < rows:
      entries.append([self._extended.popleft()])
    free = [slot for slot, seat in enumerate(self._slots) if seat is None]
    while self._queue and len(entries) < rows:
      run = self._run()
      if len(run) > len(free):
        break
      for seat in run:
        self._queue.popleft()
        seat.slot = free.pop(0)
        self._slots[seat.slot] = seat
      entries.append(run)
    return entries

  def _run(self) -> list[Seat]:
    """The queue's head and what follows it with the same prompt."""
    first, run = self._queue[0], []
    for seat in self._queue:
      same = np.array_equal(seat.feed, first.feed)
      if not same or len(run) == len(self._slots):
        break
      run.append(seat)
    return run

  def finish(self, seat: Seat) -> None:
    """The turn has ended: the slot is held, or free."""
    seat.held = True
    if not seat.request.hold:
      self.leave(seat)

  def leave(self, seat: Seat) -> None:
    """Forgets a request; its slot is free."""
    del self._in_flight[seat.request.id]
    if seat.slot is not None:
      self._slots[seat.slot] = None


def require(ok: bool, id: int, must: str, got) -> None:
  if not ok:
    raise ValueError(f'request {id} must {must}: got {got!r}')


def bucket(tokens: int) -> int:
  """The capacity for so many tokens: 32, 48, 64, 96, 128, 192, ..."""
  size = 32
  while size < tokens:
    size += size // 2
    if size < tokens:
      size = size // 3 * 4
  return size
