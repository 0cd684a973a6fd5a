"""Near names, for modules that do not use `errors.nearest` yet."""

import difflib
from collections.abc import Collection, Iterable


def near(name: str, known: Iterable[str]) -> list[str]:
  """Returns the known names that a name may be a misspelling of."""
  return difflib.get_close_matches(name, list(known))


def hint(names: Iterable[str], known: Collection[str]) -> str:
  """Returns '; did you mean prompt instead of 'promt'?', '' if none is near."""
  names = list(names)
  missing = [name for name in known if name not in names]
  meant = [
    f'{others[0]} instead of {name!r}'
    for name in names
    if name not in known and (others := near(name, missing))
  ]
  return f'; did you mean {", ".join(meant[:5])}?' if meant else ''
