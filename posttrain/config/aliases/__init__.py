"""Options of other libraries, with ours: for hints about unknown keys.

`ROWS` has one entry per option of ours and way in which others' differ from it.
docs/mistakes.md shows the same rows as a table.
"""

import functools

from posttrain.config.aliases import row, run, training

ROWS = (*training.ROWS, *run.ROWS)


@functools.cache
def by_name() -> dict[str, list[tuple[str, row.Row]]]:
  """Returns name -> (library, row) of each library that has the name."""
  table: dict[str, list[tuple[str, row.Row]]] = {}
  for entry in ROWS:
    for library, names in entry.names.items():
      for name in names.split():
        table.setdefault(name, []).append((library, entry))
  return table
