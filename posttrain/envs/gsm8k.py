r"""GSM8K word problems, answered with `\boxed{N}`; graded by exact number.

A row of the file has a `question` and an `answer`: a worked solution with
calculator marks (`<<48/2=24>>24`) that ends in a line `#### 24`.

1. The prompt is the question, then the option `instruction`.
2. The demonstration is the solution without its marks; its last line becomes
   `The answer is \boxed{24}.`
3. An answer is correct if its number (`rewards.numeric`), outside of thoughts
   (`<think>...</think>`), equals the row's.

References: Cobbe et al., Training Verifiers to Solve Math Word Problems,
arXiv 2110.14168.
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from posttrain import schema, types
from posttrain.chat import tool_calls
from posttrain.data import preferences, row_files, sources
from posttrain.envs import base
from posttrain.rewards import numeric
from posttrain.util import errors

COLUMNS = ('question', 'answer')
# Where the files are from, for errors.
_HINT = (
  '; train.jsonl and test.jsonl are at https://github.com/openai/'
  'grade-school-math, rows of `question` and of `answer` with a last line '
  '`#### N`'
)
_ANSWER = re.compile(
  r'(.*)^####[^\S\n]*(-?[0-9.,/]+)', re.DOTALL | re.MULTILINE
)
_LAST = re.compile(r'\s*\n?A: *(\S.*?)\s*$')


def grade(
  text: str, answer: str, *, lenient: bool, truncated: bool = False
) -> types.Score:
  """Grades an assistant turn: reward 1 if its number is the answer's.

  Args:
    text: the assistant turn.
    answer: a number, in the form of `Task.answer`.
    lenient: whether the last result of the text counts if there is neither a
      box nor `#### N`.
    truncated: whether the text was cut off; its last result then never counts.

  Returns:
    A score with `formatted`: whether the last box holds a number; and
    `answer`: the number, in a box or not.
  """
  text = tool_calls.outside_thoughts(text)
  number = numeric.final_answer(text, lenient=lenient, truncated=truncated)
  correct = numeric.equal(number, numeric.parse(answer))
  return types.Score(
    reward=float(correct),
    correct=correct,
    formatted=numeric.boxed(text) is not None,
    answer=None if number is None else str(number),  # in lowest terms
  )


class Gsm8k(base.Env):
  """`schema.Gsm8k`, single turn."""

  max_turns, votes = 1, True

  def __init__(self, name: str, cfg: schema.Gsm8k):
    self.name, self._cfg = name, cfg
    self._read: dict[str, tuple[list[types.Task], str]] = {}  # by split

  def source(self, split: str, seed: int) -> base.Source:
    """Returns the tasks of `path` or `eval_path`; no tasks if that is None.

    Raises:
      ValueError: the file is missing, or a row is malformed; names its line.
    """
    field = 'path' if split == 'train' else 'eval_path'
    path = getattr(self._cfg, field)
    if path is None:
      return sources.Shuffled((), seed)
    if split not in self._read:
      file = base.find(self.name, field, path, _HINT)
      tasks = [self._task(raw, where) for raw, where in row_files.objects(file)]
      self._read[split] = tasks, row_files.fingerprint(file)
    tasks, fingerprint = self._read[split]
    return sources.Shuffled(tasks, seed, fingerprint)

  def make(self, task: types.Task) -> base.OneTurn:
    def score(text: str, truncated: bool) -> types.Score:
      lenient = self._cfg.lenient
      return grade(text, task.answer, lenient=lenient, truncated=truncated)

    return base.OneTurn(task, score)

  def _task(self, raw: Mapping[str, Any], where: str) -> types.Task:
    question, answer = (_text(raw, column, where) for column in COLUMNS)
    match = _ANSWER.fullmatch(answer)
    if match is None or numeric.parse(match[2]) is None:
      raise ValueError(
        f'{where}: answer must end in a line `#### N`, where N is a number: '
        f'got {errors.quote(answer[-80:])}'
      )
    solution = numeric.without_marks(match[1]).strip()
    answer = match[2].replace(',', '')
    last = f'The answer is \\boxed{{{answer}}}.'
    prompt = '\n\n'.join(filter(None, (question, self._cfg.instruction)))
    demonstration = '\n'.join(filter(None, (solution, last)))
    return types.Task(
      id=where,
      env=self.name,
      prompt=({'role': 'user', 'content': prompt},),
      answer=answer,
      demonstration=({'role': 'assistant', 'content': demonstration},),
      info={key: raw[key] for key in raw if key not in COLUMNS},
    )


def read_solutions(path: str | pathlib.Path) -> list[preferences.Preference]:
  r"""Reads GSM8K's `example_model_solutions.jsonl` as preferences.

  A row has a `question` and solutions of four models, each with `solution` and
  `is_correct`. Every pair of a correct and an incorrect solution is a
  preference; equal solutions count once. The prompt is that of the environment.
  A completion is a solution without calculator marks, whose last line `A: 18`
  becomes `The answer is \boxed{18}.` The questions are those of GSM8K's test
  split: a policy trained on them must not be measured there.

  Args:
    path: the file.

  Raises:
    ValueError: a row is malformed; names its line.
  """
  pairs = []
  for raw, where in row_files.objects(path):
    question = _text(raw, 'question', where)
    prompt = '\n\n'.join(filter(None, (question, schema.Gsm8k.instruction)))
    texts: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for value in raw.values():
      if not isinstance(value, Mapping) or 'solution' not in value:
        continue
      text = numeric.without_marks(_text(value, 'solution', where)).strip()
      if last := _LAST.search(text):
        boxed = f'The answer is \\boxed{{{last[1]}}}.'
        before = text[: last.start()].rstrip()
        text = '\n'.join(filter(None, (before, boxed)))
      correct = value.get('is_correct')
      if not isinstance(correct, bool):
        raise ValueError(
          f'{where}: is_correct must be true or false: got '
          f'{errors.quote(correct)}'
        )
      texts[correct][text] = None
    pairs += [
      preferences.Preference(
        ({'role': 'user', 'content': prompt},),
        ({'role': 'assistant', 'content': chosen},),
        ({'role': 'assistant', 'content': rejected},),
        where,
      )
      for chosen in texts[True]
      for rejected in texts[False]
    ]
  return pairs


def _text(raw: Mapping[str, Any], column: str, where: str) -> str:
  value = raw.get(column)
  if not isinstance(value, str) or not value.strip():
    raise ValueError(
      f'{where}: {column} must be a string with text: got '
      f'{errors.quote(value)}; the columns are {errors.text(sorted(raw))}'
    )
  return value.strip()
