"""Actions of the policy, as text: `QUERY: SELECT name FROM owl`.

    line := ("DESCRIBE" | "SAMPLE" | "QUERY" | "ANSWER") ":"? argument

in upper or lower case. The first such line of a turn is its action; other lines
are ignored. A turn without one is read as SQL.
"""

import dataclasses
import re

TYPES = ('DESCRIBE', 'SAMPLE', 'QUERY', 'ANSWER')

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
  kind = match[1].upper()
  if kind == 'QUERY':
    return Action(kind, _read_sql(text, match.end()))
  line = text[match.end() :].partition('\n')[0]
  return Action(kind, line.strip() if kind == 'ANSWER' else _read_table(line))


def write(type: str, argument: str, *, colon: bool) -> str:
  """Writes an action in the form that `parse` reads.

  Args:
    type: one of `TYPES`.
    argument: without line breaks, unless it is SQL.
    colon: whether to write a colon, as in text for language models.
  """
  assert type in TYPES, type
  return f'{type}{":" if colon else ""} {argument}'.rstrip()


def _read_sql(text: str, start: int) -> str:
  fence = _FENCE.match(text, start)
  start = fence.end() if fence else start
  end = _END.search(text, start)
  sql = text[start : end.start() if end else len(text)].strip()
  quoted = len(sql) > 1 and sql[0] == sql[-1] == '`'
  return sql[1:-1].strip() if quoted else sql


def _read_table(line: str) -> str:
  return line.strip(' \t\r"\'`[].;')
