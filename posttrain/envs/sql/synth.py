"""Generated databases and questions about them, with gold SQL and answers.

A question names a concept, whose column has another name (`words`): medium and
hard questions require the names of the columns, easy ones do not.

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

A database has two to four tables with columns `id` and `name`, two or three
columns of numbers, and in part a foreign key. The result depends on the seed
alone, not on process, machine or version of SQLite; `fingerprint` is its hash.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import random
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence

from posttrain import schema
from posttrain.envs.sql import cells, database, questions, words

SPLITS = ('train', 'eval', 'ood')
SPLIT_SEEDS = 10**6  # number of databases of a split
PER_DIFFICULTY = 3  # questions per database
TEMPLATES = {
  'easy': ('E1', 'E2'),
  'medium': ('M1', 'M2', 'M3', 'M4'),
  'hard': ('H1', 'H2', 'H3', 'H4'),
}


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
  rows: tuple[tuple[cells.Cell, ...], ...]  # (id, name, *columns)

  @property
  def concepts(self) -> tuple[Column, ...]:
    return tuple(column for column in self.columns if column.concept)

  @property
  def foreign_key(self) -> Column | None:
    keys = (column for column in self.columns if column.parent is not None)
    return next(keys, None)


def number(seed: int, split: str) -> int:
  """Returns a database's number, unique over all splits.

  Args:
    seed: number of the database within its split, below `SPLIT_SEEDS`.
    split: one of `SPLITS`.
  """
  assert 0 <= seed < SPLIT_SEEDS, seed
  return SPLITS.index(split) * SPLIT_SEEDS + seed


@functools.lru_cache(maxsize=16)  # a database and its questions share it
def make(seed: int, split: str) -> tuple[Table, ...]:
  """Draws the tables of a database; see `number`."""
  # Python hashes text seeds by SHA-512: the same in every process.
  draw = random.Random(f'db:{number(seed, split)}')
  ood = split == 'ood'
  names = words.OOD_NAMES if ood else words.NAMES
  nouns = draw.sample(
    words.OOD_NOUNS if ood else words.NOUNS, draw.randint(2, 4)
  )
  tables: list[Table] = []
  for i, noun in enumerate(nouns):
    columns = [
      Column(draw.choice(words.CONCEPTS[concept]), concept)
      for concept in draw.sample(tuple(words.CONCEPTS), draw.randint(2, 3))
    ]
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
  return tuple(tables)


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


@functools.lru_cache(maxsize=8192)
def write(seed: int, split: str = 'train') -> bytes:
  """Returns a database as the bytes of a SQLite file; see `number`."""
  tables = make(seed, split)
  with contextlib.closing(sqlite3.connect(':memory:')) as connection:
    connection.execute('PRAGMA page_size = 512')  # a quarter of the bytes
    for table in tables:
      columns = ['id INTEGER PRIMARY KEY', 'name TEXT']
      for column in table.columns:
        columns.append(f'{column.name} INTEGER')
        if column.parent is not None:
          columns[-1] += f' REFERENCES {tables[column.parent].name}(id)'
      connection.execute(f'CREATE TABLE {table.name} ({", ".join(columns)})')
    for table in tables:
      marks = ', '.join('?' * len(table.rows[0]))
      connection.executemany(
        f'INSERT INTO {table.name} VALUES ({marks})', table.rows
      )
    connection.commit()
    return connection.serialize()


@functools.lru_cache(maxsize=8192)
def ask(seed: int, split: str = 'train') -> tuple[questions.Question, ...]:
  """Returns the questions about a database, with distinct texts; see `number`.

  Returns:
    [3 * PER_DIFFICULTY] easy, medium, hard, easy, ...
  """
  tables, db_id = make(seed, split), f'synth_{number(seed, split)}'
  draw = random.Random(f'q:{number(seed, split)}')
  by_text: dict[str, questions.Question] = {}
  kinds = questions.DIFFICULTIES
  with contextlib.closing(sqlite3.connect(':memory:')) as connection:
    connection.deserialize(write(seed, split))
    while len(by_text) < PER_DIFFICULTY * len(kinds):
      index = len(by_text)
      difficulty = kinds[index % len(kinds)]
      template = draw.choice(TEMPLATES[difficulty])
      draft = (_about_two if difficulty == 'hard' else _about_one)(
        template, draw, tables
      )
      if draft is None or draft[0] in by_text:
        continue
      text, gold_sql, answer_type, names = draft
      rows = tuple(connection.execute(gold_sql))
      assert rows and None not in rows[0], draft
      by_text[text] = questions.Question(
        id=f'{db_id}_{index:03}',
        db_id=db_id,
        text=text,
        gold_sql=gold_sql,
        gold_rows=rows,
        answer_type=answer_type,
        difficulty=difficulty,
        tables=names,
        template=template,
      )
  return tuple(by_text.values())


# Text, gold SQL, type of the answer, tables.
_Draft = tuple[str, str, str, tuple[str, ...]]


def _about_one(
  template: str, draw: random.Random, tables: Sequence[Table]
) -> _Draft:
  """Draws a question about one table."""
  table = draw.choice(tables)
  name, kind = table.name, 'integer'
  column = None if template[0] == 'E' else draw.choice(table.concepts)
  if template == 'E1':
    text, sql = f'how many {name} are there', f'SELECT COUNT(*) FROM {name}'
  elif template == 'E2':
    kind, number = 'string', draw.randint(1, len(table.rows))
    text = f'which of the {name} is number {number}'
    sql = f'SELECT name FROM {name} WHERE id = {number}'
  elif template == 'M1':
    owner = draw.choice(table.rows)[1]
    text = f'what is the {column.concept} of {owner} in {name}'
    sql = f"SELECT {column.name} FROM {name} WHERE name = '{owner}'"
  elif template == 'M2':
    kind = 'string'
    end, order = draw.choice((('highest', ' DESC'), ('lowest', '')))
    text = f'which of the {name} has the {end} {column.concept}'
    sql = f'SELECT name FROM {name} ORDER BY {column.name}{order} LIMIT 1'
  elif template == 'M3':
    bound = draw.randint(1, 99)
    side, sign = draw.choice((('above', '>'), ('below', '<')))
    text = f'how many {name} have {column.concept} {side} {bound}'
    sql = f'SELECT COUNT(*) FROM {name} WHERE {column.name} {sign} {bound}'
  else:
    text = f'what is the total {column.concept} of {name}'
    sql = f'SELECT SUM({column.name}) FROM {name}'
  return text, sql, kind, (name,)


def _about_two(
  template: str, draw: random.Random, tables: Sequence[Table]
) -> _Draft | None:
  """Draws a question about a table with a foreign key and its parent."""
  child = draw.choice([each for each in tables if each.foreign_key])
  key = child.foreign_key
  parent = tables[key.parent]
  a, b = child.name, parent.name
  source = f'FROM {a} JOIN {b} ON {a}.{key.name} = {b}.id'
  index = 2 + child.columns.index(key)
  owners = [row[index] for row in child.rows]
  if template == 'H4':
    most = sorted(Counter(owners).values())[-2:]
    if most[0] == most[1]:
      return None  # a tie
    text = f'which of the {b} has the most {a}'
    sql = (
      f'SELECT {b}.name {source} GROUP BY {b}.id ORDER BY COUNT(*) DESC LIMIT 1'
    )
    return text, sql, 'string', (a, b)
  # Drawn by rows, so that owners of one row, the best guess, are rare.
  owner = parent.rows[draw.choice(owners) - 1][1]
  source += f" WHERE {b}.name = '{owner}'"
  kind = 'integer'
  if template == 'H1':
    text = f'how many {a} belong to {owner} in {b}'
    sql = f'SELECT COUNT(*) {source}'
  elif template == 'H2':
    column = draw.choice(child.concepts)
    text = (
      f'what is the highest {column.concept} of {a} that belong to '
      f'{owner} in {b}'
    )
    sql = f'SELECT MAX({a}.{column.name}) {source}'
  else:
    kind = 'list'
    text = f'which {a} belong to {owner} in {b}'
    sql = f'SELECT {a}.name {source}'
  return text, sql, kind, (a, b)


def fingerprint(seeds: Iterable[int], split: str = 'train') -> str:
  """Returns the SHA-256 of databases and the questions about them.

  It hashes the tables' contents and not the file's bytes, which depend on the
  version of SQLite.

  Args:
    seeds: numbers of the databases within their split.
    split: one of `SPLITS`.
  """
  digest = hashlib.sha256()
  for seed in seeds:
    with contextlib.closing(sqlite3.connect(':memory:')) as connection:
      connection.deserialize(write(seed, split))
      tables = connection.execute(
        'SELECT name, sql FROM sqlite_master ORDER BY rowid'
      ).fetchall()
      contents = [
        (sql, connection.execute(f'SELECT * FROM {name}').fetchall())
        for name, sql in tables
      ]
    records = [dataclasses.asdict(question) for question in ask(seed, split)]
    for fields in records:  # those of files alone
      del fields['other_golds'], fields['ranks']
    digest.update(json.dumps([contents, records], sort_keys=True).encode())
  return digest.hexdigest()


class Synth:
  """`schema.SqlSynth`: a data source; databases are generated on access."""

  def __init__(
    self, name: str, cfg: schema.SqlSynth, difficulties: Sequence[str]
  ):
    """Builds the source.

    Args:
      name: the environment's name; not used.
      cfg: the options.
      difficulties: difficulties of the questions.
    """
    del name
    self._cfg, self._difficulties = cfg, tuple(difficulties)

  def select(self, split: str) -> Sequence[questions.Question]:
    """Returns the questions of a split, database by database."""
    return _Questions(*self._range(split), self._difficulties)

  def fingerprint(self, split: str) -> str:
    """Returns the hash of the split's first eight databases and questions."""
    count, split = self._range(split)
    return fingerprint(range(min(count, 8)), split)

  def open(self, db_id: str) -> database.Database:
    """Opens a database in memory."""
    return database.Database.from_bytes(write(*_locate(db_id)))

  def tables(self, db_id: str) -> tuple[str, ...]:
    """Returns the names of a database's tables."""
    return tuple(table.name for table in make(*_locate(db_id)))

  def _range(self, split: str) -> tuple[int, str]:
    """Returns the number of databases, and the split that they belong to."""
    if split == 'train':
      return self._cfg.train_databases, split
    return self._cfg.eval_databases, self._cfg.eval_split


def _locate(db_id: str) -> tuple[int, str]:
  """Returns (seed, split) of the database with an id."""
  split, seed = divmod(int(db_id.removeprefix('synth_')), SPLIT_SEEDS)
  return seed, SPLITS[split]


@dataclasses.dataclass(frozen=True)
class _Questions(Sequence):
  """A sequence of questions, each built on access."""

  databases: int
  split: str
  difficulties: tuple[str, ...]

  def __len__(self) -> int:
    return self.databases * PER_DIFFICULTY * len(self.difficulties)

  def __getitem__(self, index: int) -> questions.Question:
    each = PER_DIFFICULTY * len(self.difficulties)
    seed, place = divmod(range(len(self))[index], each)
    return [
      question
      for question in ask(seed, self.split)
      if question.difficulty in self.difficulties
    ][place]
