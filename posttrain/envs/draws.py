"""Draws of distinct tasks from numbered key spaces, split in two (np).

A space numbers its keys, so that they need no list: a walk visits them in an
order shuffled by the seed and skips the keys of the other split. The split of a
key is a fixed hash of its text, which depends on no option and no seed, so that
no stage trains on an evaluation task.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from posttrain.data import sources
from posttrain.envs import base

EVAL_SHARE = 5  # one key in 5 is an evaluation key
MAX_COUNTED = 2**12  # largest space whose keys are counted per split


@dataclasses.dataclass(frozen=True)
class Space:
  """Keys by number.

  Attributes:
    size: number of keys.
    key: from 0 .. size - 1 to the key, the unique text of a task.
    group: from a key to the text that is hashed; keys of one group are in the
      same split.
  """

  size: int
  key: Callable[[int], str]
  group: Callable[[str], str] = str

  def walk(self, split: str, seed: tuple[int, ...]) -> Iterator[str]:
    """Yields keys of a split, each once, in an order shuffled by the seed.

    Ends only if the space has at most `MAX_COUNTED` keys.
    """
    for index in _indices(self.size, seed):
      key = self.key(index)
      group = self.group(key).encode()
      digest = hashlib.blake2b(group, digest_size=8).digest()
      held_out = int.from_bytes(digest, 'little') % EVAL_SHARE == 0
      if held_out == (split == 'eval'):
        yield key

  def capacity(self, split: str) -> int:
    """Returns how many keys of a split can be drawn.

    All of them, counted, if the space has at most `MAX_COUNTED` keys. Half of
    the expected number in a larger space, which random draws reach quickly.
    """
    if self.size <= MAX_COUNTED:
      num_eval = sum(1 for _ in self.walk('eval', ()))
      return num_eval if split == 'eval' else self.size - num_eval
    half = self.size // (2 * EVAL_SHARE)
    return half if split == 'eval' else half * (EVAL_SHARE - 1)


class Draws:
  """Distinct keys of an environment, equally many from each space."""

  def __init__(self, name: str, cfg: Any, spaces: Sequence[Space], advice: str):
    """Checks that both splits have enough keys.

    Args:
      name: the environment's name.
      cfg: the options, with `train_tasks` and `eval_tasks`.
      spaces: key spaces.
      advice: how to have more keys, for the error.

    Raises:
      ValueError: a split has fewer keys than tasks; names the option.
    """
    self._cfg, self._spaces = cfg, spaces
    for split in base.SPLITS:
      capacity = sum(space.capacity(split) for space in spaces)
      if (count := self._count(split)) > capacity:
        raise ValueError(
          f'envs.{name}.env.{split}_tasks must be at most {capacity}, the '
          f'distinct tasks of that split: got {count!r}; lower it, or {advice}'
        )

  def keys(self, split: str, seed: int) -> list[str]:
    """Returns the keys of a split; those of evaluation ignore the seed.

    The spaces take turns; an exhausted one drops out. So the first n keys also
    come from all spaces.
    """
    base.check_split(split)
    count, seed = self._count(split), seed if split == 'train' else 0
    walks = [
      itertools.islice(
        space.walk(split, (seed, i)), min(count, space.capacity(split))
      )
      for i, space in enumerate(self._spaces)
    ]
    keys: list[str] = []
    while len(keys) < count:
      turn = [next(walk, None) for walk in walks]
      assert any(key is not None for key in turn), 'the capacities must suffice'
      keys += (key for key in turn if key is not None)
    return keys[:count]

  def _count(self, split: str) -> int:
    return getattr(self._cfg, f'{split}_tasks')


def _indices(size: int, seed: tuple[int, ...]) -> Iterator[int]:
  """Yields the numbers below `size` in random order, each once."""
  if size <= MAX_COUNTED:
    yield from sources.permutation(size, *seed).tolist()
    return
  # Raw words, see `sources.permutation`; 64 bits more than needed, so that
  # the bias of the remainder is below 2^-64.
  bits = np.random.PCG64(np.random.SeedSequence(seed))
  num_words, visited = size.bit_length() // 64 + 2, set()
  while True:
    raw = bits.random_raw(num_words).astype('<u8').tobytes()
    index = int.from_bytes(raw, 'little') % size
    if index not in visited:
      visited.add(index)
      yield index
