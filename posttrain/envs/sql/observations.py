"""What the agent reads: the question at first, then a result or an error.

    how many dogs are there          Question: How many singers are there?
    tables: dogs, toys               Tables: singer, concert
    left: 8                          Steps left: 8

    result: Ann | 42; Bob | 17       Result:
    left: 7                          Ann | 42
                                     Bob | 17
                                     Steps left: 7

    error: no such column: pay       Error: no such column: pay
    left: 7                          Steps left: 7

The left is `compact`, made of few tokens for small models; the right is
`verbose`, behind a system prompt with the rules. An error is always shown.
"""

import dataclasses
import re

from posttrain import types
from posttrain.envs.sql import cells, database, record

QUERY_ROWS = 20  # of a result that are shown, and graded for progress
_SYSTEM = """\
You answer a question about a SQLite database that you cannot see at first. \
Explore it step by step. Every turn is one action, on a line of its own:

DESCRIBE: table     columns, types and number of rows of a table
SAMPLE: table       its first rows
QUERY: sql          the result of one SELECT statement
ANSWER: value       your answer, which ends the episode

You have {budget} steps, the answer included. Look at the tables first: you do \
not know what their columns are called. Several values are separated by "; ", \
the cells of a row by " | "; a value with such a character in it stands in \
double quotes."""


@dataclasses.dataclass(frozen=True)
class _Words:
  """How a style says it."""

  question: str
  tables: str
  left: str
  result: str
  error: str
  sample_rows: int
  characters: int  # of a result
  error_characters: int


_STYLES = {
  'compact': _Words(
    '{}', '\ntables: {}', '\nleft: {}', 'result: ', 'error: ', 3, 400, 60
  ),
  'verbose': _Words(
    'Question: {}',
    '\nTables: {}',
    '\nSteps left: {}',
    'Result:\n',
    'Error: ',
    5,
    2000,
    500,
  ),
}


class Observations:
  """Says it in a style."""

  def __init__(self, style: str, role: str):
    """Args: role: whose words they are: 'tool' or 'user'."""
    self._style, self._role = style, role
    self._words = _STYLES[style]
    self.sample_rows = self._words.sample_rows

  def prompt(
    self, question: str, tables: tuple[str, ...], budget: int
  ) -> types.Messages:
    """Asks the question."""
    words, messages = self._words, ()
    if self._style == 'verbose':
      system = _SYSTEM.format(budget=budget)
      messages = ({'role': 'system', 'content': system},)
    text = words.question.format(question)
    text += words.tables.format(', '.join(tables)) + words.left.format(budget)
    return (*messages, {'role': 'user', 'content': text})

  def result(self, text: str, action: str, left: int) -> types.Messages:
    """Shows what an action gave; a tool goes by its type: query, sample."""
    return self._say(self._words.result + text, action, left)

  def error(self, text: str, action: str, left: int) -> types.Messages:
    """Shows what was wrong with an action."""
    text = cells.cut(text, self._words.error_characters)
    return self._say(self._words.error + text, action, left)

  def rows(self, rows: record.Rows, more: bool) -> str:
    """Writes rows; `more`: there are others."""
    text, _ = cells.write(
      rows, style=self._style, more=more, limit=self._words.characters
    )
    return text

  def table(self, db: database.Database, table: str) -> str:
    """Describes a table."""
    columns, count = db.describe(table), db.count(table)
    if self._style == 'compact':
      names = ', '.join(name for name, _ in columns)
      return cells.cut(f'{names}; {count} rows', self._words.characters)
    lines = [f'{table}, {count} rows']
    lines += [f'{name} {kind}'.rstrip() for name, kind in columns]
    return cells.cut('\n'.join(lines), self._words.characters)

  def _say(self, text: str, action: str, left: int) -> types.Messages:
    named = {'name': action.lower()} if self._role == 'tool' else {}
    content = text + self._words.left.format(left)
    return ({'role': self._role, **named, 'content': content},)


_READ = re.compile(
  r'(?:(?:result: |Result:\n)(?P<result>.*)|[eE]rror: (?P<error>.*))'
  r'\n(?:left|Steps left): \d+',
  re.DOTALL,
)


def read(content: str) -> tuple[str | None, str | None]:
  """Returns the result and the error that an observation shows, or None."""
  found = _READ.fullmatch(content)
  return found.group('result', 'error') if found else (None, None)
