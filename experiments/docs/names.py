"""The tables of other libraries' names, from `posttrain.config.aliases`.

docs/names.md is written by hand except its section of options: the site puts
`section`, with a table per subject, in the place of the line `MARK`.
"""

from collections.abc import Sequence

from posttrain.config import aliases
from posttrain.config.aliases import row

MARK = '<!-- the tables of options -->'
# Title of a column -> its libraries.
COLUMNS = {
  **{name: (name,) for name in ('TRL', 'verl', 'prime-rl', 'Tunix')},
  'others': ('MaxText', 'other libraries'),
}
assert {x for names in COLUMNS.values() for x in names} == set(
  row.LIBRARIES.values()
)


def section() -> str:
  """Returns the section of options, without its title."""
  return '\n'.join(
    f'### {title}\n\n{_table(rows)}' for title, rows in aliases.SECTIONS.items()
  )


def _table(rows: Sequence[row.Row]) -> str:
  head = ('ours', *COLUMNS)
  lines = [head, ('---',) * len(head), *map(_cells, rows)]
  return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def _cells(entry: row.Row) -> tuple[str, ...]:
  return (_ours(entry), *(_theirs(entry, x) for x in COLUMNS.values()))


def _ours(entry: row.Row) -> str:
  """Returns our key and how it differs, or what there is in its place."""
  key = f'`{entry.key}`'
  note = entry.note.replace('{}', key).replace('|', '\\|')
  if entry.equal:
    return f'{key}: {note}' if note else key
  return f'none: {note}' if key in note else f'none, see {key}: {note}'


def _theirs(entry: row.Row, libraries: Sequence[str]) -> str:
  """Returns the names of some libraries, the less known ones with theirs."""
  cells = []
  for library in libraries:
    names = ', '.join(f'`{x}`' for x in entry.names.get(library, '').split())
    if names:
      cells.append(f'MaxText {names}' if library == 'MaxText' else names)
  return '; '.join(cells)
