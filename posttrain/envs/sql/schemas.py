"""What a generated database is before it is one: tables, columns, rows.

1. There are two to four tables; the second always names rows of the first,
   later ones may name rows of an earlier one.
2. A column has one of three names for its concept, a foreign key one of three
   endings, so that nobody knows them without a look.
3. A number stands once in a column and a name once in a table, so that nothing
   ties.
4. The splits have databases of their own; those of 'ood' also nouns and names
   of their own.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence

from posttrain.envs.sql import record, words

SPLITS = ('train', 'eval', 'ood')
SPLIT_SEEDS = 10**6  # databases of a split


@dataclasses.dataclass(frozen=True)
class Column:
  """A column besides `id` and `name`; all of them hold whole numbers."""

  name: str
  concept: str = ''  # of `words.CONCEPTS`; '' of a foreign key
  parent: int | None = None  # number of the table whose ids a foreign key has


@dataclasses.dataclass(frozen=True)
class Table:
  """A table and what is in it."""

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
    """Returns what stands in one of `columns`, by row."""
    place = 2 + self.columns.index(column)
    return tuple(row[place] for row in self.rows)


@dataclasses.dataclass(frozen=True)
class Schema:
  """A database."""

  number: int  # over all splits
  tables: tuple[Table, ...]

  @property
  def db_id(self) -> str:
    return f'synth_{self.number}'

  def statements(self) -> Iterator[str]:
    """Yields the SQL that creates the tables, one by one."""
    for table in self.tables:
      columns = ['id INTEGER PRIMARY KEY', 'name TEXT']
      for column in table.columns:
        refers = (
          ''
          if column.parent is None
          else (f' REFERENCES {self.tables[column.parent].name}(id)')
        )
        columns.append(f'{column.name} INTEGER{refers}')
      yield f'CREATE TABLE {table.name} ({", ".join(columns)})'


def locate(db_id: str) -> tuple[int, str]:
  """Returns (seed, split) of the database with an id.

  Args:
    db_id: 'synth_' and the number over all splits.

  Raises:
    ValueError: no database has it.
  """
  digits = db_id.removeprefix('synth_')
  if digits.isdecimal() and db_id == f'synth_{int(digits)}':
    place, seed = divmod(int(digits), SPLIT_SEEDS)
    if place < len(SPLITS):
      return seed, SPLITS[place]
  raise ValueError(
    f"db_id must be 'synth_' and a number below "
    f'{len(SPLITS) * SPLIT_SEEDS}: got {db_id!r}'
  )


@functools.lru_cache(maxsize=16)  # who writes one soon asks about it
def make(seed: int, split: str) -> Schema:
  """Makes up tables, columns and rows.

  Args:
    seed: number of the database within its split, below `SPLIT_SEEDS`.
    split: of `SPLITS`.

  Raises:
    ValueError: there is no such split, or no such database in it.
  """
  number = _number(seed, split)
  # Seeds that are texts are hashed by SHA-512: the same in every process.
  draw = random.Random(f'db:{number}')
  held_out = split == 'ood'
  names = words.OOD_NAMES if held_out else words.NAMES
  nouns = draw.sample(
    words.OOD_NOUNS if held_out else words.NOUNS, draw.randint(2, 4)
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
  asked = draw.sample(tuple(words.CONCEPTS), draw.randint(2, 3))
  return [
    Column(draw.choice(words.CONCEPTS[concept]), concept) for concept in asked
  ]


def _owners(draw: random.Random, count: int, parents: int) -> Sequence[int]:
  """Draws whose each of `count` rows is: a few ids of 1 .. parents.

  Two to four parents share the rows, cut anywhere: if every row drew a parent
  of its own, nearly all parents would have one row or two, and a guess would
  often be right.
  """
  some = draw.sample(range(1, parents + 1), draw.randint(2, min(4, parents)))
  cuts = sorted(draw.sample(range(1, count), len(some) - 1))
  shares = zip(some, [0, *cuts], [*cuts, count], strict=True)
  ids = [owner for owner, start, end in shares for _ in range(end - start)]
  draw.shuffle(ids)
  return ids
