"""What an agent does, as text: `QUERY: SELECT name FROM owl`.

    line := ("DESCRIBE" | "SAMPLE" | "QUERY" | "ANSWER") ":"? argument

in upper or lower case. The first line of a turn that reads so is its action,
whatever stands around it; a turn without one is taken as SQL.
"""

import dataclasses
import re

TYPES = ('DESCRIBE', 'SAMPLE', 'QUERY', 'ANSWER')

# A word alone on its line is an action too, with nothing as its argument.
_HEAD = rf'[^\S\n]*+({"|".join(TYPES)})(?:[^\S\n]*+:|(?!\S))'
_ACTION = re.compile('^' + _HEAD, re.MULTILINE | re.IGNORECASE)
_FENCE = re.compile(r'\s*+```(?:(?:sql|sqlite)(?!\S))?', re.IGNORECASE)
# Of SQL that goes on over several lines.
_END = re.compile(rf'```|\n(?:[^\S\n]*+(?:\n|\Z)|(?={_HEAD}))', re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Action:
  """One action."""

  type: str  # of `TYPES`
  argument: str  # a table, SQL or an answer; may be empty
  parsed: bool = True  # whether the text said so; else it was taken as SQL


def parse(text: str) -> Action:
  """Reads a turn.

  SQL goes on over the following lines, until an empty line, a code fence or a
  line that is an action itself; a fence or backticks around it do not count.
  All other arguments end with their line. The name of a table loses quotes,
  backticks, brackets and a full stop or semicolon around it.

  Args:
    text: anything.

  Returns:
    The first action; without any, QUERY of the whole text, not `parsed`.
  """
  found = _ACTION.search(text)
  if found is None:
    return Action('QUERY', text.strip(), parsed=False)
  kind = found[1].upper()
  if kind == 'QUERY':
    return Action(kind, _read_sql(text, found.end()))
  line = text[found.end() :].partition('\n')[0]
  return Action(kind, line.strip() if kind == 'ANSWER' else _read_table(line))


def write(type: str, argument: str, *, colon: bool) -> str:
  """Writes an action so that `parse` reads it.

  Args:
    type: of `TYPES`.
    argument: without line breaks, unless it is SQL.
    colon: as language models know it; small vocabularies do without.
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
