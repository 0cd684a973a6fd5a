r"""GSM8K's `example_model_solutions.jsonl` as preferences.

A row has a `question` and solutions of four models, each with `solution` and
`is_correct`. Every pair of a correct and an incorrect solution is a preference;
equal solutions count once. The prompt is that of the environment. A completion
is a solution without calculator marks, whose last line `A: 18` becomes
`The answer is \boxed{18}.`

The questions are those of GSM8K's test split: a policy trained on them must not
be measured there.

References: Cobbe et al., Training Verifiers to Solve Math Word Problems,
arXiv 2110.14168.
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from posttrain import schema
from posttrain.data import preferences, row_files
from posttrain.rewards import numeric
from posttrain.util import foreign

_LAST = re.compile(r'\s*\n?A: *(\S.*?)\s*$')


def read(
  path: str | pathlib.Path, instruction: str = schema.Gsm8k.instruction
) -> list[preferences.Preference]:
  """Reads all preferences of a file, in its order.

  Args:
    path: the file.
    instruction: text after each question, as in `schema.Gsm8k`.

  Raises:
    ValueError: a row is malformed; names its line.
  """
  pairs = []
  for raw, where in row_files.Lines(path):
    question = _text(raw, 'question', where)
    prompt = '\n\n'.join(filter(None, (question, instruction)))
    solutions = [
      (_bool(value, where), _answer(_text(value, 'solution', where)))
      for value in raw.values()
      if isinstance(value, Mapping) and 'solution' in value
    ]
    chosen, rejected = (
      dict.fromkeys(text for right, text in solutions if right == correct)
      for correct in (True, False)
    )
    pairs += [
      preferences.Preference(
        ({'role': 'user', 'content': prompt},), _turn(yes), _turn(no), where
      )
      for yes in chosen
      for no in rejected
    ]
  return pairs


def _answer(solution: str) -> str:
  text = numeric.without_marks(solution).strip()
  last = _LAST.search(text)
  if last is None:
    return text
  boxed = f'The answer is \\boxed{{{last[1]}}}.'
  return '\n'.join(filter(None, (text[: last.start()].rstrip(), boxed)))


def _turn(text: str):
  return ({'role': 'assistant', 'content': text},)


def _text(raw: Mapping[str, Any], column: str, where: str) -> str:
  value = raw.get(column)
  if not isinstance(value, str) or not value.strip():
    raise ValueError(
      f'{where}: {column} must be a string with text: got '
      f'{foreign.quote(value)}'
    )
  return value.strip()


def _bool(value: Mapping[str, Any], where: str) -> bool:
  if not isinstance(value.get('is_correct'), bool):
    raise ValueError(
      f'{where}: is_correct must be true or false: got '
      f'{foreign.quote(value.get("is_correct"))}'
    )
  return value['is_correct']
