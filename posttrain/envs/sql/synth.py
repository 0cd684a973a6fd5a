"""Generated databases and questions about them, with gold SQL and answers.

A question names a concept, whose column has another name (`schemas`): medium
and hard questions require the names of the columns, easy ones do not.

    easy    E1  how many dogs are there
            E2  which of the dogs is number 3
    medium  M1  what is the pay of Ann in dogs
            M2  which of the dogs has the highest pay
            M3  how many dogs have pay above 40
            M4  what is the total pay of dogs
    hard    H1  how many toys belong to Ann in dogs
            H2  what is the highest price of toys that belong to Ann in dogs
            H3  which toys belong to Ann in dogs
            H4  which of the dogs has the most toys

The result depends on the seed alone, not on process, machine or version of
SQLite; `fingerprint` is its hash.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import random
import sqlite3
from collections import Counter
from collections.abc import Iterable
from typing import Any

from posttrain.envs.sql import record, schemas

PER_DIFFICULTY = 3  # questions per database


@functools.lru_cache(maxsize=8192)
def database(seed: int, split: str = 'train') -> bytes:
  """Returns a database as the bytes of a SQLite file.

  Args:
    seed: number of the database within its split, see `schemas.make`.
    split: one of `schemas.SPLITS`.

  Raises:
    ValueError: the split or the seed does not exist.
  """
  return _write(schemas.make(seed, split))


def open_id(db_id: str) -> bytes:
  """Returns the database with an id as the bytes of a SQLite file.

  Args:
    db_id: an id as in `record.Question.db_id`.

  Raises:
    ValueError: no generated database has this id.
  """
  return database(*schemas.locate(db_id))


@functools.lru_cache(maxsize=8192)
def questions(seed: int, split: str = 'train') -> tuple[record.Question, ...]:
  """Returns the questions about a database, with distinct texts.

  Args:
    seed: number of the database within its split, see `schemas.make`.
    split: one of `schemas.SPLITS`.

  Returns:
    [3 * PER_DIFFICULTY] easy, medium, hard, easy, ...

  Raises:
    ValueError: the split or the seed does not exist.
  """
  schema = schemas.make(seed, split)
  draw = random.Random(f'q:{schema.number}')
  by_text: dict[str, record.Question] = {}
  with contextlib.closing(sqlite3.connect(':memory:')) as connection:
    connection.deserialize(database(seed, split))
    while len(by_text) < PER_DIFFICULTY * len(record.DIFFICULTIES):
      index = len(by_text)
      difficulty = record.DIFFICULTIES[index % len(record.DIFFICULTIES)]
      template = draw.choice(tuple(_TEMPLATES[difficulty]))
      draft = _TEMPLATES[difficulty][template](draw, schema)
      if draft is None or draft.text in by_text:
        continue
      rows = tuple(connection.execute(draft.gold_sql))
      assert rows and None not in rows[0], draft
      by_text[draft.text] = record.Question(
        id=f'{schema.db_id}_{index:03}',
        db_id=schema.db_id,
        gold_rows=rows,
        difficulty=difficulty,
        template=template,
        **vars(draft),
      )
  return tuple(by_text.values())


def fingerprint(seeds: Iterable[int], split: str = 'train') -> str:
  """Returns the SHA-256 of databases and the questions about them.

  It hashes the tables' contents and not the file's bytes, which depend on the
  version of SQLite.

  Args:
    seeds: numbers of the databases within their split.
    split: one of `schemas.SPLITS`.
  """
  digest = hashlib.sha256()
  for seed in seeds:
    with contextlib.closing(sqlite3.connect(':memory:')) as connection:
      connection.deserialize(database(seed, split))
      tables = connection.execute(
        'SELECT name, sql FROM sqlite_master ORDER BY rowid'
      ).fetchall()
      contents = [
        (sql, connection.execute(f'SELECT * FROM {name}').fetchall())
        for name, sql in tables
      ]
    records = [_generated(each) for each in questions(seed, split)]
    digest.update(json.dumps([contents, records], sort_keys=True).encode())
  return digest.hexdigest()


def _generated(question: record.Question) -> dict[str, Any]:
  """Returns the fields of a question, except the ones of files alone."""
  fields = dataclasses.asdict(question)
  return {k: v for k, v in fields.items() if k not in ('other_golds', 'ranks')}


def _write(schema: schemas.Schema) -> bytes:
  with contextlib.closing(sqlite3.connect(':memory:')) as connection:
    connection.execute('PRAGMA page_size = 512')  # a quarter of the bytes
    for statement in schema.statements():
      connection.execute(statement)
    for table in schema.tables:
      marks = ', '.join('?' * len(table.rows[0]))
      connection.executemany(
        f'INSERT INTO {table.name} VALUES ({marks})', table.rows
      )
    connection.commit()
    return connection.serialize()


@dataclasses.dataclass(frozen=True)
class _Draft:
  """A question without its gold answer; see `record.Question`."""

  text: str
  gold_sql: str
  answer_type: str
  tables: tuple[str, ...]


def _e1(draw: random.Random, schema: schemas.Schema) -> _Draft:
  table = draw.choice(schema.tables).name
  return _Draft(
    f'how many {table} are there',
    f'SELECT COUNT(*) FROM {table}',
    'integer',
    (table,),
  )


def _e2(draw: random.Random, schema: schemas.Schema) -> _Draft:
  table = draw.choice(schema.tables)
  number = draw.randint(1, len(table.rows))
  return _Draft(
    f'which of the {table.name} is number {number}',
    f'SELECT name FROM {table.name} WHERE id = {number}',
    'string',
    (table.name,),
  )


def _m1(draw: random.Random, schema: schemas.Schema) -> _Draft:
  table = draw.choice(schema.tables)
  column, name = draw.choice(table.concepts), draw.choice(table.rows)[1]
  return _Draft(
    f'what is the {column.concept} of {name} in {table.name}',
    f"SELECT {column.name} FROM {table.name} WHERE name = '{name}'",
    'integer',
    (table.name,),
  )


def _m2(draw: random.Random, schema: schemas.Schema) -> _Draft:
  table = draw.choice(schema.tables)
  column = draw.choice(table.concepts)
  end, order = draw.choice((('highest', ' DESC'), ('lowest', '')))
  return _Draft(
    f'which of the {table.name} has the {end} {column.concept}',
    f'SELECT name FROM {table.name} ORDER BY {column.name}{order} LIMIT 1',
    'string',
    (table.name,),
  )


def _m3(draw: random.Random, schema: schemas.Schema) -> _Draft:
  table = draw.choice(schema.tables)
  column, bound = draw.choice(table.concepts), draw.randint(1, 99)
  side, sign = draw.choice((('above', '>'), ('below', '<')))
  return _Draft(
    f'how many {table.name} have {column.concept} {side} {bound}',
    f'SELECT COUNT(*) FROM {table.name} WHERE {column.name} {sign} {bound}',
    'integer',
    (table.name,),
  )


def _m4(draw: random.Random, schema: schemas.Schema) -> _Draft:
  table = draw.choice(schema.tables)
  column = draw.choice(table.concepts)
  return _Draft(
    f'what is the total {column.concept} of {table.name}',
    f'SELECT SUM({column.name}) FROM {table.name}',
    'integer',
    (table.name,),
  )


@dataclasses.dataclass(frozen=True)
class _Pair:
  """A table with a foreign key, and the table that it refers to."""

  child: schemas.Table
  parent: schemas.Table
  owners: tuple[record.Cell, ...]  # parent's id of each row of the child
  join: str  # FROM and JOIN clauses

  @property
  def tables(self) -> tuple[str, ...]:
    return self.child.name, self.parent.name

  @classmethod
  def draw(cls, draw: random.Random, schema: schemas.Schema) -> '_Pair':
    child = draw.choice([each for each in schema.tables if each.foreign_key])
    key = child.foreign_key
    parent = schema.tables[key.parent]
    join = (
      f'FROM {child.name} JOIN {parent.name} '
      f'ON {child.name}.{key.name} = {parent.name}.id'
    )
    return cls(child, parent, child.values(key), join)

  def draw_owner(self, draw: random.Random) -> tuple[str, str]:
    """Returns ('Ann in dogs', join and condition) of a random row's owner."""
    # Drawn by rows, so that owners of one row, the best guess, are rare.
    name = self.parent.rows[draw.choice(self.owners) - 1][1]
    where = f"WHERE {self.parent.name}.name = '{name}'"
    return f'{name} in {self.parent.name}', f'{self.join} {where}'


def _h1(draw: random.Random, schema: schemas.Schema) -> _Draft:
  pair = _Pair.draw(draw, schema)
  owner, source = pair.draw_owner(draw)
  return _Draft(
    f'how many {pair.child.name} belong to {owner}',
    f'SELECT COUNT(*) {source}',
    'integer',
    pair.tables,
  )


def _h2(draw: random.Random, schema: schemas.Schema) -> _Draft:
  pair = _Pair.draw(draw, schema)
  owner, source = pair.draw_owner(draw)
  child, column = pair.child.name, draw.choice(pair.child.concepts)
  return _Draft(
    f'what is the highest {column.concept} of {child} that belong to {owner}',
    f'SELECT MAX({child}.{column.name}) {source}',
    'integer',
    pair.tables,
  )


def _h3(draw: random.Random, schema: schemas.Schema) -> _Draft:
  pair = _Pair.draw(draw, schema)
  owner, source = pair.draw_owner(draw)
  return _Draft(
    f'which {pair.child.name} belong to {owner}',
    f'SELECT {pair.child.name}.name {source}',
    'list',
    pair.tables,
  )


def _h4(draw: random.Random, schema: schemas.Schema) -> _Draft | None:
  pair = _Pair.draw(draw, schema)
  most = sorted(Counter(pair.owners).values())[-2:]
  if most[0] == most[1]:
    return None  # a tie
  child, parent = pair.tables
  return _Draft(
    f'which of the {parent} has the most {child}',
    f'SELECT {parent}.name {pair.join} GROUP BY {parent}.id '
    'ORDER BY COUNT(*) DESC LIMIT 1',
    'string',
    pair.tables,
  )


_TEMPLATES = {
  'easy': {'E1': _e1, 'E2': _e2},
  'medium': {'M1': _m1, 'M2': _m2, 'M3': _m3, 'M4': _m4},
  'hard': {'H1': _h1, 'H2': _h2, 'H3': _h3, 'H4': _h4},
}
