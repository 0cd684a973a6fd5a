"""Resumable, deterministic sources of items."""

import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

Item = TypeVar('Item')


class Shuffled(Generic[Item]):
  """Iterates over items forever; each epoch has its own permutation.

  The permutation depends on (seed, epoch) alone, so that the position is two
  numbers and resuming takes constant time.
  """

  def __init__(self, items: Sequence[Item], seed: int, fingerprint: str = ''):
    """Starts at the first item of the first epoch.

    Args:
      items: the items; an empty source raises when it is drawn from.
      seed: the permutations' seed.
      fingerprint: a hash of the items (`fingerprint`, `file_fingerprint`);
        a resumed source must have the one it was saved with.
    """
    self._items, self._seed = items, int(seed)
    self._fingerprint = fingerprint
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

  def take(self, count: int, start: int = 0) -> tuple[Item, ...]:
    """Returns the first items in their own order, from `start` on.

    The position stays, so that every evaluation gets the same tasks.
    """
    return tuple(self._items[i] for i in range(start, min(count, len(self))))

  def get_state(self) -> dict[str, Any]:
    """Returns the position and the source's identity, JSON-able."""
    return {
      'epoch': self._epoch,
      'index': self._index,
      'length': len(self),
      'seed': self._seed,
      'fingerprint': self._fingerprint,
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues where `get_state` was called, with the same items and seed.

    `preflight.check_resume` refuses others.
    """
    own = self.get_state()
    for field in ('length', 'seed', 'fingerprint'):
      assert state[field] == own[field], f'a source with another {field}'
    self._seek(int(state['epoch']), int(state['index']))

  def _seek(self, epoch: int, index: int) -> None:
    self._epoch, self._index = epoch, index
    self._order = permutation(len(self), self._seed, epoch)


def fingerprint(*parts: bytes) -> str:
  """Returns the sha256, hex, of the parts and their lengths."""
  digest = hashlib.sha256()
  for part in parts:
    digest.update(len(part).to_bytes(8, 'big') + part)
  return digest.hexdigest()


def hash64(text: str) -> int:
  """Returns a fixed hash of a text, in [0, 2^64)."""
  digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'little')


def file_fingerprint(path: pathlib.Path) -> str:
  """Returns the sha256, hex, of a data file's content.

  Args:
    path: a file; or a TFDS folder, of which the names and contents of the
      records and of `features.json` count.
  """
  if not path.is_dir():
    return fingerprint(_file_hash(path))
  files = sorted({*path.rglob('*.array_record*'), *path.rglob('features.json')})
  return fingerprint(
    *(part for file in files for part in (file.name.encode(), _file_hash(file)))
  )


def _file_hash(path: pathlib.Path) -> bytes:
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').digest()


def permutation(length: int, *seed: int) -> np.ndarray:
  """Returns a random order of `range(length)`: i64[length].

  Sorts raw random words, because numpy promises that the words of a bit
  generator stay the same over its versions; it does not for
  `Generator.permutation`.
  """
  words = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(length)
  return np.argsort(words, kind='stable')


def uniform(count: int, *seed: int) -> np.ndarray:
  """Returns random numbers in [0, 1): f64[count]; of raw words as well."""
  words = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)
  return (words >> np.uint64(11)) * 2.0**-53
