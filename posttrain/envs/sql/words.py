"""Closed lists of the words of generated databases and questions.

No word has two roles, and no word of a database is a keyword of SQL. A concept
occurs in questions only: its column has one of three other names, so that a
question does not reveal the name of its column. The tables and names of split
'ood' are in no other split. `tokenizer` has an id for each word.
"""

from posttrain.chat import tokenizers

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

# A word, digit or sign with at most one space before it; a name without it, so
# that it is the same in quotes; white space.
_PIECES = (
  r' ?[a-z]+(?:_[a-z]+)*| ?[A-Z]+(?![a-z])|[A-Z][a-z]*| ?[0-9]'
  r'| ?[^\sA-Za-z0-9]|\s'
)


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
  by their digits. Words are unique, their order is fixed.
  """
  nouns = NOUNS + OOD_NOUNS
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
        *(column for names in CONCEPTS.values() for column in names),
        *map(plural, nouns),
        *nouns,
        *NAMES,
        *OOD_NAMES,
        *(foreign_key(noun, x) for x in SUFFIXES for noun in nouns),
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
