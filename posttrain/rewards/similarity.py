"""How alike two sequences are: by their longest common subsequence."""

from collections.abc import Hashable, Sequence


def lcs(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
  """Returns the length of the longest common subsequence.

  It need not be contiguous: 'abcde' and 'xaye' share 'ae'. One big integer
  holds a row of the dynamic program, a 0 bit where it steps up.

  References:
    Hyyro, "Bit-Parallel LCS-length Computation Revisited", AWOCA 2004.
  """
  places: dict[Hashable, int] = {}
  for i, item in enumerate(one):
    places[item] = places.get(item, 0) | 1 << i
  full = row = (1 << len(one)) - 1
  for item in other:
    met = row & places.get(item, 0)
    row = (row + met | row - met) & full
  return len(one) - row.bit_count()


def ratio(one: Sequence[Hashable], other: Sequence[Hashable]) -> float:
  """Returns 2 lcs / (len(one) + len(other)): 1 = equal, 0 = nothing shared.

  Two empty sequences are equal.
  """
  size = len(one) + len(other)
  return 2 * lcs(one, other) / size if size else 1.0
