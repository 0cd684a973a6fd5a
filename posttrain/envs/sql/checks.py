"""What is wrong with a query before SQLite has even seen it."""

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
  """Returns why a query must not even be compiled, or None.

  Args:
    sql: the query.
    length: how many UTF-8 bytes it may have.
    copies: a bound to `growth`.
  """
  if len(sql.encode('utf-8', 'surrogatepass')) > length:
    return f'the query is longer than {length} bytes'
  if '\0' in sql or re.search('[\ud800-\udfff]', sql):
    return 'the query is not valid text'
  if not _QUERY.match(sql):
    return 'only SELECT is allowed'
  return 'the query is too complex' if growth(sql) > copies else None


def growth(sql: str) -> int:
  """Bounds how often a part of a query is copied while it is compiled.

  SQLite copies what a name stands for to wherever the name stands, before it
  looks at any limit: a name r times in each of n SELECTs, each of which uses
  the one before, makes r^n copies. So this is the product, over the SELECTs,
  of 1 + how often the most frequent word comes from there to the next one.
  """
  counts = [collections.Counter()]
  for word in _WORD.findall(sql):
    word = word.strip('"\'`[]').lower()
    if word in ('select', 'values'):
      counts.append(collections.Counter())
    elif not word.startswith(('--', '/*')):
      counts[-1][word] += 1
  return math.prod(1 + max(count.values(), default=0) for count in counts)
