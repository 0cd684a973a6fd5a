"""The queue and the slots of an engine: which request gets a slot next.

A request's turn begins when its tokens are known. A new request then waits in
the queue for a slot. Its tokens are fed in chunks, then it is active until it
stops. A held request keeps its slot until its next turn or its release.
`Shapes` gives the calls of prefill, and the arrays that they take.

The slots are split over devices in equal ranges. Requests with the same prompt
are placed in one range where there is space, because their prompt is computed
in one slot and copied to the others, which must not cross devices.

With a prefix cache, a slot keeps the keys of its prompt until another request
takes it, the least recently used one first. A prompt that begins with whole
chunks of that of a slot on its device, also of one that is still being fed,
copies them, and is fed from there on: the same chunks at the same positions.

Order depends on submission and token counts alone. Numpy only. Slots and rows
are split over devices in equal ranges; an array names them by their index in
the range.

Axes: B slots, R rows, C tokens of a prefill chunk.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from posttrain.decode import requests

STOP_IDS = 8  # the most stop ids of a request
# A call of so many tokens is cheap: a program of fewer rows costs more to
# compile than it saves.
_FEW_TOKENS = 128
# Calls that read longer prefixes have few rows, which bounds their memory.
_LONG_PREFIX = 1024


@dataclasses.dataclass(eq=False)
class RequestState:
  """A request in flight, with its slot and its turn."""

  request: requests.Request
  order: int  # of submission
  slot: int = -1  # -1 = none
  # The turn: tokens to feed, position of the first of them, the position at
  # which drawing ends, and whether the cache rather than the request sets it.
  feed: Any = None  # i32[n]
  start: int = 0
  limit: int = 0
  cut: bool = False
  cached: int = 0  # tokens to feed that were found in the prefix cache
  # The first tokens of the prompt that are stored once for a group, 0 = none;
  # and which prompt of the store they are, counted from the first one on the
  # device.
  base: int = 0
  prompt_index: int = 0
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
    return self.slot, slice(self.prompt_end, int(length) + 1)


@dataclasses.dataclass(eq=False)
class Group:
  """Requests with the same tokens to feed, in slots of one device.

  The tokens are fed to the slot of the first request.
  """

  entries: list[RequestState]
  device: int
  fed: int = 0  # tokens in the cache
  # The first tokens that are not fed but copied from a slot, once it has them.
  copied: int = 0
  source: int = -1

  @property
  def waits(self) -> bool:
    """Whether tokens are to be copied first."""
    return self.fed < self.copied

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


class Store(NamedTuple):
  """Prompts that are stored once for neighbours with the same tokens."""

  count: int  # their number
  tokens: int  # of a prompt, at most
  size: int  # neighbours, at most

  @classmethod
  def make(
    cls, slots: int, ways: int, tokens: int, size: int
  ) -> 'Store | None':
    """Returns that of an engine; None without tokens.

    It has twice as many prompts as there are whole groups: while the last slots
    of a group decode, others take the free ones.
    """
    size = min(size, slots // ways)
    return (
      cls(2 * -(-slots // ways // size) * ways, tokens, size)
      if tokens
      else None
    )


class Schedule:
  """The requests of an engine, and their slots."""

  def __init__(
    self,
    slots: int,
    ways: int = 1,
    chunk: int | None = None,
    store: Store | None = None,
  ):
    """Starts without requests.

    Args:
      slots: number of the engine's slots.
      ways: number of devices that the slots are split over.
      chunk: tokens per prefill chunk; None = there is no prefix cache.
      store: of prompts; None = they are in the slots.
    """
    assert slots % ways == 0, f'{slots} slots over {ways} devices'
    # Whether neighbours with the same prompt wait until there are slots for all
    # of them, so that their prompt is prefilled once.
    self.share_prefill, self._ways = True, ways
    self._slots: list[RequestState | None] = [None] * slots
    self._groups: list[Group] = []  # that are being fed, in order
    self.in_flight: dict[int, RequestState] = {}  # held ones included
    self._queue: collections.deque[RequestState] = collections.deque()
    self._extended: collections.deque[RequestState] = collections.deque()
    self._orders = itertools.count()
    self._chunk, self._store = chunk, store
    # Slot -> the whole chunks of its prompt, the least recently used one first.
    self._prefixes: dict[int, np.ndarray] = {}

  @property
  def in_slots(self) -> Iterator[RequestState]:
    """The requests that have a slot, in the order of slots."""
    return (entry for entry in self._slots if entry is not None)

  @property
  def num_waiting(self) -> int:
    """The number of requests that are not active yet, and not held."""
    return len(self._queue) + len(self._extended) + self.num_fed

  @property
  def num_fed(self) -> int:
    """The number of slots whose prompt, or turn, is being fed."""
    return sum(len(group.entries) for group in self._groups)

  @property
  def num_active(self) -> int:
    """The number of slots that decode."""
    return sum(entry.active for entry in self.in_slots)

  @property
  def lacking(self) -> int:
    """How many more slots must become free for the next requests; 0 = none."""
    if not self._queue:
      return 0
    slots = len(self._same_prompt()) if self.share_prefill else 1
    return max(slots - sum(map(len, self._free_slots())), 0)

  def check(self, request: requests.Request) -> None:
    """Checks a request for `Engine.submit`; raises ValueError."""
    for ok, must, got in (
      (request.id not in self.in_flight, 'not be in flight', request.id),
      (0 <= request.id < 2**63, 'have an id in [0, 2**63)', request.id),
      (0 <= request.draw_key < 2**63, 'have a key in [0, 2**63)', request.key),
      (np.size(request.ids), 'have a prompt of some tokens', request.ids),
      (
        len(request.stop_ids) <= STOP_IDS,
        f'have at most {STOP_IDS} stop ids',
        request.stop_ids,
      ),
      (request.max_tokens > 0, 'have max_tokens >= 1', request.max_tokens),
    ):
      requests.require(ok, f'request {request.id}', must, got)

  def new(self, request: requests.Request) -> RequestState:
    """Returns the state of a request that has been checked."""
    ids = np.asarray(request.ids, np.int32)
    return RequestState(
      dataclasses.replace(request, ids=ids), next(self._orders)
    )

  def held(self, id: int) -> RequestState:
    """Returns a held request; raises ValueError if it is not held."""
    held = id in self.in_flight and self.in_flight[id].held
    requests.require(held, f'request {id}', 'be held', held)
    return self.in_flight[id]

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
    entry.feed, entry.start, entry.cached = ids, start, 0
    end = entry.prompt_end + max_tokens
    if self._store is not None:
      capacity -= self._store.tokens  # that of a slot
      if entry.slot < 0 and (entry.request.hold or end > capacity):
        entry.base = min(len(ids), self._store.tokens)
      capacity += entry.base
    entry.limit, entry.cut = min(end, capacity), end > capacity
    self.in_flight[entry.request.id] = entry
    if entry.prompt_end >= entry.limit:
      return False
    (self._queue if entry.slot < 0 else self._extended).append(entry)
    entry.held = False
    return True

  def assign_slots(self) -> None:
    """Gives free slots to the queue, in order.

    Neighbours with the same prompt wait until there are slots for all; if they
    are more than the slots that are not held, the first of them go alone.
    Without `share_prefill` they take the slots that are free. They are one
    group per device that they are placed on: one, if it has slots for all. A
    device has a place in the store for each group that needs one.
    """
    while self._extended:
      entry = self._extended.popleft()
      self._groups.append(Group([entry], self._device(entry.slot)))
    all_free, places = self._free_slots(), self._free_places()
    while self._queue and any(all_free):
      entries, free = self._same_prompt(), all_free
      if entries[0].base:
        free = [x if y else [] for x, y in zip(free, places, strict=True)]
      space = sum(map(len, free))
      if len(entries) > space:
        if self.share_prefill or not space:
          break
        entries = entries[:space]
      for _ in entries:
        self._queue.popleft()
      self._place(entries, free, places)

  def _free_places(self) -> list[list[int]]:
    """Returns the free places in the store on each device."""
    each = 0 if self._store is None else self._store.count // self._ways
    used = {
      (self._device(x.slot), x.prompt_index) for x in self.in_slots if x.base
    }
    return [
      [i for i in range(each) if (device, i) not in used]
      for device in range(self._ways)
    ]

  def _free_slots(self) -> list[list[int]]:
    """Returns the free slots of each device, in the order of their use."""
    free: list[list[int]] = [[] for _ in range(self._ways)]
    kept = {group.source for group in self._groups if group.waits}
    others = (x for x in range(len(self._slots)) if x not in self._prefixes)
    for slot in (*others, *self._prefixes):
      if self._slots[slot] is None and slot not in kept:
        free[self._device(slot)].append(slot)
    return free

  def _device(self, slot: int) -> int:
    return slot * self._ways // len(self._slots)

  def _place(
    self,
    entries: list[RequestState],
    free: list[list[int]],
    places: list[list[int]],
  ) -> None:
    """Gives slots to requests with the same prompt, on as few devices as can.

    Args:
      entries: the requests.
      free: the free slots of each device; slots given away are removed.
      places: likewise the free places in the store.
    """
    while entries:
      # If the device with the most free slots lacks space, all others do.
      device = max(range(self._ways), key=lambda i: len(free[i]))
      count = min(len(entries), len(free[device]))
      group, entries = Group(entries[:count], device), entries[count:]
      slots = self._take(group, free[device])
      index = places[device].pop(0) if group.head.base else 0
      for entry, slot in zip(group.entries, slots, strict=True):
        entry.slot, self._slots[slot], entry.prompt_index = slot, entry, index
      self._groups.append(group)

  def _take(self, group: Group, free: list[int]) -> list[int]:
    """Removes slots for a group from the free ones; sets what it copies."""
    count, feed = len(group.entries), group.head.feed
    if self._chunk is None:
      slots, free[:] = free[:count], free[count:]
      return slots
    # The last token is fed: the next one is drawn from its logits.
    whole, most = (
      x // self._chunk * self._chunk for x in (len(feed), len(feed) - 1)
    )
    source, size = -1, 0
    for slot, ids in self._prefixes.items():
      while self._device(slot) == group.device and size < min(len(ids), most):
        end = size + self._chunk
        if not np.array_equal(ids[:end], feed[:end]):
          break
        source, size = slot, end
    if source in free:
      # Other tokens that follow in the slot are kept, if there are other slots.
      ids = self._prefixes[source]
      free.remove(source)
      at = 0 if np.array_equal(ids, feed[: len(ids)]) else len(free)
      free.insert(at, source)
    slots = sorted(free[:count], key=lambda slot: slot != source)
    # The source may go to no other group before it is copied.
    free[:] = [x for x in free[count:] if x != source]
    if size:
      self._prefixes[source] = self._prefixes.pop(source)
    for slot in slots:
      self._prefixes.pop(slot, None)
    if whole:
      self._prefixes[slots[0]] = feed[:whole]
    group.source, group.copied = source, size
    if source == slots[0]:
      self._found(group)
    return slots

  def copy(self) -> list[tuple[int, int, int]]:
    """Counts tokens that can be copied as fed.

    Returns:
      (slot to fill, slot to copy from, tokens), for `Shapes.copies`.
    """
    feeding = {x.head.slot: x.position for x in self._groups}
    ready = [
      x
      for x in self._groups
      if x.waits and feeding.get(x.source, x.copied) >= x.copied
    ]
    for group in ready:
      if group.source not in self._prefixes:
        group.copied = 0  # it was cancelled
      self._found(group)
    return [(x.head.slot, x.source, x.copied) for x in ready if x.copied]

  def _found(self, group: Group) -> None:
    """Counts the copied tokens of a group as fed."""
    group.fed = group.copied
    for entry in group.entries:
      entry.cached = group.copied

  def forget(self) -> None:
    """Drops the prefix cache: the keys are those of other weights."""
    self._prefixes = {}

  def next_rows(self, most: int) -> list[list[Group]]:
    """Returns the groups to feed the next chunk, of each device.

    Args:
      most: the largest number of groups per device.
    """
    rows: list[list[Group]] = [[] for _ in range(self._ways)]
    # Partly fed groups come first, then groups in the order of their slots.
    for group in sorted(self._groups, key=lambda group: not group.fed):
      if not group.waits:
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
    # A free slot has the plain law: one program draws for all slots, and a law
    # that is truncated costs all of them.
    free = RequestState(requests.Request(0, np.zeros(0, np.int32), 0), -1)
    entries = [entry or free for entry in self._slots]
    keys = [entry.request.draw_key for entry in entries]
    laws = [entry.request.sampling for entry in entries]
    stop_ids = np.full((len(entries), STOP_IDS), -1, np.int32)
    for row, entry in zip(stop_ids, entries, strict=True):
      row[: len(entry.request.stop_ids)] = entry.request.stop_ids
    return {
      'high': np.array([key >> 32 for key in keys], np.uint32),
      'low': np.array([key & 0xFFFFFFFF for key in keys], np.uint32),
      'limit': np.array([entry.limit for entry in entries], np.int32),
      'stop_ids': stop_ids,
      'temperature': np.array([x.temperature for x in laws], np.float32),
      'top_k': np.array([x.top_k for x in laws], np.int32),
      'top_p': np.array([x.top_p for x in laws], np.float32),
      'min_p': np.array([x.min_p for x in laws], np.float32),
    }

  def prompts(self) -> tuple[Any, Any, Any] | None:
    """Returns the slots that decode after each stored prompt.

    Returns:
      (members i32[P, G], length i32[P], base i32[B]), those of
      `attention.Shared`, for the first ones of each device; None if no slot
      does.
    """
    if self._store is None:
      return None
    slots, size = len(self._slots) // self._ways, self._store.size
    each = self._store.count // self._ways
    members = np.full((self._ways, each, size), slots, np.int32)
    length, count = np.zeros((2, self._ways, each), np.int32)
    base = np.zeros(len(self._slots), np.int32)
    for entry in self.in_slots:
      if entry.active and entry.base:
        at = self._device(entry.slot), entry.prompt_index
        members[*at, count[at]] = entry.slot % slots
        count[at] += 1
        length[at] = base[entry.slot] = entry.base
    if not count.any():
      return None
    # The first half of the prompts, mostly; so few shapes compile.
    most = each if count[:, each // 2 :].any() else each // 2
    members, length = members[:, :most], length[:, :most]
    return members.reshape(-1, size), length.reshape(-1), base

  def _same_prompt(self) -> list[RequestState]:
    """Returns the queue's head and its neighbours with the same prompt.

    At most as many as there are slots once all running requests have stopped: a
    request must not wait for a held slot, which may be held until it completes.
    """
    most = len(self._slots) - sum(entry.held for entry in self.in_slots)
    head = self._queue[0]
    if head.base and self._store is not None:
      most = min(most, self._store.size)
    group = itertools.takewhile(
      lambda entry: (
        entry.base == head.base and np.array_equal(entry.feed, head.feed)
      ),
      self._queue,
    )
    return list(itertools.islice(group, most))

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

  def cancel(self, id: int) -> int:
    """Removes a request that may run; returns its slot, -1 = none."""
    requests.require(id in self.in_flight, f'request {id}', 'be in flight', id)
    entry = self.in_flight[id]
    for queue in (self._queue, self._extended):
      if entry in queue:
        queue.remove(entry)
    self._leave_group(entry)
    self.remove(entry)
    return entry.slot

  def _leave_group(self, entry: RequestState) -> None:
    """Removes a request from its group, whose tokens stay in the cache."""
    for group in self._groups:
      if entry in group.entries:
        others = [other for other in group.entries if other is not entry]
        if entry is group.head and others:
          # The next request goes on with the slot that the tokens are in.
          a, b = entry.slot, others[0].slot
          entry.slot, others[0].slot = b, a
          self._slots[a], self._slots[b] = others[0], entry
        group.entries = others
        if not others:
          self._prefixes.pop(entry.slot, None)
    self._groups = [group for group in self._groups if group.entries]

  def remove(self, entry: RequestState) -> None:
    """Removes a request; its slot is free."""
    del self.in_flight[entry.request.id]
    if entry.slot >= 0:
      self._slots[entry.slot] = None


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


Rows = list[list[Group]]  # the groups of each device, a row for each


@dataclasses.dataclass(frozen=True)
class Call:
  """A call of `loop.prefill`."""

  rows: Rows
  count: int  # rows per device, those without a group included
  length: int  # tokens of a slot that are read


@dataclasses.dataclass(frozen=True)
class Shapes:
  """The sizes of prefill, which are fixed.

  Rows of a call have one of two numbers, so that few waiting requests do not
  pay for many; the tokens that they attend to have few lengths.
  """

  slots: int
  rows: int  # prompts prefilled at a time
  width: int  # tokens of a prompt per prefill chunk
  ways: int = 1  # devices that slots and rows are split over
  stores: bool = False  # whether prompts are stored once

  @property
  def device_slots(self) -> int:
    """The number of slots per device."""
    return self.slots // self.ways

  @property
  def row_counts(self) -> tuple[int, ...]:
    """The numbers of rows per device, in ascending order."""
    most = -(-self.rows // self.ways)
    few = max(most // 8, 1) if most * self.width > _FEW_TOKENS else most
    return tuple(sorted({few, most}))

  def calls(self, capacity: int) -> list[tuple[int, int]]:
    """Returns (rows per device, tokens of a slot read) of all prefill calls.

    Args:
      capacity: tokens of a slot.
    """
    few, lengths = self.row_counts[0], [0]
    while lengths[-1] < capacity:
      lengths.append(prefix_length(lengths[-1] + 1, capacity))
    return [
      (count, length)
      for length in lengths[1:]
      for count in self.row_counts
      if count == few or length <= _LONG_PREFIX
    ]

  def next_call(self, waiting: Schedule, capacity: int) -> Call | None:
    """Returns the next call; None if no group is being fed."""
    few, most = self.row_counts[0], self.row_counts[-1]
    rows = waiting.next_rows(most)
    num = max(map(len, rows))
    if not num:
      return None
    # Up to half of the rows, several calls of few cost no more than one of
    # most.
    for count in (few,) if 2 * num <= most else (most, few):
      rows = [groups[:count] for groups in rows]
      ends = [
        group.position + min(group.left, self.width)
        for groups in rows
        for group in groups
      ]
      length = prefix_length(max(ends), capacity)
      if length <= _LONG_PREFIX:
        break
    return Call(rows, count, length)

  def chunk(self, call: Call) -> tuple[np.ndarray, ...]:
    """Returns the next tokens of each group of a call, and their places.

    Returns:
      (tokens i32[R, C], start i32[R], count i32[R], slot i32[R]): the tokens,
      right-padded; the first one's position; their number; and their slot. If
      prompts are stored once also (prompt_index i32[R], base i32[R]).
    """
    size = call.count * len(call.rows)
    tokens = np.zeros((size, self.width), np.int32)
    start, number, slot, index, base = np.zeros((5, size), np.int32)
    for device, groups in enumerate(call.rows):
      for row, group in enumerate(groups, device * call.count):
        new = group.head.feed[group.fed : group.fed + self.width]
        tokens[row, : len(new)] = new
        start[row], number[row] = group.position, len(new)
        slot[row] = group.head.slot % self.device_slots
        index[row], base[row] = group.head.prompt_index, group.head.base
    prompt = (index, base) if self.stores else ()
    return tokens, start, number, slot, *prompt

  def copies(
    self, copies: Sequence[tuple[int, int, int]]
  ) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the arguments of `loop.share`.

    Args:
      copies: (slot to fill, slot to copy from, tokens), on one device each.

    Returns:
      (target i32[B], source i32[B], length): per device the slots to fill, then
      their number for none; the slots to copy from; and the most tokens.
    """
    slots = self.device_slots
    target, source = np.full((2, self.ways, slots), slots, np.int32)
    for device in range(self.ways):
      own = [x for x in copies if x[0] // slots == device]
      for i, (to, origin, _) in enumerate(own):
        target[device, i], source[device, i] = to % slots, origin % slots
    length = max((tokens for _, _, tokens in copies), default=0)
    return target.reshape(-1), source.reshape(-1), length

  def drawing(
    self, rows: Rows, finished: Rows
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows whose logits slots draw their next token from.

    Args:
      rows: the groups of each device, a row for each.
      finished: those of them whose prompt is in the cache.

    Returns:
      (row i32[B], length i32[B]): the row, -1 = none; and the tokens in the
      slot's cache.
    """
    row = np.full(self.slots, -1, np.int32)
    length = np.zeros_like(row)
    for groups, done in zip(rows, finished, strict=True):
      for i, group in enumerate(groups):
        for entry in group.entries if group in done else ():
          row[entry.slot], length[entry.slot] = i, entry.prompt_end
    return row, length
