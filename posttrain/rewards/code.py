"""Blocks of code in an answer: whether they parse. Nothing is executed.

A block begins with a line of three or more backticks and the name of a
language, and ends with a line of as many backticks or more, as in Markdown:

    ```python
    print('Hello.')
    ```

Blocks without a name, or of a language that is not in `PARSERS`, are not
measured. SQL is not, because every dialect has its own parser.
"""

import ast
import json
import warnings
from collections.abc import Iterator

MAX_LENGTH = 20_000  # characters of a block that is parsed


def syntax(text: str) -> float | None:
  """Returns the share of a text's blocks of Python and JSON that parse.

  None without such a block. A block that is not closed does not parse, which
  includes one that the token budget cuts; one that is longer than `MAX_LENGTH`
  is not measured. Python is parsed by the grammar of the version that runs, and
  not compiled: a `return` outside of a function parses, a session with `>>>`
  does not.
  """
  parsed = [
    code is not None and _parses(language, code)
    for language, code in _blocks(text)
    if language in PARSERS and (code is None or len(code) <= MAX_LENGTH)
  ]
  return sum(parsed) / len(parsed) if parsed else None


def _parses(language: str, code: str) -> bool:
  """Returns whether a block parses; whatever a parser raises is a no.

  SyntaxError, ValueError (a NUL, a lone surrogate), RecursionError and
  MemoryError (deep nesting) are known. Both parsers bound their depth; the
  length bounds their time.
  """
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # of doubtful escapes in strings
      PARSERS[language](code)
  except Exception:
    return False
  return True


def _json(code: str) -> None:
  # Python would take NaN, and refuse long integers.
  json.loads(code, parse_int=str, parse_constant=_refuse)


def _refuse(constant: str) -> None:
  raise ValueError(f'JSON must have no constant {constant}')


PARSERS = {
  'python': ast.parse,
  'python3': ast.parse,
  'py': ast.parse,
  'json': _json,
}


def _blocks(text: str) -> Iterator[tuple[str, str | None]]:
  """Yields (language, code) of each fenced block; None where it is open.

  The language is the first word after the backticks in small letters, '' for
  none. Lines lose as much indentation as the first one has.
  """
  language, ticks, indent = '', 0, 0  # no ticks: between blocks
  code: list[str] = []
  for line in text.split('\n'):
    stripped = line.strip(' \t\r')
    rest = stripped.lstrip('`')
    fence = len(stripped) - len(rest)
    if ticks:
      if fence >= ticks and not rest:
        yield language, '\n'.join(code)
        ticks = 0
      else:
        code.append(line[:indent].lstrip(' \t') + line[indent:])
    elif fence >= 3 and '`' not in rest:
      first_words = rest.split(maxsplit=1)
      language = first_words[0].lower() if first_words else ''
      ticks, code = fence, []
      indent = len(line) - len(line.lstrip(' \t'))
  if ticks:
    yield language, None
