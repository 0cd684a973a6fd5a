"""Resumable, deterministic sources of items."""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

Item = TypeVar('Item')


class Shuffled(Generic[Item]):
  """Iterates over items forever; each epoch has its own permutation.

  The permutation depends on (seed, epoch) and on nothing else, so that the
  state is two numbers, and resuming costs nothing however far it is.
  """

  def __init__(self, items: Sequence[Item], seed: int):
    """Args: items: none makes a source that cannot be drawn from."""
    self._items, self._seed = items, int(seed)
    self._seek(0, 0)

  def __len__(self) -> int:
    """Returns the number of items of an epoch."""
    return len(self._items)

  def __iter__(self) -> 'Shuffled[Item]':
    return self

  def __next__(self) -> Item:
    if not len(self):
      raise ValueError(
          'a source must hold items to draw from: got none; check the data '
          'file, or the number of tasks of the environment'
      )
    if self._index == len(self):
      self._seek(self._epoch + 1, 0)
    item = self._items[int(self._order[self._index])]
    self._index += 1
    return item

  def take(self, count: int) -> tuple[Item, ...]:
    """Returns the first items in their own order; at most all of them.

    Moves nothing: evaluation asks the same questions each time.
    """
    return tuple(self._items[i] for i in range(min(count, len(self))))

  def get_state(self) -> dict[str, int]:
    """Returns what `set_state` needs, as JSON can hold it."""
    return {
        'epoch': self._epoch, 'index': self._index, 'length': len(self),
        'seed': self._seed,
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues where `get_state` was called.

    Raises:
      ValueError: the state is that of a source of other length or seed.
    """
    for field, mine in (('length', len(self)), ('seed', self._seed)):
      if state[field] != mine:
        raise ValueError(
            f'the {field} of a resumed source must be the one it was saved '
            f'with: got {mine!r}, expected {state[field]!r}; restore the data '
            'or start a new run'
        )
    self._seek(int(state['epoch']), int(state['index']))

  def _seek(self, epoch: int, index: int) -> None:
    self._epoch, self._index = epoch, index
    self._order = permutation(len(self), self._seed, epoch)


def permutation(length: int, *seed: int) -> np.ndarray:
  """Returns a random order of `range(length)`: i64[length].

  Sorts raw random words, because numpy promises that the words of a bit
  generator stay the same over its versions; it promises no such thing for
  `Generator.permutation`.
  """
  words = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(length)
  return np.argsort(words, kind='stable')
