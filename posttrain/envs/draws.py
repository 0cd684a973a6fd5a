"""Distinct tasks of numbered spaces, a part of them set aside (np).

A space numbers its keys, so that none need be listed: it is walked in an
order that the seed shuffles, and what lies on the other side is passed over.
On which side a key lies is a fixed hash of its words, which knows no option
and no seed, so that no evaluation task is trained on, by whatever stage.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from posttrain.data import sources

EVAL_SHARE = 5  # one key in so many is set aside for evaluation
LISTED = 2**12  # keys of a space whose sides are counted, at most


@dataclasses.dataclass(frozen=True)
class Space:
  """Keys by number."""

  size: int
  key: Callable[[int], str]  # 0 .. size - 1 -> what tells tasks apart
  # What is hashed of a key: those that are asked alike lie on one side.
  alike: Callable[[str], str] = str

  def walk(self, split: str, seed: tuple[int, ...]) -> Iterator[str]:
    """Yields keys of a side, each once, in an order that the seed decides.

    Ends only if the space has `LISTED` keys at most.
    """
    for index in _indices(self.size, seed):
      key = self.key(index)
      if _held_out(self.alike(key)) == (split == 'eval'):
        yield key

  def room(self, split: str) -> int:
    """Returns how many keys of a side can be drawn.

    All of them, counted, up to `LISTED`. Of a larger space half of the side,
    which nobody needs to count, and which is quickly drawn at random.
    """
    if self.size <= LISTED:
      held = self._held
      return held if split == 'eval' else self.size - held
    half = self.size // (2 * EVAL_SHARE)
    return half if split == 'eval' else half * (EVAL_SHARE - 1)

  @functools.cached_property
  def _held(self) -> int:
    return sum(1 for _ in self.walk('eval', ()))


def draw(
  spaces: Sequence[Space], split: str, count: int, seed: int
) -> list[str]:
  """Returns distinct keys, as many of one space as of another.

  The spaces take turns; where one has no more, the others go on. So the first
  n keys, too, are of all spaces.

  Args:
    spaces: together they have room for `count`.
    split: 'train' or 'eval'.
    count: how many.
    seed: 0 or more.
  """
  walks = [
    itertools.islice(
      space.walk(split, (seed, i)), min(count, space.room(split))
    )
    for i, space in enumerate(spaces)
  ]
  keys: list[str] = []
  while len(keys) < count:
    turn = [next(walk, None) for walk in walks]
    assert any(key is not None for key in turn), 'there is room for all'
    keys += (key for key in turn if key is not None)
  return keys[:count]


def check_room(
  name: str, split: str, count: int, spaces: Sequence[Space], widen: str
) -> None:
  """Refuses a number of tasks that a split has no room for.

  Args:
    name: of the environment.
    split: 'train' or 'eval'; its option is `<split>_tasks`.
    count: what the option says.
    spaces: of the tasks.
    widen: what to do about it, besides lowering the number.

  Raises:
    ValueError: naming the option, and what it can be.
  """
  have = sum(space.room(split) for space in spaces)
  if count > have:
    raise ValueError(
      f'envs.{name}.env.{split}_tasks must be at most {have}, the distinct '
      f'tasks of that split: got {count!r}; lower it, or {widen}'
    )


def _indices(size: int, seed: tuple[int, ...]) -> Iterator[int]:
  """Yields the numbers below `size` in random order, each once."""
  if size <= LISTED:
    yield from sources.permutation(size, *seed).tolist()
    return
  # Raw words, see `sources.permutation`; 64 bits more than needed, so that
  # the remainder is uniform for all that anybody can measure.
  bits = np.random.PCG64(np.random.SeedSequence(seed))
  words, seen = size.bit_length() // 64 + 2, set()
  while True:
    raw = bits.random_raw(words).astype('<u8').tobytes()
    index = int.from_bytes(raw, 'little') % size
    if index not in seen:
      seen.add(index)
      yield index


def _held_out(words: str) -> bool:
  digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'little') % EVAL_SHARE == 0
