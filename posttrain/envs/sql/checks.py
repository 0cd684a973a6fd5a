"""Checks of a query before SQLite compiles it."""

import collections
import math
import re

_QUERY = re.compile(  # possessive: comments match in one way only
  r'(?>\s|--[^\n]*|/\*.*?\*/)*+(?:select|with)\b', re.IGNORECASE | re.DOTALL
)
_WORD = re.compile(  # or a comment
  r"""--[^\n]*|/\*.*?(?:\*/|\Z)|"[^"]*"|'[^']*'|`[^`]*`|\[[^]]*]|\*|"""
  r'[\w$\x80-\U0010ffff]+',
  re.DOTALL,
)


def refusal(sql: str, length: int, copies: int) -> str | None:
  """Returns the reason why a query must not be compiled, or None.

  Args:
    sql: the query.
    length: maximum length in UTF-8 bytes.
    copies: maximum of `growth`.
  """
  if len(sql.encode('utf-8', 'surrogatepass')) > length:
    return f'the query is longer than {length} bytes'
  if '\0' in sql or re.search('[\ud800-\udfff]', sql):
    return 'the query is not valid text'
  if not _QUERY.match(sql):
    return 'only SELECT is allowed'
  return 'the query is too complex' if growth(sql) > copies else None


def growth(sql: str) -> int:
  """Returns a bound on the copies of a part of a query during compilation.

  SQLite copies a subquery to every use of its name before it checks any limit:
  r uses of a name in each of n SELECTs, each of which uses the previous one,
  make r^n copies. So the bound is the product over the SELECTs of 1 + the count
  of the most frequent word up to the next SELECT.
  """
  counts = [collections.Counter()]
  for word in _WORD.findall(sql):
    word = word.strip('"\'`[]').lower()
    if word in ('select', 'values'):
      counts.append(collections.Counter())
    elif not word.startswith(('--', '/*')):
      counts[-1][word] += 1
  return math.prod(1 + max(count.values(), default=0) for count in counts)
