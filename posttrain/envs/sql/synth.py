"""Generated databases and questions about them, with gold SQL and answers.

A question names a concept, whose column has another name (`CONCEPTS`): medium
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

A database has two to four tables with columns `id` and `name`, two or three
columns of numbers, and in part a foreign key. The result depends on the seed
alone, not on process, machine or version of SQLite; `fingerprint` is its hash.

The words are closed lists. No word has two roles, and no word of a database is
a keyword of SQL. A concept occurs in questions only: its column has one of
three other names, so that a question does not reveal the name of its column.
The tables and names of split 'ood' are in no other split. `tokenizer` has an id
for each word.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import random
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence

from posttrain import schema
from posttrain.chat import tokenizers
from posttrain.envs import base
from posttrain.envs.sql import database, dialogue, questions

# One table each, named by the plural with s.
NOUNS = tuple(
  'dog toy farm ship barn team band shop song club boat tree cake book robot '
  'lake cart lamp drum kite coin horn tent bird frog goat duck hotel train '
  'clock chair plant'.split()
)
OOD_NOUNS = tuple(
  'camel wagon cabin piano wheel onion lemon tower river garden mirror '
  'rocket'.split()
)

# Values of the column `name`.
NAMES = tuple(
  'Ada Alma Ann Arlo Ben Bea Boris Cara Cleo Cyrus Dan Dora Dina Eli Emma '
  'Eva Fay Felix Finn Gil Greta Gus Hana Hugo Ian Ida Iris Jon Julia Kim '
  'Kurt Lea Leo Lola Milo Mona Nora Nils Olga Otto Paul Pia Quin Rex Rita '
  'Ruth Sara Sven Tom Tina Ugo Vera Wes Wilma Yuri Zara Zoe'.split()
)
OOD_NAMES = tuple(
  'Anton Berta Clara David Edgar Frida Gloria Henry Ivan Janet Klaus Laura '
  'Maria Nina Oscar Petra Ralf Susan Viktor'.split()
)

# Concept in a question -> possible names of its column.
CONCEPTS = {
  'age': ('years', 'seniority', 'lifetime'),
  'pay': ('salary', 'wage', 'income'),
  'size': ('volume', 'extent', 'bulk'),
  'weight': ('mass', 'kilos', 'heft'),
  'price': ('cost', 'fee', 'charge'),
  'score': ('points', 'marks', 'tally'),
  'height': ('altitude', 'elevation', 'stature'),
  'speed': ('velocity', 'pace', 'tempo'),
  'stock': ('supply', 'inventory', 'reserve'),
  'rank': ('tier', 'level', 'standing'),
  'hours': ('duration', 'shift', 'workload'),
  'rating': ('stars', 'grade', 'quality'),
}
CONCEPT_OF = {
  column: concept for concept, columns in CONCEPTS.items() for column in columns
}

# Columns of every table, and suffixes of foreign keys.
COLUMNS = ('id', 'name')
SUFFIXES = ('id', 'ref', 'no')

# Words of questions that are neither tables, names, concepts nor numbers.
TEMPLATE = tuple(
  'how many are there which of the is number what in has have highest lowest '
  'above below total belong to that most'.split()
)

# Words of gold SQL.
SQL = tuple(
  'SELECT FROM WHERE JOIN ON GROUP ORDER BY DESC LIMIT COUNT SUM MAX'.split()
)
# Words of observations, with those of SQLite's errors.
OBSERVATION = tuple(
  'tables left result rows error empty null no such table column function '
  'near syntax ambiguous incomplete input'.split()
)
SIGNS = tuple('0123456789.,;:()*=<>|\'"_-')

# A word, digit or sign with at most one space before it; a name without it, so
# that it is the same in quotes; white space.
_PIECES = (
  r' ?[a-z]+(?:_[a-z]+)*| ?[A-Z]+(?![a-z])|[A-Z][a-z]*| ?[0-9]'
  r'| ?[^\sA-Za-z0-9]|\s'
)

SPLITS = ('train', 'eval', 'ood')
SPLIT_SEEDS = 10**6  # number of databases of a split
PER_DIFFICULTY = 3  # questions per database
TEMPLATES = {
  'easy': ('E1', 'E2'),
  'medium': ('M1', 'M2', 'M3', 'M4'),
  'hard': ('H1', 'H2', 'H3', 'H4'),
}
# Types of answers other than integer.
_TYPES = {'E2': 'string', 'M2': 'string', 'H3': 'list', 'H4': 'string'}


@dataclasses.dataclass(frozen=True)
class Table:
  """A table with its rows."""

  name: str
  # Besides `id` and `name`; of whole numbers. A foreign key has no concept.
  columns: tuple[str, ...]
  rows: tuple[tuple[database.Cell, ...], ...]  # (id, name, *columns)

  @property
  def concepts(self) -> list[str]:
    return [column for column in self.columns if column in CONCEPT_OF]

  @property
  def foreign_key(self) -> str | None:
    keys = (column for column in self.columns if column not in CONCEPT_OF)
    return next(keys, None)


def parent(foreign_key: str) -> str:
  """Returns the name of the table that a foreign key refers to."""
  return f'{foreign_key.rpartition("_")[0]}s'


def numbers(split: str, count: int, first: int = 0) -> range:
  """Returns the numbers of databases, unique over all splits.

  Args:
    split: one of `SPLITS`.
    count: how many databases.
    first: number of the first one within its split.
  """
  assert 0 <= first <= first + count <= SPLIT_SEEDS, (first, count)
  start = SPLITS.index(split) * SPLIT_SEEDS + first
  return range(start, start + count)


@functools.lru_cache(maxsize=16)  # a database and its questions share it
def make(number: int) -> tuple[Table, ...]:
  """Draws the tables of a database; see `numbers`."""
  # Python hashes text seeds by SHA-512: the same in every process.
  draw = random.Random(f'db:{number}')
  ood = SPLITS[number // SPLIT_SEEDS] == 'ood'
  names = OOD_NAMES if ood else NAMES
  nouns = draw.sample(OOD_NOUNS if ood else NOUNS, draw.randint(2, 4))
  tables: dict[str, Table] = {}
  for i, noun in enumerate(nouns):
    columns = [
      draw.choice(CONCEPTS[concept])
      for concept in draw.sample(tuple(CONCEPTS), draw.randint(2, 3))
    ]
    if i == 1 or i > 1 and draw.random() < 0.5:
      columns.append(f'{nouns[draw.randrange(i)]}_{draw.choice(SUFFIXES)}')
    draw.shuffle(columns)
    count = draw.randint(4, 9)
    values = []
    for column in columns:
      if column in CONCEPT_OF:
        values.append(draw.sample(range(1, 100), count))
        continue
      # Two to four parents share the rows, in random proportions. With
      # independent draws nearly all parents would have one or two rows, and
      # guesses would often be correct.
      parents = len(tables[parent(column)].rows)
      ids = range(1, parents + 1)
      owners = draw.sample(ids, draw.randint(2, min(4, parents)))
      cuts = sorted(draw.sample(range(1, count), len(owners) - 1))
      shares = zip(owners, [0, *cuts], [*cuts, count], strict=True)
      keys = [owner for owner, start, end in shares for _ in range(end - start)]
      draw.shuffle(keys)
      values.append(keys)
    rows = zip(
      range(1, count + 1), draw.sample(names, count), *values, strict=True
    )
    name = f'{noun}s'
    tables[name] = Table(name, tuple(columns), tuple(rows))
  return tuple(tables.values())


@functools.lru_cache(maxsize=8192)
def write(number: int) -> bytes:
  """Returns a database as the bytes of a SQLite file; see `numbers`."""
  tables = make(number)
  with contextlib.closing(sqlite3.connect(':memory:')) as connection:
    connection.execute('PRAGMA page_size = 512')  # a quarter of the bytes
    for table in tables:
      columns = ['id INTEGER PRIMARY KEY', 'name TEXT']
      for column in table.columns:
        columns.append(f'{column} INTEGER')
        if column not in CONCEPT_OF:
          columns[-1] += f' REFERENCES {parent(column)}(id)'
      connection.execute(f'CREATE TABLE {table.name} ({", ".join(columns)})')
    for table in tables:
      marks = ', '.join('?' * len(table.rows[0]))
      connection.executemany(
        f'INSERT INTO {table.name} VALUES ({marks})', table.rows
      )
    connection.commit()
    return connection.serialize()


@functools.lru_cache(maxsize=8192)
def ask(number: int) -> tuple[questions.Question, ...]:
  """Returns the questions about a database, with distinct texts; see `numbers`.

  Returns:
    [3 * PER_DIFFICULTY] easy, medium, hard, easy, ...
  """
  tables, db_id = make(number), f'synth_{number}'
  draw = random.Random(f'q:{number}')
  by_text: dict[str, questions.Question] = {}
  kinds = tuple(TEMPLATES)
  with contextlib.closing(sqlite3.connect(':memory:')) as connection:
    connection.deserialize(write(number))
    while len(by_text) < PER_DIFFICULTY * len(kinds):
      index = len(by_text)
      difficulty = kinds[index % len(kinds)]
      template = draw.choice(TEMPLATES[difficulty])
      draft = (_about_two if difficulty == 'hard' else _about_one)(
        template, draw, tables
      )
      if draft is None or draft[0] in by_text:
        continue
      text, gold_sql, names = draft
      rows = tuple(connection.execute(gold_sql))
      assert rows and None not in rows[0], draft
      by_text[text] = questions.Question(
        id=f'{db_id}_{index:03}',
        db_id=db_id,
        text=text,
        gold_sql=gold_sql,
        gold_rows=rows,
        answer_type=_TYPES.get(template, 'integer'),
        difficulty=difficulty,
        tables=names,
        template=template,
      )
  return tuple(by_text.values())


_Draft = tuple[str, str, tuple[str, ...]]  # text, gold SQL, tables


def _about_one(
  template: str, draw: random.Random, tables: Sequence[Table]
) -> _Draft:
  """Draws a question about one table."""
  table = draw.choice(tables)
  name = table.name
  column = None if template[0] == 'E' else draw.choice(table.concepts)
  if template == 'E1':
    text, sql = f'how many {name} are there', f'SELECT COUNT(*) FROM {name}'
  elif template == 'E2':
    number = draw.randint(1, len(table.rows))
    text = f'which of the {name} is number {number}'
    sql = f'SELECT name FROM {name} WHERE id = {number}'
  elif template == 'M1':
    owner = draw.choice(table.rows)[1]
    text = f'what is the {CONCEPT_OF[column]} of {owner} in {name}'
    sql = f"SELECT {column} FROM {name} WHERE name = '{owner}'"
  elif template == 'M2':
    end, order = draw.choice((('highest', ' DESC'), ('lowest', '')))
    text = f'which of the {name} has the {end} {CONCEPT_OF[column]}'
    sql = f'SELECT name FROM {name} ORDER BY {column}{order} LIMIT 1'
  elif template == 'M3':
    bound = draw.randint(1, 99)
    side, sign = draw.choice((('above', '>'), ('below', '<')))
    text = f'how many {name} have {CONCEPT_OF[column]} {side} {bound}'
    sql = f'SELECT COUNT(*) FROM {name} WHERE {column} {sign} {bound}'
  else:
    text = f'what is the total {CONCEPT_OF[column]} of {name}'
    sql = f'SELECT SUM({column}) FROM {name}'
  return text, sql, (name,)


def _about_two(
  template: str, draw: random.Random, tables: Sequence[Table]
) -> _Draft | None:
  """Draws a question about a table with a foreign key and its parent."""
  child = draw.choice([each for each in tables if each.foreign_key])
  key = child.foreign_key
  a, b = child.name, parent(key)
  source = f'FROM {a} JOIN {b} ON {a}.{key} = {b}.id'
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
    return text, sql, (a, b)
  # Drawn by rows, so that owners of one row, the best guess, are rare.
  rows = {table.name: table.rows for table in tables}[b]
  owner = rows[draw.choice(owners) - 1][1]
  source += f" WHERE {b}.name = '{owner}'"
  if template == 'H1':
    text = f'how many {a} belong to {owner} in {b}'
    sql = f'SELECT COUNT(*) {source}'
  elif template == 'H2':
    column = draw.choice(child.concepts)
    text = (
      f'what is the highest {CONCEPT_OF[column]} of {a} that belong to '
      f'{owner} in {b}'
    )
    sql = f'SELECT MAX({a}.{column}) {source}'
  else:
    text = f'which {a} belong to {owner} in {b}'
    sql = f'SELECT {a}.name {source}'
  return text, sql, (a, b)


def fingerprint(numbers: Iterable[int]) -> str:
  """Returns the SHA-256 of databases and the questions about them.

  It hashes the tables' contents and not the file's bytes, which depend on the
  version of SQLite.

  Args:
    numbers: of the databases, see `numbers`.
  """
  digest = hashlib.sha256()
  for number in numbers:
    with contextlib.closing(sqlite3.connect(':memory:')) as connection:
      connection.deserialize(write(number))
      tables = connection.execute(
        'SELECT name, sql FROM sqlite_master ORDER BY rowid'
      ).fetchall()
      contents = [
        (sql, connection.execute(f'SELECT * FROM {name}').fetchall())
        for name, sql in tables
      ]
    records = [dict(vars(question)) for question in ask(number)]
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
    self._difficulties = difficulties
    self._numbers = {
      'train': numbers('train', cfg.train_databases),
      'eval': numbers(cfg.eval_split, cfg.eval_databases),
    }

  def select(self, split: str) -> Sequence[questions.Question]:
    """Returns the questions of a split, database by database."""
    databases = self._numbers[split]
    each = PER_DIFFICULTY * len(self._difficulties)

    def question(index: int) -> questions.Question:
      kept = (
        x
        for x in ask(databases[index // each])
        if x.difficulty in self._difficulties
      )
      return next(itertools.islice(kept, index % each, None))

    return base.Tasks(range(each * len(databases)), question)

  def fingerprint(self, split: str) -> str:
    """Returns the hash of the split's first eight databases and questions."""
    return fingerprint(self._numbers[split][:8])

  def open(self, db_id: str) -> database.Database:
    """Opens a database in memory."""
    return database.Database(write(_number(db_id)))

  def tables(self, db_id: str) -> tuple[str, ...]:
    """Returns the names of a database's tables."""
    return tuple(table.name for table in make(_number(db_id)))


def _number(db_id: str) -> int:
  return int(db_id.removeprefix('synth_'))


def vocabulary() -> tuple[str, ...]:
  """Returns every word of questions, SQL and observations.

  It covers all splits, so that held-out words have ids too. Numbers are spelled
  by their digits. Words are unique, their order is fixed.
  """
  nouns = NOUNS + OOD_NOUNS
  return tuple(
    dict.fromkeys(
      (
        *SIGNS,
        *dialogue.TYPES,
        *SQL,
        *OBSERVATION,
        *TEMPLATE,
        *COLUMNS,
        *SUFFIXES,
        *CONCEPTS,
        *(column for names in CONCEPTS.values() for column in names),
        *(f'{noun}s' for noun in nouns),
        *nouns,
        *NAMES,
        *OOD_NAMES,
        *(f'{noun}_{x}' for x in SUFFIXES for noun in nouns),
      )
    )
  )


def tokenizer() -> str:
  """Returns the text of the tokenizer.json of `vocabulary`.

  A word is one id, with or without a space before it. A digit is one id. All
  other text is encoded byte by byte, so that every text round-trips.
  """
  import tokenizers as library  # late: environments do not need it

  byte_level = library.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
  pieces = [
    byte_level.pre_tokenize_str(f'{space}{word}')[0][0]
    for word in vocabulary()
    for space in (' ', '')
  ]
  texts = dict.fromkeys((*alphabet, *pieces))
  result = library.Tokenizer(
    library.models.BPE(
      vocab={text: i for i, text in enumerate(texts)},
      merges=[],
      ignore_merges=True,  # a piece that is a word is its id
    )
  )
  split = library.pre_tokenizers.Split(library.Regex(_PIECES), 'isolated')
  result.pre_tokenizer = library.pre_tokenizers.Sequence([split, byte_level])
  result.decoder = library.decoders.ByteLevel()
  result.add_special_tokens(list(tokenizers.SPECIALS))
  return result.to_str(pretty=True) + '\n'
