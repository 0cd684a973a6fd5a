"""Answers of a run to the same tasks, before and after a stage, as HTML.

Evaluation writes its greedy answers to `rollouts/<stage>_eval_<step>.jsonl`.
Tasks of one turn share a table; tasks of several turns are shown as
`transcripts`. The prompts of a suite, in `rollouts/<stage>_suite_<step>.jsonl`,
have a table of their own.
"""

import html
import os
import re
import warnings
from typing import Any

from posttrain.metrics import writers
from posttrain.report import transcripts

MAX_PROMPTS = 12  # prompts in the table of answers
MAX_TASKS = 6  # tasks of each environment of several turns
MAX_LENGTH = 600  # characters shown of an answer

Rows = list[dict[str, Any]]


def write(workdir: str, stages: list[str]) -> str:
  """Returns the answers to the first evaluation tasks, before and after.

  Args:
    workdir: the run's folder.
    stages: names of the stages, in the order in which they ran.

  Returns:
    HTML for a page with the style of `page`; '' without answers.
  """
  attempts = _attempts(workdir, stages, 'eval')
  if not attempts:
    return ''
  multi_turn = transcripts.multi_turn(
    row for rows in attempts.values() for row in rows
  )
  parts = [_transcripts(env, attempts) for env in sorted(multi_turn)]
  if len(attempts) > 2:  # one more column is too many for the table
    attempts.pop('start', None)
  return ''.join([_table(attempts, multi_turn), *parts])


def suite(workdir: str, stages: list[str]) -> str:
  """Returns the prompts of `eval.suite` and all answers; args as in `write`.

  Stages may differ in their prompts: the answer to a prompt that a stage does
  not have is n/a.
  """
  attempts = {
    name: {row['prompt']: row for row in rows}
    for name, rows in _attempts(workdir, stages, 'suite').items()
  }
  if not attempts:
    return ''
  body = ''
  for prompt in dict.fromkeys(x for rows in attempts.values() for x in rows):
    cells = ''.join(
      _answer(rows[prompt]) if prompt in rows else '<td class="n">n/a</td>'
      for rows in attempts.values()
    )
    body += f'<tr><td class="text">{html.escape(prompt)}</td>{cells}</tr>'
  heads = ''.join(f'<th>{html.escape(name)}</th>' for name in attempts)
  return (
    '<h2>The suite of prompts, before and after</h2><p class="note">Answered '
    'greedily, and not graded.</p>'
    f'<table><tr><th>prompt</th>{heads}</tr>{body}</table>'
  )


def _attempts(workdir: str, stages: list[str], what: str) -> dict[str, Rows]:
  """Returns the answers before the first step, and the last of every stage."""
  files = _files(os.path.join(workdir, 'rollouts'), stages, what)
  if not files:
    return {}
  (first, step, path), paths = files[0], {}
  if step == 0:
    paths['start' if first in stages[:1] else f'before {first}'] = path
  paths |= {f'after {stage}': path for stage, step, path in files if step}
  attempts = {name: _read(path, what) for name, path in paths.items()}
  return {name: rows for name, rows in attempts.items() if rows}


def _read(path: str, what: str) -> Rows:
  """Returns the answers in a file; warns of lines that are none."""
  keys = ('prompt',) if what == 'suite' else ('env', 'id')
  try:
    objects = writers.read(path)
  except ValueError as error:
    warnings.warn(f'the report leaves answers out: {error}', stacklevel=2)
    return []
  rows = [
    x for x in objects if all(isinstance(x.get(k), str | int) for k in keys)
  ]
  if len(rows) < len(objects):
    warnings.warn(
      f'the report leaves {len(objects) - len(rows)} answers of {path} out: '
      f'they lack {" or ".join(keys)}',
      stacklevel=2,
    )
  return rows


def _table(attempts: dict[str, Rows], multi_turn: set[str]) -> str:
  """Returns a row per task of the environments of one turn."""
  answers = [
    {
      (row['env'], row['id']): row
      for row in rows
      if row['env'] not in multi_turn
    }
    for rows in attempts.values()
  ]
  if not answers[0]:
    return ''
  shared = [key for key in answers[0] if all(key in x for x in answers)]
  body = ''
  for key in shared[:MAX_PROMPTS]:
    last = answers[-1][key]
    cells = ''.join(_answer(rows[key]) for rows in answers)
    body += (
      f'<tr><td class="text">{html.escape(str(last.get("prompt", "")))}</td>'
      f'<td class="text">{html.escape(str(last.get("answer", "")))}</td>'
      f'{cells}</tr>'
    )
  heads = ''.join(f'<th>{html.escape(name)}</th>' for name in attempts)
  return (
    '<h2>The same prompts, before and after</h2><p class="note">The first '
    f'{min(MAX_PROMPTS, len(shared))} of {len(answers[0])} evaluation prompts, '
    'answered greedily; not selected.</p><table><tr><th>prompt</th>'
    f'<th>expected</th>{heads}</tr>{body}</table>'
  )


def _transcripts(env: str, attempts: dict[str, Rows]) -> str:
  """Returns the first tasks of an environment, turn by turn."""
  by_id = {
    name: {row['id']: row for row in rows if row['env'] == env}
    for name, rows in attempts.items()
  }
  by_id = {name: rows for name, rows in by_id.items() if rows}
  first = next(iter(by_id.values()))
  shared = [id for id in first if all(id in rows for rows in by_id.values())]
  tasks = ''.join(
    transcripts.task({name: rows[id] for name, rows in by_id.items()})
    for id in shared[:MAX_TASKS]
  )
  return (
    f'<h2>The same tasks of {html.escape(env)}, before and after</h2>'
    f'<p class="note">The first {min(MAX_TASKS, len(shared))} of {len(first)} '
    f'evaluation tasks, played greedily; not selected.</p>{tasks}'
  )


def _files(
  folder: str, stages: list[str], what: str
) -> list[tuple[str, int, str]]:
  """Returns (stage, step, path) of each file, in the run's order."""
  files = []
  for name in os.listdir(folder) if os.path.isdir(folder) else ():
    match = re.fullmatch(rf'(.+)_{what}_(\d+)\.jsonl', name)
    if match:
      stage, step = match[1], int(match[2])
      files.append((stage, step, os.path.join(folder, name)))
  order = {stage: place for place, stage in enumerate(stages)}
  return sorted(files, key=lambda x: (order.get(x[0], len(order)), x[1], x[2]))


def _answer(row: dict[str, Any]) -> str:
  kind = {True: 'good', False: 'bad'}.get(row.get('correct'), '')
  mark = {'good': '&#10003; ', 'bad': '&#10007; '}.get(kind, '')
  text = transcripts.cut(str(row.get('text', '')), MAX_LENGTH) or '(empty)'
  return f'<td class="text {kind}">{mark}{html.escape(text)}</td>'
