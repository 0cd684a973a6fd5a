"""The queue and the slots of an engine: which request gets a slot next.

A request's turn begins when its tokens are known. A new request then waits in
the queue for a slot. Its tokens are fed in chunks, then it is active until it
stops. A held request
keeps its slot until its next turn or its release.

The slots are split over devices in equal ranges. Requests with the same prompt
are placed in one range where there is space, because their prompt is computed
in one slot and copied to the others, which must not cross devices.

Order depends on submission and token counts alone. Numpy only.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from posttrain.decode import requests

STOP_IDS = 8  # the most stop ids of a request
_OPTIONS = {
  'high': np.uint32,
  'low': np.uint32,
  'limit': np.int32,
  'temperature': np.float32,
  'top_k': np.int32,
  'top_p': np.float32,
  'min_p': np.float32,
}


@dataclasses.dataclass
class RequestState:
  """A request in flight, with its slot and its turn."""

  request: requests.Request
  order: int  # of submission
  slot: int | None = None
  # The turn: tokens to feed, position of the first of them, the position at
  # which drawing ends, and whether the cache rather than the request sets it.
  feed: np.ndarray = dataclasses.field(
    default_factory=lambda: np.zeros(0, np.int32)
  )
  start: int = 0
  limit: int = 0
  cut: bool = False
  # After the turn: tokens in the cache, and the last drawn one, which is not.
  length: int = 0
  token: int = -1
  held: bool = False  # stopped, and keeps its slot
  active: bool = False  # its tokens are in the cache, and it has not stopped

  @property
  def prompt_end(self) -> int:
    """The position after the last token to feed."""
    return self.start + len(self.feed)

  @property
  def stop_reason(self) -> str:
    """The turn's stop reason, once its last token is known."""
    if self.token in self.request.stop_ids:
      return 'eos'
    return 'overflow' if self.cut else 'max_tokens'

  def turn(self, length: int) -> tuple[int, slice]:
    """Returns the index of the turn's drawn tokens in an array [B, S].

    Args:
      length: tokens in the cache.
    """
    assert self.slot is not None
    return self.slot, slice(self.prompt_end, int(length) + 1)


@dataclasses.dataclass(eq=False)
class Group:
  """Requests with the same tokens to feed, in slots of one device.

  The tokens are fed to the slot of the first request.
  """

  entries: list[RequestState]
  device: int
  fed: int = 0  # tokens in the cache

  @property
  def head(self) -> RequestState:
    """The request whose slot the tokens are fed to."""
    return self.entries[0]

  @property
  def left(self) -> int:
    """The number of tokens that are not in the cache."""
    return len(self.head.feed) - self.fed

  @property
  def position(self) -> int:
    """The position of the next token to feed."""
    return self.head.start + self.fed


class Schedule:
  """The requests of an engine, and their slots."""

  def __init__(self, slots: int, share_prefill: bool = True, ways: int = 1):
    """Starts without requests.

    Args:
      slots: number of the engine's slots.
      share_prefill: as in `Engine`.
      ways: number of devices that the slots are split over.
    """
    assert slots % ways == 0, f'{slots} slots over {ways} devices'
    self._share_prefill, self._ways = share_prefill, ways
    self._slots: list[RequestState | None] = [None] * slots
    self._groups: list[Group] = []  # that are being fed, in order
    self._in_flight: dict[int, RequestState] = {}
    self._queue: collections.deque[RequestState] = collections.deque()
    self._extended: collections.deque[RequestState] = collections.deque()
    self._submitted = 0
    # See `slot_options`; (order, limit) of the request that each slot has them
    # of.
    self._options: dict[str, np.ndarray] = {
      name: np.zeros(slots, dtype) for name, dtype in _OPTIONS.items()
    }
    self._options['stop_ids'] = np.full((slots, STOP_IDS), -1, np.int32)
    self._written: list[tuple[int, int]] = [(-1, -1)] * slots
    for slot in range(slots):
      self._clear_options(slot)

  def __len__(self) -> int:
    """Returns the number of requests in flight, held ones included."""
    return len(self._in_flight)

  @property
  def in_slots(self) -> Iterator[RequestState]:
    """The requests that have a slot, in the order of slots."""
    return (entry for entry in self._slots if entry is not None)

  @property
  def num_waiting(self) -> int:
    """The number of requests that are not active yet, and not held."""
    feeding = sum(len(group.entries) for group in self._groups)
    return len(self._queue) + len(self._extended) + feeding

  @property
  def num_active(self) -> int:
    """The number of slots that decode."""
    return sum(entry.active for entry in self.in_slots)

  @property
  def running(self) -> bool:
    """Whether a request in flight has not stopped."""
    return any(not entry.held for entry in self._in_flight.values())

  @property
  def needs_chunks(self) -> bool:
    """Whether a request waits for prefill, or may be extended."""
    return bool(self.num_waiting) or any(x.request.hold for x in self.in_slots)

  @property
  def lacking(self) -> int:
    """How many more slots must become free for the next requests; 0 = none."""
    if not self._queue:
      return 0
    wanted = len(self._same_prompt()) if self._share_prefill else 1
    return max(wanted - sum(map(len, self._free_slots())), 0)

  def check_some_run(self) -> None:
    """Checks that some slot decodes, so that polling comes to an end.

    Raises:
      ValueError: all slots are held.
    """
    if all(entry.held for entry in self.in_slots):
      slots = len(self._slots)
      raise ValueError(
        f'{self.num_waiting} requests must find free slots: all {slots} are '
        'held; extend or release held requests before polling, or raise the '
        'number of slots'
      )

  def check(self, request: requests.Request) -> None:
    """Checks a request for `Engine.submit`; raises ValueError."""
    ids = np.asarray(request.ids, np.int32)
    for ok, must, got in (
      (request.id not in self._in_flight, 'not be in flight', request.id),
      (0 <= request.id < 2**63, 'have an id in [0, 2**63)', request.id),
      (0 <= request.draw_key < 2**63, 'have a key in [0, 2**63)', request.key),
      (ids.ndim == 1 and ids.size, 'have a prompt of some tokens', ids.shape),
      (
        len(request.stop_ids) <= STOP_IDS,
        f'have at most {STOP_IDS} stop ids',
        request.stop_ids,
      ),
      (request.max_tokens > 0, 'have max_tokens >= 1', request.max_tokens),
    ):
      require(bool(ok), request.id, must, got)

  def check_all(
    self, batch: Sequence[requests.Request], unread: set[int]
  ) -> None:
    """Checks requests for `Engine.generate`; raises ValueError.

    Args:
      batch: the requests.
      unread: ids of completions that have not been polled.
    """
    for request in batch:
      require(
        not request.hold,
        request.id,
        'not have hold set',
        request.hold,
        'submit and poll it',
      )
      self.check(request)
    for id, times in collections.Counter(r.id for r in batch).items():
      require(times == 1, id, 'occur once', times)
    if others := self._in_flight.keys() | unread:
      raise ValueError(
        f'generate must find no request in flight: got {sorted(others)[:8]}, '
        'expected none; poll and release them first'
      )

  def new(self, request: requests.Request) -> RequestState:
    """Returns the state of a request that has been checked."""
    ids = np.asarray(request.ids, np.int32)
    entry = RequestState(dataclasses.replace(request, ids=ids), self._submitted)
    self._submitted += 1
    return entry

  def held(self, id: int, action: str) -> RequestState:
    """Returns a held request.

    Args:
      id: the request's id.
      action: what is done to it, for the error: 'extended', 'released'.

    Raises:
      ValueError: the request is not held.
    """
    entry = self._in_flight.get(id)
    ok = entry is not None and entry.held
    require(ok, id, f'be held to be {action}', 'one that is not')
    assert entry is not None
    return entry

  def begin(
    self,
    entry: RequestState,
    ids: np.ndarray,
    start: int,
    max_tokens: int,
    capacity: int,
  ) -> bool:
    """Starts a turn; returns False if the cache has no space for a token of it.

    Args:
      entry: the request.
      ids: i32[n], tokens to feed.
      start: position of the first of them.
      max_tokens: the most drawn tokens.
      capacity: tokens of a slot.
    """
    entry.feed, entry.start = ids, start
    end = entry.prompt_end + max_tokens
    entry.limit, entry.cut = min(end, capacity), end > capacity
    self._in_flight[entry.request.id] = entry
    if entry.prompt_end >= entry.limit:
      return False
    (self._queue if entry.slot is None else self._extended).append(entry)
    entry.held = False
    return True

  def assign_slots(self) -> None:
    """Gives free slots to the queue, in order.

    Neighbours with the same prompt wait until there are slots for all; if they
    are more than the slots that are not held, the first of them go alone.
    Without `share_prefill` they take the slots that are free. They are one
    group per device that they are placed on: one, if it has slots for all.
    """
    while self._extended:
      entry = self._extended.popleft()
      assert entry.slot is not None
      self._groups.append(Group([entry], self._device(entry.slot)))
    free = self._free_slots()
    while self._queue and any(free):
      entries, space = self._same_prompt(), sum(map(len, free))
      if len(entries) > space:
        if self._share_prefill:
          break
        entries = entries[:space]
      for _ in entries:
        self._queue.popleft()
      self._place(entries, free)

  def _free_slots(self) -> list[list[int]]:
    """Returns the free slots of each device."""
    free: list[list[int]] = [[] for _ in range(self._ways)]
    for slot, entry in enumerate(self._slots):
      if entry is None:
        free[self._device(slot)].append(slot)
    return free

  def _device(self, slot: int) -> int:
    return slot * self._ways // len(self._slots)

  def _place(self, entries: list[RequestState], free: list[list[int]]) -> None:
    """Gives slots to requests with the same prompt, on as few devices as can.

    Args:
      entries: the requests.
      free: the free slots of each device; slots given away are removed.
    """
    while entries:
      # If the device with the most free slots lacks space, all others do.
      device = max(range(self._ways), key=lambda i: len(free[i]))
      count = min(len(entries), len(free[device]))
      group, entries = entries[:count], entries[count:]
      for entry in group:
        entry.slot = free[device].pop(0)
        self._slots[entry.slot] = entry
      self._groups.append(Group(group, device))

  def next_rows(self, most: int) -> list[list[Group]]:
    """Returns the groups to feed the next chunk, of each device.

    Args:
      most: the largest number of groups per device.
    """
    rows: list[list[Group]] = [[] for _ in range(self._ways)]
    # Partly fed groups come first, then groups in the order of their slots.
    for group in sorted(self._groups, key=lambda group: not group.fed):
      rows[group.device].append(group)
    return [groups[:most] for groups in rows]

  def feed(self, group: Group, count: int) -> bool:
    """Counts tokens that have been fed; returns whether they were the last.

    The group's requests are active then.
    """
    group.fed += count
    if group.left:
      return False
    self._groups.remove(group)
    for entry in group.entries:
      entry.active = True
    return True

  def slot_options(self) -> dict[str, Any]:
    """Returns the options of the requests in the slots, as arrays.

    Returns:
      The fields of `loop.Slots`, except that the keys are two u32[B] words,
      `high` and `low`. Free slots draw from the plain law.
    """
    for slot, entry in enumerate(self._slots):
      if entry is None or self._written[slot] == (entry.order, entry.limit):
        continue
      self._written[slot] = entry.order, entry.limit
      self._write_options(slot, entry)
    return {name: values.copy() for name, values in self._options.items()}

  def _clear_options(self, slot: int) -> None:
    """Sets a free slot's law to the plain one: one that is truncated costs.

    It costs all slots, because one program draws for all of them.
    """
    self._written[slot] = -1, -1
    for name, value in vars(requests.Sampling()).items():
      self._options[name][slot] = value

  def _write_options(self, slot: int, entry: RequestState) -> None:
    request = entry.request
    values = {
      **vars(request.sampling),
      'limit': entry.limit,
      'high': request.draw_key >> 32,
      'low': request.draw_key & 0xFFFFFFFF,
    }
    for name, value in values.items():
      self._options[name][slot] = value
    self._options['stop_ids'][slot] = -1
    self._options['stop_ids'][slot, : len(request.stop_ids)] = request.stop_ids

  def _same_prompt(self) -> list[RequestState]:
    """Returns the queue's head and its neighbours with the same prompt.

    At most as many as there are slots once all running requests have stopped: a
    request must not wait for a held slot, which may be held until it completes.
    """
    most = len(self._slots) - sum(entry.held for entry in self.in_slots)
    first, group = self._queue[0], []
    for entry in self._queue:
      same = np.array_equal(entry.feed, first.feed)
      if not same or len(group) == most:
        break
      group.append(entry)
    return group

  def stopped(self, active: np.ndarray) -> list[RequestState]:
    """Returns the requests that have stopped, in the order of submission.

    Args:
      active: bool[B], the slots that still decode.
    """
    entries = (x for x in self.in_slots if x.active and not active[x.slot])
    return sorted(entries, key=lambda entry: entry.order)

  def finish(self, entry: RequestState) -> None:
    """Ends a turn: the slot is held, or free."""
    entry.held, entry.active = True, False
    if not entry.request.hold:
      self.remove(entry)

  def knows(self, id: int) -> bool:
    """Returns whether a request is in flight."""
    return id in self._in_flight

  def cancel(self, id: int) -> int | None:
    """Removes a request that may run; returns its slot, if it has one."""
    entry = self._in_flight.get(id)
    require(entry is not None, id, 'be in flight to be cancelled', None)
    assert entry is not None
    for queue in (self._queue, self._extended):
      for index in [i for i, other in enumerate(queue) if other is entry]:
        del queue[index]
    self._leave_group(entry)
    self.remove(entry)
    return entry.slot

  def _leave_group(self, entry: RequestState) -> None:
    """Removes a request from its group, whose tokens stay in the cache."""
    for group in self._groups:
      if any(other is entry for other in group.entries):
        others = [other for other in group.entries if other is not entry]
        if entry is group.head and others:
          # The next request goes on with the slot that the tokens are in.
          a, b = entry.slot, others[0].slot
          assert a is not None and b is not None
          entry.slot, others[0].slot = b, a
          self._slots[a], self._slots[b] = others[0], entry
        group.entries = others
    self._groups = [group for group in self._groups if group.entries]

  def remove(self, entry: RequestState) -> None:
    """Removes a request; its slot is free."""
    del self._in_flight[entry.request.id]
    if entry.slot is not None:
      self._slots[entry.slot] = None
      self._clear_options(entry.slot)


def require(ok: bool, id: int, must: str, got: Any, advice: str = '') -> None:
  """Raises ValueError with the request's id unless `ok`."""
  if not ok:
    advice = advice and f'; {advice}'
    raise ValueError(f'request {id} must {must}: got {got!r}{advice}')


def prefix_length(tokens: int, capacity: int) -> int:
  """Returns the tokens of a slot that a prefill reads: 128, 512, 2048, ...

  Args:
    tokens: the tokens that it must read.
    capacity: tokens of a slot; replaces lengths above half of it.
  """
  size = 128
  while size < tokens:
    size *= 4
  return capacity if 2 * size > capacity else size


def bucket(tokens: int) -> int:
  """Returns the capacity for a length: 32, 48, 64, 96, 128, 192, ..."""
  size = 32
  while size < tokens:
    size += size // 2
    if size < tokens:
      size = size // 3 * 4
  return size
