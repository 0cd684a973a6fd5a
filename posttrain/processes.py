"""The processes of a run: one per host, all of which run the same program.

Every process makes the same decisions, from the same values: what one alone
knows (a signal, a file, an episode) reaches the others through this module. All
functions but `count`, `index`, `is_first` and `share` must be called by every
process, in the same order. In a run of one process they do nothing.

    with joining.join(place, folder):
      rollouts = divided(specs, play, key)   # each plays its share; all get all
      text = on(0, read)                     # one reads; all get it
      if any_of(stop): ...                   # all stop, if one must

A failure in one process is raised in all. A process that ends otherwise, or
stops, ends the others as well, see `hosts`. Numpy only.
"""

import contextlib
import itertools
import pickle
import socket
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from posttrain.util import errors

_SMALLEST = 4096  # bytes of an exchange; sizes are powers of two from there
T = TypeVar('T')


class Peers(Protocol):
  """The connection of this process with all others."""

  count: int
  index: int

  def exchange(self, row: np.ndarray) -> np.ndarray:
    """Returns the rows of all processes; each sends an equal number of items.

    Called by all processes, in the same order.
    """
    ...


_peers: Peers | None = None


@contextlib.contextmanager
def use(peers: Peers) -> Iterator[None]:
  """Makes this process one of several while the block runs."""
  global _peers
  assert _peers is None, 'a process joins once'
  _peers = peers
  try:
    yield
  finally:
    _peers = None


def count() -> int:
  """Returns the number of processes."""
  return 1 if _peers is None else _peers.count


def index() -> int:
  """Returns the number of this process, from 0."""
  return 0 if _peers is None else _peers.index


def is_first() -> bool:
  """Returns whether this process writes what is written once."""
  return index() == 0


def gather(value: Any) -> list[Any]:
  """Returns the values of all processes, in their order; values are pickled."""
  if _peers is None:
    return [value]
  exchange = _peers.exchange
  data = np.frombuffer(pickle.dumps(value), np.uint8)
  sizes = exchange(np.array([len(data)], np.int32))[:, 0]
  width = _SMALLEST
  while width < sizes.max():
    width *= 2
  rows = exchange(np.pad(data, (0, width - len(data))))
  return [
    pickle.loads(row[:size].tobytes())
    for row, size in zip(rows, sizes, strict=True)
  ]


def attempt(fn: Callable[[], T]) -> list[T]:
  """Returns what `fn` returns in each process; raises what it raises in any.

  Raises:
    Exception: the failure of the lowest process, in all of them.
  """
  if count() == 1:
    return [fn()]
  try:
    own = _pickled(fn())
  except Exception as error:
    # The error as it can be sent, with the process that raised it.
    note = f'(process {index()} on {socket.gethostname()})'
    error.add_note(note)
    failure = _Failure(type(error), error.args, dict(error.__dict__))
    try:
      sent = str(pickle.loads(pickle.dumps(failure)).error())
    except Exception:  # a class of a function, or attributes that stay here
      sent = None
    if sent != str(error):
      kind = ValueError if isinstance(error, ValueError) else RuntimeError
      failure = _Failure(kind, (f'{errors.describe(error)} {note}',), {})
    own = _pickled(failure)
  results = [pickle.loads(x) for x in gather(own)]
  for result in results:
    if isinstance(result, _Failure):
      raise result.error()
  return results


def together(fn: Callable[[], T]) -> T:
  """Returns what `fn` returns in this process; raises what it raises in any.

  Unlike that of `attempt`, the result need not be pickled.
  """
  results: list[T] = []
  attempt(lambda: results.append(fn()))
  return results[0]


def on(process: int, fn: Callable[[], T]) -> T:
  """Returns in all processes what `fn` returns in one; raises what it raises.

  Args:
    process: the process that calls `fn`, modulo their number.
    fn: a function whose result can be pickled.
  """
  process %= count()
  return attempt(lambda: fn() if process == index() else None)[process]


def any_of(flag: bool) -> bool:
  """Returns whether the flag is set in any process."""
  return any(gather(flag))


def divided(
  items: Sequence[Any],
  fn: Callable[[Sequence[Any]], Sequence[T]],
  key: Callable[[Any], Hashable],
) -> list[T]:
  """Returns fn(items), of which each process computes a share.

  Neighbours with equal keys stay together. The share depends on the position of
  an item alone.

  Args:
    items: equal in all processes.
    fn: returns one result per item, in order; results can be pickled.
    key: returns the key of an item.
  """
  if count() == 1:
    return list(fn(items))
  mine = share(items, key)
  shares = [iter(results) for results in attempt(lambda: list(fn(mine)))]
  return [
    next(shares[number % count()])
    for number, group in enumerate(_groups(items, key))
    for _ in group
  ]


def share(items: Sequence[T], key: Callable[[T], Hashable]) -> list[T]:
  """Returns the items whose results `divided` expects of this process."""
  groups = _groups(items, key)[index() :: count()]
  return [item for group in groups for item in group]


def _groups(items: Sequence[T], key: Callable[[T], Hashable]) -> list[list[T]]:
  return [list(group) for _, group in itertools.groupby(items, key)]


class _Failure(NamedTuple):
  """An error on its way to other processes; constructors are not called."""

  kind: type[Exception]
  args: tuple[Any, ...]
  state: dict[str, Any]

  def error(self) -> Exception:
    """Returns the error, with its type and attributes."""
    error = self.kind.__new__(self.kind, *self.args)
    error.args = self.args
    error.__dict__.update(self.state)
    return error


def _pickled(value: Any) -> bytes:
  try:
    return pickle.dumps(value)
  except Exception as error:
    raise TypeError(
      'what one process of a run sends to the others must be picklable: got '
      f'{errors.describe(error)}; use plain values and classes of modules in '
      'tasks, messages and scores'
    ) from error
