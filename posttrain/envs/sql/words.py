"""The closed lists of words that generated databases and questions are made of.

No word has two roles, and none that can stand in a database is a keyword of
SQL. A concept is a word of questions alone: its column has one of three other
names, so that a question does not tell which column it asks for. The tables
and names of split 'ood' are in no other split.
"""

# Things, each a table; a table is called by the plural, which adds an s.
NOUNS = tuple(
  'dog toy farm ship barn team band shop song club boat tree cake book robot '
  'lake cart lamp drum kite coin horn tent bird frog goat duck hotel train '
  'clock chair plant'.split()
)
OOD_NOUNS = tuple(
  'camel wagon cabin piano wheel onion lemon tower river garden mirror '
  'rocket'.split()
)

# What a row is called.
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

# What a question asks for -> what the column may be called.
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

# Columns of every table, and the ends of those that name a row of another.
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
ACTIONS = ('DESCRIBE', 'SAMPLE', 'QUERY', 'ANSWER')
# What the environment says, errors of SQLite included.
OBSERVATION = tuple(
  'tables left result rows error empty null no such table column function '
  'near syntax ambiguous incomplete input'.split()
)
SIGNS = tuple('0123456789.,;:()*=<>|\'"_-')


def plural(noun: str) -> str:
  """Returns what the table of a noun is called."""
  return f'{noun}s'


def foreign_key(noun: str, suffix: str) -> str:
  """Returns the column that says which row of a noun's table is meant.

  Args:
    noun: of `NOUNS` or `OOD_NOUNS`.
    suffix: of `SUFFIXES`.
  """
  return f'{noun}_{suffix}'


def vocabulary() -> tuple[str, ...]:
  """Returns every word that questions, SQL and observations are made of.

  Of all splits, so that held-out words have ids too. A number is spelled by
  its digits, a foreign key as a noun, '_' and a suffix. No word twice; the
  order is fixed.
  """
  nouns = NOUNS + OOD_NOUNS
  columns = [column for trio in CONCEPTS.values() for column in trio]
  return tuple(
    dict.fromkeys(
      (
        *SIGNS,
        *ACTIONS,
        *SQL,
        *OBSERVATION,
        *TEMPLATE,
        *COLUMNS,
        *SUFFIXES,
        *CONCEPTS,
        *columns,
        *map(plural, nouns),
        *nouns,
        *NAMES,
        *OOD_NAMES,
      )
    )
  )
