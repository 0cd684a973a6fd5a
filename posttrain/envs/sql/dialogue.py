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

The text form of rows is that of observations, answers and the verifier:

    NULL -> null    3 -> 3    2.5 -> 2.5    Ada -> Ada    a;b -> "a;b"

Cells are separated by ` | `, rows by `; ` (compact) or line ends (verbose); a
result without rows is `empty`. A string is quoted, as in JSON, only if its
plain text would be misread. So the text of an observation is a valid answer.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterable

from posttrain import types
from posttrain.envs.sql import database

NULL, EMPTY = 'null', 'empty'
CUT = ' ...'  # suffix of a cut text

TYPES = ('DESCRIBE', 'SAMPLE', 'QUERY', 'ANSWER')
QUERY_ROWS = 20  # rows of a result that are shown, and graded for progress

# A keyword alone on its line is an action with an empty argument.
_HEAD = rf'[^\S\n]*+({"|".join(TYPES)})(?:[^\S\n]*+:|(?!\S))'
_ACTION = re.compile('^' + _HEAD, re.MULTILINE | re.IGNORECASE)
_FENCE = re.compile(r'\s*+```(?:(?:sql|sqlite)(?!\S))?', re.IGNORECASE)
# End of SQL over several lines.
_END = re.compile(rf'```|\n(?:[^\S\n]*+(?:\n|\Z)|(?={_HEAD}))', re.IGNORECASE)


def cell(value: database.Cell) -> str:
  """Writes one value.

  A float has six digits, or all digits before its point: 2.5, 0.333333, 3,
  1234568, 1e+20. So a whole float looks like an integer.
  """
  if value is None:
    return NULL
  if isinstance(value, float):
    whole = value.is_integer() or 1e5 <= abs(value)
    return str(round(value)) if whole and abs(value) < 1e15 else f'{value:.6g}'
  if isinstance(value, int):
    return str(value)
  plain = (
    value
    and value == value.strip()
    and not set(value) & set('|;,\n"')
    and value.lower() not in (NULL, EMPTY)
  )
  return value if plain else json.dumps(value, ensure_ascii=False)


def row(values: Iterable[database.Cell]) -> str:
  """Writes one row."""
  return ' | '.join(map(cell, values))


def cut(text: str, limit: int, more: bool = False) -> str:
  """Returns a text cut to `limit` characters, those of ` ...` included.

  Args:
    text: the text.
    limit: maximum number of characters.
    more: whether there is further text, so that it is always cut.
  """
  if len(text) <= limit and not more:
    return text
  return text[: limit - len(CUT)].rstrip() + CUT


def read_rows(text: str, *, between: str = '|') -> list[list[str | None]]:
  """Reads rows.

  Rows end at `;` or a line end, outside of quotes; blank rows are skipped. A
  quote is plain text if it is not closed, or if other characters than white
  space follow it in its cell.

  Args:
    text: any text.
    between: the character between the cells of a row; '' if rows have one
      cell each.

  Returns:
    The cells of each row, without white space around them; None for `null`.
    Numbers stay text: 3 and "3" are both '3'.
  """
  if text.strip().lower() == EMPTY:
    return []
  # A cell: quoted or plain, and its end. Possessive, so that matching is
  # linear: a cell that begins with a quote is scanned at most to the next quote
  # before it is matched again as plain text.
  ends = re.escape(between) + r';\n'
  pattern = (
    rf'[^\S\n]*+(?:("(?:[^"\\]++|\\.)*+")[^\S\n]*+(?![^{ends}])'
    rf'|([^{ends}]*+))([{ends}]|\Z)'
  )
  rows: list[list[str | None]] = [[]]
  for match in re.finditer(pattern, text, re.DOTALL):
    quote, plain, end = match.groups()
    value = None
    if quote is not None:
      with contextlib.suppress(ValueError):  # no valid JSON escape
        value = json.loads(quote, strict=False)
    quoted = value is not None
    if not quoted:
      value = (plain if quote is None else quote).strip()
      value = None if value.lower() == NULL else value
    rows[-1].append(value)
    if end and end == between:
      continue
    if rows[-1] == [''] and not quoted:
      rows.pop()
    if not end:
      break
    rows.append([])
  return rows


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


class Writer:
  """Writes prompts and observations; in the style `compact`."""

  system = ''
  question = '{}\ntables: {}'
  left = '\nleft: {}'
  result = 'result: '
  error = 'error: '
  description = '{columns}; {count} rows'
  between_columns = ', '
  between_rows = '; '
  sample_rows = 3  # number of rows that SAMPLE shows
  characters = 400  # maximum of a result
  error_characters = 60  # maximum of an error

  def __init__(self, role: str):
    """Builds a writer.

    Args:
      role: role of the observations, 'tool' or 'user'.
    """
    self._role = role

  def prompt(
    self, question: str, tables: tuple[str, ...], budget: int
  ) -> types.Messages:
    """Returns the messages that ask a question."""
    text = self.question.format(question, ', '.join(tables))
    user = {'role': 'user', 'content': text + self.left.format(budget)}
    system = {'role': 'system', 'content': self.system.format(budget=budget)}
    return (system, user) if self.system else (user,)

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
    if failed:
      text = self.error + cut(text, self.error_characters)
    else:
      text = self.result + text
    name = {'name': action.lower()} if self._role == 'tool' else {}
    content = text + self.left.format(left)
    return ({'role': self._role, **name, 'content': content},)

  def rows(self, rows: database.Rows, more: bool) -> str:
    """Writes rows; `more`: whether the result has further rows."""
    text = self.between_rows.join(map(row, rows)) or EMPTY
    return cut(text, self.characters, more)

  def table(self, db: database.Database, table: str) -> str:
    """Writes a table's columns and its number of rows."""
    names = [
      f'{name} {kind}'.rstrip() if self.system else name
      for name, kind in db.describe(table)
    ]
    text = self.description.format(
      table=table,
      count=db.count(table),
      columns=self.between_columns.join(names),
    )
    return cut(text, self.characters)


class VerboseWriter(Writer):
  """The style `verbose`."""

  system = _SYSTEM
  question = 'Question: {}\nTables: {}'
  left = '\nSteps left: {}'
  result = 'Result:\n'
  error = 'Error: '
  description = '{table}, {count} rows\n{columns}'
  between_columns = between_rows = '\n'
  sample_rows = 5
  characters = 2000
  error_characters = 500


# By `style` of the options.
WRITERS = {'compact': Writer, 'verbose': VerboseWriter}
_READ = re.compile(
  r'(?:(?:result: |Result:\n)(?P<result>.*)|[eE]rror: (?P<error>.*))'
  r'\n(?:left|Steps left): \d+',
  re.DOTALL,
)


def read(content: str) -> tuple[str | None, str | None]:
  """Returns (result, error) of an observation, each None if absent."""
  match = _READ.fullmatch(content)
  return match.group('result', 'error') if match else (None, None)
