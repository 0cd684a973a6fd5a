"""Similarity of two sequences by their longest common subsequence."""

from collections.abc import Hashable, Sequence


def lcs(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
  """Returns the length of the longest common subsequence.

  It need not be contiguous: 'abcde' and 'xaye' share 'ae'. One big integer
  holds a row of the dynamic program, with a 0 bit where the row increases.

  References:
    Hyyro, "Bit-Parallel LCS-length Computation Revisited", AWOCA 2004.
  """
  places: dict[Hashable, int] = {}
  for i, item in enumerate(a):
    places[item] = places.get(item, 0) | 1 << i
  full = row = (1 << len(a)) - 1
  for item in b:
    matches = row & places.get(item, 0)
    row = (row + matches | row - matches) & full
  return len(a) - row.bit_count()


def ratio(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
  """Returns 2 lcs(a, b) / (len(a) + len(b)): 1 = equal, 0 = nothing shared.

  Two empty sequences are equal.
  """
  size = len(a) + len(b)
  return 2 * lcs(a, b) / size if size else 1.0
