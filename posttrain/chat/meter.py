"""The budget of one rendering of a template: operations and memory, counted."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Budget(NamedTuple):
  """An amount that grows with the input."""

  constant: int
  each: int  # per message, or per character


OPERATIONS = Budget(2_000_000, 20_000)  # per message
CHAT = Budget(64_000_000, 50_000)  # of all renderings of one chat
SERVED = Budget(16_000_000, 25_000)  # of those of a chat that a server renders
SLICE = 4000  # operations between two looks at whether the caller has left
ONCE = 500_000  # that one operation may pay where the caller may leave
VALUE = Budget(2_000_000, 16)  # characters of one value; per character
TOTAL = Budget(16_000_000, 256)  # of all long values of a rendering
SMALL = 128  # characters of a made value that its operation has paid for
SHORT = 4096  # characters of a text whose reading its operation has paid for
PAID = 1024  # ... whose reading character by character it has paid for
BITS = 60  # of a computed integer; colliding hashes need 61
ELEMENT = 64  # the size of an element of a list, in characters

_VIEWS = type({}.keys()), type({}.values()), type({}.items())


class Limit(RuntimeError):
  """A template that needs too many operations or too large values."""


class Meter:
  """The budget of one rendering.

  Reading or making 32 characters costs one operation. The budget that depends
  on the input is added when the constant one is used up: most renderings need
  no count of their input.
  """

  def __init__(self, variables: Mapping[str, Any]):
    """Opens a budget.

    Args:
      variables: what the template renders; `messages` are some of them.
    """
    self._variables = variables
    self._grown = False
    self._granted = self._operations = OPERATIONS.constant
    self._pause = self._operations - SLICE
    self._value, self._total = VALUE.constant, TOTAL.constant
    self._sizes: dict[int, tuple[Any, int]] = {}

  def charge(self, operations: int) -> None:
    """Pays for operations.

    Raises:
      Limit: the budget is used up.
    """
    self._operations -= operations
    if self._operations < self._pause:
      check_caller(operations)
      if self._operations < 0:
        self._grow()
        if self._operations < 0:
          raise Limit('it needs too many operations for so many messages')
      self._pause = max(self._operations - SLICE, 0)

  @property
  def charged(self) -> int:
    """Returns the operations paid so far."""
    return self._granted - self._operations

  def spend(self, size: int) -> None:
    """Pays for the memory of a value; raises Limit as `charge`."""
    self._total -= size
    if self._total < 0:
      self._grow()
      if self._total < 0:
        raise Limit('its values are too large together')

  def fits(self, size: int, what: str) -> None:
    """Checks the size of a value, such as one that is not yet made.

    Args:
      size: its size in characters, or more.
      what: its name in the error.

    Raises:
      Limit: it is too large.
    """
    if size > self._value:
      self._grow()
      if size > self._value:
        raise Limit(f'{what} would have {number(size)} characters')

  def read(self, *values: Any) -> None:
    """Pays for reading values."""
    size = sum(map(self.size, values))
    if size > SMALL:
      self.charge(size >> 5)

  def compare(self, text: Any, other: Any, forward: bool = False) -> None:
    """Pays for comparing a text with another at each of its places.

    Args:
      text: the text that is searched.
      other: the text that is looked for, or the characters that are.
      forward: whether it is one of CPython's searches from the start, which
        take linear time in long texts.
    """
    if isinstance(text, str) and isinstance(other, str):
      size, wanted = len(text), len(other)
      steps = size * (wanted + 2)
      if forward:
        steps = _search_steps(size, wanted)
      if steps > SMALL:
        self.charge(steps >> 8)

  def made(self, value: Any, what: str = 'a value') -> Any:
    """Pays for a value that was made, and returns it."""
    if isinstance(value, str):
      self.pay(len(value), what)
      return value
    if isinstance(value, int):
      check_bits(value.bit_length())
      return value
    if isinstance(value, range):
      check_bits(max(value.start.bit_length(), value.stop.bit_length()))
      return value
    if hasattr(value, '__next__'):
      return self._counted(value)
    self.pay(self.size(value), what)
    return value

  def pay(self, size: int, what: str = 'a value') -> None:
    """Pays for a value that was made, given its size."""
    if size <= SMALL:
      return
    if size > SHORT:
      self.fits(size, what)
      self.charge(size >> 5)
    self.spend(size)

  def size(self, value: Any) -> int:
    """Returns about the length of a value's text, with all that nests in it."""
    if isinstance(value, str):
      return len(value)
    if isinstance(value, int):
      return value.bit_length() >> 2
    if isinstance(value, list | tuple | dict):
      return self._nested(value)
    if isinstance(value, range):
      return len(value) * ELEMENT
    if isinstance(value, _VIEWS):
      return self.size(dict(value.mapping))
    if hasattr(type(value), '__next__'):  # `loop` is read to its end
      return getattr(value, 'length', 0) * ELEMENT + 1
    return 1

  def _nested(self, value: list | tuple | dict) -> int:
    known = self._sizes.get(id(value))
    if known is not None and known[0] is value:
      return known[1]
    self.charge(len(value))
    size = ELEMENT * len(value)
    items: Iterable[Any] = value
    if isinstance(value, dict):
      size += sum(map(self.size, value))
      items = value.values()
    size += sum(map(self.size, items))
    if size > SMALL:  # keeps the value, so that its id stays its own
      self._sizes[id(value)] = value, size
    return size

  def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
      self.charge(16)
      self.spend(self.size(value) + ELEMENT)
      yield value

  def _grow(self) -> None:
    """Adds the budget that depends on the input, once."""
    if self._grown:
      return
    self._grown = True
    messages = self._variables.get('messages', ())
    more = OPERATIONS.each * len(messages)
    self._operations += more
    self._granted += more
    size = self.size(dict(self._variables))
    self._operations += size
    self._granted += size
    self._value += VALUE.each * size
    self._total += TOTAL.each * size


@dataclasses.dataclass
class _Chat:
  """What the renderings of one chat may still cost together."""

  operations: int
  cancelled: Callable[[], bool] | None


_CHAT: contextvars.ContextVar[_Chat | None] = contextvars.ContextVar(
  'chat', default=None
)
_METER: contextvars.ContextVar[Meter] = contextvars.ContextVar('meter')
current = _METER.get  # the meter of the rendering that runs


@contextlib.contextmanager
def metered(variables: Mapping[str, Any]) -> Iterator[None]:
  """Opens a budget for what runs within; compiling a template needs one too."""
  check_chat()
  chat = _CHAT.get()
  opened = Meter(variables)
  token = _METER.set(opened)
  try:
    yield
  finally:
    _METER.reset(token)
    if chat is not None:
      chat.operations -= opened.charged


@contextlib.contextmanager
def chat(
  messages: int, operations: Budget, cancelled: Callable[[], bool] | None = None
) -> Iterator[None]:
  """Opens a budget for all renderings of a chat.

  Args:
    messages: their number.
    operations: the budget, per message.
    cancelled: returns whether the result is no longer wanted.
  """
  total = operations.constant + operations.each * messages
  token = _CHAT.set(_Chat(total, cancelled))
  try:
    yield
  finally:
    _CHAT.reset(token)


def check_chat() -> None:
  """Raises Limit if the chat's budget is used up, or its caller has left."""
  chat = _CHAT.get()
  if chat is not None and chat.operations < 0:
    raise Limit('its renderings of one chat need too many operations')
  check_caller()


def check_caller(operations: int = 0) -> None:
  """Checks that the chat's caller has not left.

  Args:
    operations: those of an operation that is next, and cannot be interrupted.

  Raises:
    Limit: the caller has left; or may leave, and would wait too long.
  """
  chat = _CHAT.get()
  if chat is None or chat.cancelled is None:
    return
  if chat.cancelled():
    raise Limit('the caller has left')
  if operations > ONCE:
    raise Limit('one of its operations would take too long')


def _search_steps(size: int, wanted: int) -> int:
  """Returns about the most comparisons of CPython's search for a text.

  It compares at each place in short texts, and goes over to the two-way
  algorithm in long ones; not at the last 2000 places where what is looked for
  has more than a third of the text.
  """
  places = max(size - wanted + 1, 0)
  steps = places * (wanted + 2)
  if size < 2500 or wanted < 6 or (wanted < 100 and size < 30_000):
    return steps
  last = min(places, 2000) * wanted if 3 * wanted >= size - 16 else 0
  return min(steps, 6 * (size + wanted) + last)


def check_bits(bits: int) -> None:
  """Raises Limit where an integer has too many bits to be made."""
  if bits > BITS:
    raise Limit(f'a number would have {number(bits)} bits')


def number(value: float) -> str:
  """Returns a number for an error; large ones may be slow to print."""
  return f'{value}' if abs(value) < 10**12 else 'more than 10**12'
