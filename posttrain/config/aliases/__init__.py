"""Options of other libraries, with ours: for hints about unknown keys.

`SECTIONS` has the rows by subject, as docs/names.md shows them; `ROWS` all, one
per option of ours and way in which others' differ from it.
"""

import functools
import itertools

from posttrain.config.aliases import row, run, training

SECTIONS = training.SECTIONS | run.SECTIONS
ROWS = tuple(itertools.chain(*SECTIONS.values()))


@functools.cache
def by_name() -> dict[str, list[tuple[str, row.Row]]]:
  """Returns name -> (library, row) of each library that has the name."""
  table: dict[str, list[tuple[str, row.Row]]] = {}
  for entry in ROWS:
    for library, names in entry.names.items():
      for name in names.split():
        table.setdefault(name, []).append((library, entry))
  return table
