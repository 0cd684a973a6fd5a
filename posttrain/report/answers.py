"""What a run answered to the same tasks, before and after, as HTML.

Read from `rollouts/<stage>_eval_<step>.jsonl`, where evaluation leaves its
greedy answers. Questions with one answer share a table; what is played in
several turns is shown as `transcripts`. The prompts of a suite, read from
`rollouts/<stage>_suite_<step>.jsonl`, have a table of their own.
"""

import html
import os
import re
from typing import Any

from posttrain.metrics import writers
from posttrain.report import transcripts

SHOWN = 12  # prompts in the table of answers
PLAYED = 6  # tasks of each environment of several turns
LENGTH = 600  # characters shown of an answer

Rows = list[dict[str, Any]]


def write(workdir: str, stages: list[str]) -> str:
  """Returns the first tasks of the evaluation, attempted at several times.

  Args:
    workdir: of the run.
    stages: their names, in the order in which they ran.

  Returns:
    HTML for a page with the style of `report`; '' if nothing was answered.
  """
  attempts = _attempts(workdir, stages, 'eval')
  if not attempts:
    return ''
  played = transcripts.multi_turn(
    row for rows in attempts.values() for row in rows
  )
  parts = [_transcripts(env, attempts) for env in sorted(played)]
  if len(attempts) > 2:  # a table has no room for the start as well
    attempts.pop('start', None)
  return ''.join([_table(attempts, played), *parts])


def suite(workdir: str, stages: list[str]) -> str:
  """Returns the prompts of `eval.suite` and all answers; args as of `write`.

  Stages may differ in their prompts: an answer that was not asked for is n/a.
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
  """Answers before the first step, and the last of every stage."""
  files = _files(os.path.join(workdir, 'rollouts'), stages, what)
  if not files:
    return {}
  (first, step, path), times = files[0], {}
  if step == 0:
    times['start' if first in stages[:1] else f'before {first}'] = path
  times |= {f'after {stage}': path for stage, step, path in files if step}
  return {name: writers.read(path) for name, path in times.items()}


def _table(attempts: dict[str, Rows], played: set[str]) -> str:
  """Prompts and answers, a row each, of the environments not `played`."""
  answers = [
    {(row['env'], row['id']): row for row in rows if row['env'] not in played}
    for rows in attempts.values()
  ]
  if not answers[0]:
    return ''
  shared = [key for key in answers[0] if all(key in x for x in answers)]
  body = ''
  for key in shared[:SHOWN]:
    last = answers[-1][key]
    cells = ''.join(_answer(found[key]) for found in answers)
    body += (
      f'<tr><td class="text">{html.escape(str(last.get("prompt", "")))}</td>'
      f'<td class="text">{html.escape(str(last.get("answer", "")))}</td>'
      f'{cells}</tr>'
    )
  heads = ''.join(f'<th>{html.escape(name)}</th>' for name in attempts)
  return (
    '<h2>The same prompts, before and after</h2><p class="note">The first '
    f'{min(SHOWN, len(shared))} of {len(answers[0])} evaluation prompts, '
    'answered greedily; not selected.</p><table><tr><th>prompt</th>'
    f'<th>expected</th>{heads}</tr>{body}</table>'
  )


def _transcripts(env: str, attempts: dict[str, Rows]) -> str:
  """The first tasks of an environment of several turns, turn by turn."""
  found = {
    name: {row['id']: row for row in rows if row['env'] == env}
    for name, rows in attempts.items()
  }
  found = {name: rows for name, rows in found.items() if rows}
  first = next(iter(found.values()))
  shared = [id for id in first if all(id in rows for rows in found.values())]
  tasks = ''.join(
    transcripts.task({name: rows[id] for name, rows in found.items()})
    for id in shared[:PLAYED]
  )
  return (
    f'<h2>The same tasks of {html.escape(env)}, before and after</h2>'
    f'<p class="note">The first {min(PLAYED, len(shared))} of {len(first)} '
    f'evaluation tasks, played greedily; not selected.</p>{tasks}'
  )


def _files(
  folder: str, stages: list[str], what: str
) -> list[tuple[str, int, str]]:
  """(stage, step, path) of the evaluations' answers, in the run's order."""
  found = []
  for name in os.listdir(folder) if os.path.isdir(folder) else ():
    match = re.fullmatch(rf'(.+)_{what}_(\d+)\.jsonl', name)
    if match:
      stage, step = match[1], int(match[2])
      found.append((stage, step, os.path.join(folder, name)))
  order = {stage: place for place, stage in enumerate(stages)}
  return sorted(found, key=lambda x: (order.get(x[0], len(order)), x[1], x[2]))


def _answer(row: dict[str, Any]) -> str:
  kind = {True: 'good', False: 'bad'}.get(row.get('correct'), '')
  mark = {'good': '&#10003; ', 'bad': '&#10007; '}.get(kind, '')
  text = transcripts.cut(str(row.get('text', '')), LENGTH) or '(empty)'
  return f'<td class="text {kind}">{mark}{html.escape(text)}</td>'
