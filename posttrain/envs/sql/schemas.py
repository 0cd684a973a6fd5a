"""Random tables, columns and rows of generated databases.

1. There are two to four tables. The second always refers to rows of the first;
   later ones may refer to rows of an earlier one.
2. A column has one of three names of its concept, a foreign key one of three
   suffixes, so that column names must be explored.
3. Numbers are unique within a column and names within a table, so that there
   are no ties.
4. The splits share no database; split 'ood' also shares no nouns and names with
   the others.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence

from posttrain.envs.sql import record, words

SPLITS = ('train', 'eval', 'ood')
SPLIT_SEEDS = 10**6  # number of databases of a split


@dataclasses.dataclass(frozen=True)
class Column:
  """A column besides `id` and `name`; all of them hold whole numbers."""

  name: str
  concept: str = ''  # one of `words.CONCEPTS`; '' for a foreign key
  parent: int | None = None  # index of the table that a foreign key refers to


@dataclasses.dataclass(frozen=True)
class Table:
  """A table with its rows."""

  name: str
  columns: tuple[Column, ...]
  rows: tuple[tuple[record.Cell, ...], ...]  # (id, name, *columns)

  @property
  def concepts(self) -> tuple[Column, ...]:
    return tuple(column for column in self.columns if column.concept)

  @property
  def foreign_key(self) -> Column | None:
    keys = (column for column in self.columns if column.parent is not None)
    return next(keys, None)

  def values(self, column: Column) -> tuple[record.Cell, ...]:
    """Returns the values of one of `columns`, by row."""
    index = 2 + self.columns.index(column)
    return tuple(row[index] for row in self.rows)


@dataclasses.dataclass(frozen=True)
class Schema:
  """A database: its tables, and its number."""

  number: int  # unique over all splits
  tables: tuple[Table, ...]

  @property
  def db_id(self) -> str:
    return f'synth_{self.number}'

  def statements(self) -> Iterator[str]:
    """Yields the CREATE statement of each table."""
    for table in self.tables:
      columns = ['id INTEGER PRIMARY KEY', 'name TEXT']
      for column in table.columns:
        reference = (
          ''
          if column.parent is None
          else (f' REFERENCES {self.tables[column.parent].name}(id)')
        )
        columns.append(f'{column.name} INTEGER{reference}')
      yield f'CREATE TABLE {table.name} ({", ".join(columns)})'


def locate(db_id: str) -> tuple[int, str]:
  """Returns (seed, split) of the database with an id.

  Args:
    db_id: 'synth_' and the database's number over all splits.

  Raises:
    ValueError: no database has this id.
  """
  digits = db_id.removeprefix('synth_')
  if digits.isdecimal() and db_id == f'synth_{int(digits)}':
    split, seed = divmod(int(digits), SPLIT_SEEDS)
    if split < len(SPLITS):
      return seed, SPLITS[split]
  raise ValueError(
    f"db_id must be 'synth_' and a number below "
    f'{len(SPLITS) * SPLIT_SEEDS}: got {db_id!r}'
  )


@functools.lru_cache(maxsize=16)  # a database and its questions share it
def make(seed: int, split: str) -> Schema:
  """Draws tables, columns and rows.

  Args:
    seed: number of the database within its split, below `SPLIT_SEEDS`.
    split: one of `SPLITS`.

  Raises:
    ValueError: the split or the seed does not exist.
  """
  number = _number(seed, split)
  # Python hashes text seeds by SHA-512: the same in every process.
  draw = random.Random(f'db:{number}')
  ood = split == 'ood'
  names = words.OOD_NAMES if ood else words.NAMES
  nouns = draw.sample(
    words.OOD_NOUNS if ood else words.NOUNS, draw.randint(2, 4)
  )
  tables: list[Table] = []
  for i, noun in enumerate(nouns):
    columns, parent = _concepts(draw), None
    if i == 1 or i > 1 and draw.random() < 0.5:
      parent = draw.randrange(i)
      key = words.foreign_key(nouns[parent], draw.choice(words.SUFFIXES))
      columns.append(Column(key, parent=parent))
    draw.shuffle(columns)
    count = draw.randint(4, 9)
    values = [
      draw.sample(range(1, 100), count)
      if column.parent is None
      else _owners(draw, count, len(tables[column.parent].rows))
      for column in columns
    ]
    rows = zip(
      range(1, count + 1), draw.sample(names, count), *values, strict=True
    )
    tables.append(Table(words.plural(noun), tuple(columns), tuple(rows)))
  return Schema(number, tuple(tables))


def _number(seed: int, split: str) -> int:
  if split not in SPLITS:
    raise ValueError(f'split must be one of {SPLITS}: got {split!r}')
  if not 0 <= seed < SPLIT_SEEDS:
    raise ValueError(
      f'the number of a database must be in 0 .. {SPLIT_SEEDS - 1}: got '
      f'{seed!r}'
    )
  return SPLITS.index(split) * SPLIT_SEEDS + seed


def _concepts(draw: random.Random) -> list[Column]:
  concepts = draw.sample(tuple(words.CONCEPTS), draw.randint(2, 3))
  return [
    Column(draw.choice(words.CONCEPTS[concept]), concept)
    for concept in concepts
  ]


def _owners(draw: random.Random, count: int, parents: int) -> Sequence[int]:
  """Draws the parent of each of `count` rows: an id of 1 .. parents.

  Two to four parents share the rows, in random proportions. With independent
  draws nearly all parents would have one or two rows, and guesses would often
  be correct.
  """
  owners = draw.sample(range(1, parents + 1), draw.randint(2, min(4, parents)))
  cuts = sorted(draw.sample(range(1, count), len(owners) - 1))
  shares = zip(owners, [0, *cuts], [*cuts, count], strict=True)
  ids = [owner for owner, start, end in shares for _ in range(end - start)]
  draw.shuffle(ids)
  return ids
