"""Texts of the environment: the question, then a result or error per step.

    how many dogs are there          Question: How many singers are there?
    tables: dogs, toys               Tables: singer, concert
    left: 8                          Steps left: 8

    result: Ann | 42; Bob | 17       Result:
    left: 7                          Ann | 42
                                     Bob | 17
                                     Steps left: 7

    error: no such column: pay       Error: no such column: pay
    left: 7                          Steps left: 7

Left: style `compact`, few tokens, for small models. Right: style `verbose`,
after a system prompt with the rules. Errors are always shown.
"""

import dataclasses
import re

from posttrain import types
from posttrain.envs.sql import cells, database, record

QUERY_ROWS = 20  # rows of a result that are shown, and graded for progress
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
class _Style:
  """Text templates and limits of a style."""

  question: str
  tables: str
  left: str
  result: str
  error: str
  sample_rows: int
  characters: int  # maximum of a result
  error_characters: int  # maximum of an error


_STYLES = {
  'compact': _Style(
    '{}', '\ntables: {}', '\nleft: {}', 'result: ', 'error: ', 3, 400, 60
  ),
  'verbose': _Style(
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


class Writer:
  """Writes prompts and observations in one style.

  Attributes:
    sample_rows: number of rows that SAMPLE shows.
  """

  def __init__(self, style: str, role: str):
    """Builds a writer.

    Args:
      style: 'compact' or 'verbose'.
      role: role of the observations, 'tool' or 'user'.
    """
    self._style_name, self._role = style, role
    self._style = _STYLES[style]
    self.sample_rows = self._style.sample_rows

  def prompt(
    self, question: str, tables: tuple[str, ...], budget: int
  ) -> types.Messages:
    """Returns the messages that ask a question."""
    style, messages = self._style, ()
    if self._style_name == 'verbose':
      system = _SYSTEM.format(budget=budget)
      messages = ({'role': 'system', 'content': system},)
    text = style.question.format(question)
    text += style.tables.format(', '.join(tables)) + style.left.format(budget)
    return (*messages, {'role': 'user', 'content': text})

  def result(self, text: str, action: str, left: int) -> types.Messages:
    """Returns the observation of a result.

    Args:
      text: the result.
      action: the action's type; a message of role 'tool' has it as its name.
      left: number of steps left.
    """
    return self._observe(self._style.result + text, action, left)

  def error(self, text: str, action: str, left: int) -> types.Messages:
    """Returns the observation of an error, see `result`."""
    text = cells.cut(text, self._style.error_characters)
    return self._observe(self._style.error + text, action, left)

  def rows(self, rows: record.Rows, more: bool) -> str:
    """Writes rows; `more`: whether the result has further rows."""
    text, _ = cells.write(
      rows, style=self._style_name, more=more, limit=self._style.characters
    )
    return text

  def table(self, db: database.Database, table: str) -> str:
    """Writes a table's columns and its number of rows."""
    columns, count = db.describe(table), db.count(table)
    if self._style_name == 'compact':
      names = ', '.join(name for name, _ in columns)
      return cells.cut(f'{names}; {count} rows', self._style.characters)
    lines = [f'{table}, {count} rows']
    lines += [f'{name} {kind}'.rstrip() for name, kind in columns]
    return cells.cut('\n'.join(lines), self._style.characters)

  def _observe(self, text: str, action: str, left: int) -> types.Messages:
    name = {'name': action.lower()} if self._role == 'tool' else {}
    content = text + self._style.left.format(left)
    return ({'role': self._role, **name, 'content': content},)


_READ = re.compile(
  r'(?:(?:result: |Result:\n)(?P<result>.*)|[eE]rror: (?P<error>.*))'
  r'\n(?:left|Steps left): \d+',
  re.DOTALL,
)


def read(content: str) -> tuple[str | None, str | None]:
  """Returns (result, error) of an observation, each None if absent."""
  match = _READ.fullmatch(content)
  return match.group('result', 'error') if match else (None, None)
