"""Texts of the environment: actions of the policy, and the observations.

    line := ("DESCRIBE" | "SAMPLE" | "QUERY" | "ANSWER") ":"? argument

in upper or lower case. The first such line of a turn is its action; other lines
are ignored. A turn without one is read as SQL. The question comes first, then a
result or error per step:

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
from posttrain.envs.sql import cells, database

TYPES = ('DESCRIBE', 'SAMPLE', 'QUERY', 'ANSWER')
QUERY_ROWS = 20  # rows of a result that are shown, and graded for progress

# A keyword alone on its line is an action with an empty argument.
_HEAD = rf'[^\S\n]*+({"|".join(TYPES)})(?:[^\S\n]*+:|(?!\S))'
_ACTION = re.compile('^' + _HEAD, re.MULTILINE | re.IGNORECASE)
_FENCE = re.compile(r'\s*+```(?:(?:sql|sqlite)(?!\S))?', re.IGNORECASE)
# End of SQL over several lines.
_END = re.compile(rf'```|\n(?:[^\S\n]*+(?:\n|\Z)|(?={_HEAD}))', re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Action:
  """One action."""

  type: str  # one of `TYPES`
  argument: str  # a table, SQL or an answer; may be empty
  parsed: bool = True  # False if the text had no action and was read as SQL


def parse(text: str) -> Action:
  """Reads the action of a turn.

  SQL continues over the following lines, until an empty line, a code fence or
  another action; a fence or backticks around it are removed. All other
  arguments end with their line. Quotes, backticks, brackets, full stops and
  semicolons around the name of a table are removed.

  Args:
    text: any text.

  Returns:
    The first action; without one, QUERY of the whole text, not `parsed`.
  """
  match = _ACTION.search(text)
  if match is None:
    return Action('QUERY', text.strip(), parsed=False)
  kind, start = match[1].upper(), match.end()
  if kind != 'QUERY':
    line = text[start:].partition('\n')[0]
    around = None if kind == 'ANSWER' else ' \t\r"\'`[].;'
    return Action(kind, line.strip(around))
  fence = _FENCE.match(text, start)
  start = fence.end() if fence else start
  end = _END.search(text, start)
  sql = text[start : end.start() if end else len(text)].strip()
  if len(sql) > 1 and sql[0] == sql[-1] == '`':
    sql = sql[1:-1].strip()
  return Action(kind, sql)


def write(type: str, argument: str, *, colon: bool) -> str:
  """Writes an action in the form that `parse` reads.

  Args:
    type: one of `TYPES`.
    argument: without line breaks, unless it is SQL.
    colon: whether to write a colon, as in text for language models.
  """
  assert type in TYPES, type
  return f'{type}{":" if colon else ""} {argument}'.rstrip()


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

  prompt: str
  left: str
  result: str
  error: str
  sample_rows: int
  characters: int  # maximum of a result
  error_characters: int  # maximum of an error


_STYLES = {
  'compact': _Style(
    '{}\ntables: {}', '\nleft: {}', 'result: ', 'error: ', 3, 400, 60
  ),
  'verbose': _Style(
    'Question: {}\nTables: {}',
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
    style = self._style
    text = style.prompt.format(question, ', '.join(tables))
    user = {'role': 'user', 'content': text + style.left.format(budget)}
    if self._style_name == 'compact':
      return (user,)
    return ({'role': 'system', 'content': _SYSTEM.format(budget=budget)}, user)

  def observe(
    self, text: str, action: str, left: int, *, failed: bool
  ) -> types.Messages:
    """Returns the observation of a step.

    Args:
      text: the result or the error.
      action: the action's type; a message of role 'tool' has it as its name.
      left: number of steps left.
      failed: whether `text` is an error.
    """
    style = self._style
    if failed:
      text = style.error + cells.cut(text, style.error_characters)
    else:
      text = style.result + text
    name = {'name': action.lower()} if self._role == 'tool' else {}
    content = text + style.left.format(left)
    return ({'role': self._role, **name, 'content': content},)

  def rows(self, rows: cells.Rows, more: bool) -> str:
    """Writes rows; `more`: whether the result has further rows."""
    limit = self._style.characters
    return cells.write(rows, style=self._style_name, more=more, limit=limit)

  def table(self, db: database.Database, table: str) -> str:
    """Writes a table's columns and its number of rows."""
    columns, count = db.describe(table), db.count(table)
    text = f'{", ".join(name for name, _ in columns)}; {count} rows'
    if self._style_name == 'verbose':
      lines = [f'{table}, {count} rows']
      lines += [f'{name} {kind}'.rstrip() for name, kind in columns]
      text = '\n'.join(lines)
    return cells.cut(text, self._style.characters)


_READ = re.compile(
  r'(?:(?:result: |Result:\n)(?P<result>.*)|[eE]rror: (?P<error>.*))'
  r'\n(?:left|Steps left): \d+',
  re.DOTALL,
)


def read(content: str) -> tuple[str | None, str | None]:
  """Returns (result, error) of an observation, each None if absent."""
  match = _READ.fullmatch(content)
  return match.group('result', 'error') if match else (None, None)
