"""Closed lists of the words of generated databases and questions.

No word has two roles, and no word of a database is a keyword of SQL. A concept
occurs in questions only: its column has one of three other names, so that a
question does not reveal the name of its column. The tables and names of split
'ood' are in no other split.
"""

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
ACTIONS = ('DESCRIBE', 'SAMPLE', 'QUERY', 'ANSWER')
# Words of observations, with those of SQLite's errors.
OBSERVATION = tuple(
  'tables left result rows error empty null no such table column function '
  'near syntax ambiguous incomplete input'.split()
)
SIGNS = tuple('0123456789.,;:()*=<>|\'"_-')


def plural(noun: str) -> str:
  """Returns the name of a noun's table."""
  return f'{noun}s'


def foreign_key(noun: str, suffix: str) -> str:
  """Returns the name of a column that refers to rows of a noun's table.

  Args:
    noun: one of `NOUNS` or `OOD_NOUNS`.
    suffix: one of `SUFFIXES`.
  """
  return f'{noun}_{suffix}'


def vocabulary() -> tuple[str, ...]:
  """Returns every word of questions, SQL and observations.

  It covers all splits, so that held-out words have ids too. Numbers are spelled
  by their digits, foreign keys as a noun, '_' and a suffix. Words are unique,
  their order is fixed.
  """
  nouns = NOUNS + OOD_NOUNS
  columns = [column for names in CONCEPTS.values() for column in names]
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
