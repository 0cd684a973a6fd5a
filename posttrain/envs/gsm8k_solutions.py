r"""GSM8K's `example_model_solutions.jsonl` as preferences.

A row has a `question`, and solutions of four models, each with `solution` and
`is_correct`. Every pair of a correct and an incorrect one is a preference; what
two models say alike counts once. The prompt is that of the environment; an
answer is a solution without calculator marks, whose last line `A: 18` becomes
`The answer is \boxed{18}.`

The questions are those of GSM8K's test split: a policy that has seen them must
not be measured there.

References: Cobbe et al., Training Verifiers to Solve Math Word Problems,
arXiv 2110.14168.
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from posttrain import schema
from posttrain.data import jsonl, preferences
from posttrain.rewards import numeric

_LAST = re.compile(r'\s*\n?A: *(\S.*?)\s*$')


def read(
  path: str | pathlib.Path, instruction: str = schema.Gsm8k.instruction
) -> list[preferences.Preference]:
  """Reads all preferences of a file, in its order.

  Args:
    path: of the file.
    instruction: behind each question, as the environment has it.

  Raises:
    ValueError: a row is malformed; names its line.
  """
  made = []
  for raw, where in jsonl.objects(path):
    question = _text(raw, 'question', where)
    asks = '\n\n'.join(filter(None, (question, instruction)))
    told = [
      (_bool(value, where), _answer(_text(value, 'solution', where)))
      for value in raw.values()
      if isinstance(value, Mapping) and 'solution' in value
    ]
    sides = {
      side: list(dict.fromkeys(text for right, text in told if right == side))
      for side in (True, False)
    }
    made += [
      preferences.Preference(
        ({'role': 'user', 'content': asks},), _turn(yes), _turn(no), where
      )
      for yes in sides[True]
      for no in sides[False]
    ]
  return made


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
      f'{where}: {column} must be a string with text: got {value!r}'
    )
  return value.strip()


def _bool(value: Mapping[str, Any], where: str) -> bool:
  if not isinstance(value.get('is_correct'), bool):
    raise ValueError(
      f'{where}: is_correct must be true or false: got '
      f'{value.get("is_correct")!r}'
    )
  return value['is_correct']
