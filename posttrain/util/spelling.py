"""Names that a misspelt name may mean: near ones only, or none.

A hint that is wrong costs more than none. Names are compared word by word, as
`min_tokens` is not a misspelt `max_tokens` although two letters differ.
"""

import re
from collections.abc import Collection, Iterable

from posttrain.util import foreign

_LONGEST = 80  # letters of a name that may be misspelt
_SHOWN = 5  # names in a hint


def near(name: str, known: Iterable[str]) -> list[str]:
  """Returns the known names that a name may be a misspelling of, best first.

  These are names with the same letters (`RowTokens`, `row-tokens`), with the
  same words in another order (`steps_warmup`), or with as many words, each of
  which has one edit at most (an inserted, missing, changed or swapped letter),
  two from eight letters on, and all words together two at most. Words of one or
  two letters must be equal beside others, and a word alone of up to three must
  not have a changed letter. If there are none, the only name that has the whole
  name among its words, where it begins with it (`warmup` for `warmup_steps`).
  """
  known = list(known)
  if not re.search(r'[^\W\d]{2}', name):
    return []
  costs = {other: _cost(name, other) for other in known}
  costs = {other: cost for other, cost in costs.items() if cost is not None}
  if costs:
    least = min(costs.values())
    return sorted(other for other, cost in costs.items() if cost == least)
  longer = [other for other in known if f'_{name}_' in f'_{other}_']
  is_start = len(longer) == 1 and longer[0].startswith(name)
  return longer if is_start and len(name) > 2 else []


def hint(names: Iterable[str], known: Collection[str]) -> str:
  """Returns '; did you mean prompt instead of 'promt'?'; '' if nothing is near.

  Args:
    names: the existing names; the known ones among them are correct.
    known: the names that may be meant.
  """
  names = list(names)
  missing = [name for name in known if name not in names]
  pairs = [
    (near(name, missing), name)
    for name in names
    if name not in known and len(name) <= _LONGEST
  ]
  meant = [
    f'{others[0]} instead of {foreign.quote(name)}'
    for others, name in pairs
    if others
  ]
  return f'; did you mean {", ".join(meant[:_SHOWN])}?' if meant else ''


def _cost(name: str, other: str) -> int | None:
  """Returns the number of edits, None if the names are not near."""
  ours, theirs = _words(name), _words(other)
  if ''.join(ours) == ''.join(theirs) or sorted(ours) == sorted(theirs):
    return 0
  if len(ours) != len(theirs):
    joined = edits(''.join(ours), ''.join(theirs))
    return 1 if joined == 1 and min(len(name), len(other)) > 5 else None
  total = 0
  for word, target in zip(ours, theirs, strict=True):
    cost = edits(word, target)
    if cost > 1 + (min(len(word), len(target)) >= 8):
      return None
    if cost and not _may_differ(word, target, len(ours) == 1):
      return None
    total += cost
  return total if total <= 2 else None


def _may_differ(word: str, target: str, is_alone: bool) -> bool:
  """Returns whether words with one edit between them may mean the same."""
  shortest, equal_length = min(len(word), len(target)), len(word) == len(target)
  if shortest <= 2:  # `lrr`, but not `url`, is near `lr`
    return is_alone and not equal_length and word[0] == target[0]
  is_swap = sorted(word) == sorted(target)
  return shortest > 3 or not is_alone or not equal_length or is_swap


def _words(name: str) -> list[str]:
  return re.split(r'[_\-.\s]+', name.strip('_- ').lower())


def edits(a: str, b: str) -> int:
  """Returns the number of edits from one text to another, swaps included.

  References:
    Damerau, "A technique for computer detection and correction of spelling
    errors", 1964; here each letter is edited once at most.
  """
  before: list[int] = []
  row = list(range(len(b) + 1))
  for i, x in enumerate(a):
    last, before, row = before, row, [i + 1]
    for j, y in enumerate(b):
      cost = min(before[j + 1] + 1, row[j] + 1, before[j] + (x != y))
      if i and j and x == b[j - 1] and a[i - 1] == y:
        cost = min(cost, last[j - 1] + 1)
      row.append(cost)
  return row[-1]
