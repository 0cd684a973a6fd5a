r"""GSM8K word problems, answered with `\boxed{N}`; graded by exact number.

A row of the file has a `question` and an `answer`: a worked solution with
calculator marks (`<<48/2=24>>24`) that ends in a line `#### 24`.

1. The prompt is the question, then the option `instruction`.
2. The demonstration is the solution without its marks; its last line becomes
   `The answer is \boxed{24}.`
3. An answer is correct if its number (`rewards.numeric`) equals the row's.

References: Cobbe et al., Training Verifiers to Solve Math Word Problems,
arXiv 2110.14168.
"""

import re
from collections.abc import Mapping
from typing import Any

from posttrain import schema, types
from posttrain.data import row_files, sources
from posttrain.envs import base
from posttrain.rewards import numeric
from posttrain.util import foreign, spelling

COLUMNS = ('question', 'answer')
_NUMBER = re.compile(r'-?[0-9.,/]+')


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

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns the tasks of `path` or `eval_path`; no tasks if that is None.

    Raises:
      ValueError: the file is missing, or a row is malformed; names its line.
    """
    base.check_split(split)
    field = 'path' if split == 'train' else 'eval_path'
    path = getattr(self._cfg, field)
    if path is None:
      return sources.Shuffled((), seed)
    if split not in self._read:
      file = base.find(self.name, field, path, folders=False)
      tasks = [self._task(raw, where) for raw, where in row_files.objects(file)]
      self._read[split] = tasks, sources.file_fingerprint(file)
    tasks, fingerprint = self._read[split]
    return sources.Shuffled(tasks, seed, fingerprint)

  def make(self, task: types.Task) -> 'Episode':
    return Episode(task, self._cfg.lenient)

  def _task(self, raw: Mapping[str, Any], where: str) -> types.Task:
    question, solution, answer = parse_row(raw, where)
    prompt = '\n\n'.join(filter(None, (question, self._cfg.instruction)))
    demonstration = '\n'.join(
      filter(None, (solution, f'The answer is \\boxed{{{answer}}}.'))
    )
    return types.Task(
      id=where,
      env=self.name,
      prompt=({'role': 'user', 'content': prompt},),
      answer=answer,
      demonstration=({'role': 'assistant', 'content': demonstration},),
      info={key: raw[key] for key in raw if key not in COLUMNS},
    )


class Episode:
  """One answer to one question."""

  def __init__(self, task: types.Task, lenient: bool):
    self._task, self._lenient = task, lenient
    self._score = types.Score(reward=None)

  def reset(self) -> types.Messages:
    self._score = types.Score(reward=None)
    return self._task.prompt

  def step(self, text: str, truncated: bool) -> types.StepOut:
    self._score = grade(
      text, self._task.answer, lenient=self._lenient, truncated=truncated
    )
    return types.StepOut(reward=self._score.reward)

  def grade(self) -> types.Score:
    """Returns the grade; an episode without an answer is not scorable."""
    return self._score

  def close(self) -> None:
    pass


def parse_row(raw: Mapping[str, Any], where: str) -> tuple[str, str, str]:
  """Reads a row of GSM8K.

  Args:
    raw: a mapping with `question` and `answer`; other columns are ignored.
    where: the row's name in error messages.

  Returns:
    The question; the solution without calculator marks and last line; the
    number of the last line, without commas.

  Raises:
    ValueError: a column is missing, or the answer does not end in a number.
  """
  for column in COLUMNS:
    value = raw.get(column)
    if not isinstance(value, str) or not value.strip():
      raise ValueError(
        f'{where}: {column} must be a string with text: got '
        f"{foreign.quote(value)}; a row has 'question' and 'answer', this one "
        f'{foreign.text(sorted(raw))}{spelling.hint(raw, COLUMNS)}'
      )
  solution, _, last = raw['answer'].strip().rpartition('\n')
  if not last.startswith('####'):
    raise ValueError(
      f'{where}: answer must end in a line `#### N`: got {foreign.quote(last)}'
    )
  number = last[len('####') :].strip()
  if not _NUMBER.fullmatch(number) or numeric.parse(number) is None:
    raise ValueError(
      f'{where}: the number of the line `#### N` must be digits, with a '
      f'minus, thousands separators, a point or a / at most: got '
      f'{foreign.quote(number)}'
    )
  solution = numeric.without_marks(solution).strip()
  return raw['question'].strip(), solution, number.replace(',', '')
