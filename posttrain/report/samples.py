"""Sampled answers to the same evaluation tasks, before and after.

Evaluation keeps the texts of `eval.samples` answers at temperature 1 beside the
greedy one, see `evaluation.answers.Answer`.
"""

from collections.abc import Mapping
from typing import Any

from posttrain.report import answers, transcripts

MAX_TASKS = 4  # tasks of each environment
MAX_ENVS = 8
MAX_SAMPLES = 4  # answers to each task
MAX_LENGTH = 300  # characters shown of an answer
_KINDS = {True: 'good', False: 'bad'}


def read(workdir: str, ends: answers.Ends) -> list[dict[str, Any]]:
  """Returns the first tasks of each environment with their sampled answers.

  Args:
    workdir: the run's folder.
    ends: the stages' ends, see `answers.write`.
  """
  attempts = answers.attempts_of(workdir, ends, 'eval')
  if len(attempts) > 2:
    first, *_, last = attempts
    attempts = {title: attempts[title] for title in (first, last)}
  by_key = {
    title: {(row['env'], row['id']): row for row in rows if _samples(row)}
    for title, rows in attempts.items()
  }
  by_key = {title: rows for title, rows in by_key.items() if rows}
  if not by_key:
    return []
  first = next(iter(by_key.values()))
  envs: dict[str, list[dict[str, Any]]] = {}
  for key, row in first.items():
    if all(key in rows for rows in by_key.values()):
      tasks = envs.setdefault(str(key[0]), [])
      if len(tasks) < MAX_TASKS:
        tasks.append(_task(row, {t: rows[key] for t, rows in by_key.items()}))
  return [
    {'env': env, 'titles': list(by_key), 'tasks': tasks}
    for env, tasks in list(envs.items())[:MAX_ENVS]
  ]


def _task(
  row: Mapping[str, Any], attempts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
  question = str(row.get('question') or row.get('prompt') or '')
  return {
    'question': transcripts.cut(question, MAX_LENGTH, end=True),
    'answer': transcripts.cut(str(row.get('answer', '')), MAX_LENGTH),
    'columns': [_column(attempt) for attempt in attempts.values()],
  }


def _column(row: Mapping[str, Any]) -> dict[str, Any]:
  texts = _samples(row)
  grades = row.get('sampled')
  grades = grades if isinstance(grades, list) else []
  grades = [x if isinstance(x, bool) else None for x in grades]
  grades += [None] * (len(texts) - len(grades))
  right = sum(grade is True for grade in grades)
  return {
    'right': f'{right} of {len(texts)} correct'
    if any(grade is not None for grade in grades)
    else '',
    'answers': [
      {
        'kind': _KINDS.get(grade, ''),
        'text': transcripts.cut(text, MAX_LENGTH) or '(empty)',
      }
      for text, grade in list(zip(texts, grades, strict=False))[:MAX_SAMPLES]
    ],
    'hidden': max(len(texts) - MAX_SAMPLES, 0),
  }


def _samples(row: Mapping[str, Any]) -> list[str]:
  texts = row.get('sampled_texts')
  return [str(x) for x in texts] if isinstance(texts, list) else []
