"""What a run answered to the same tasks, before and after, as HTML.

Read from `rollouts/<stage>_eval_<step>.jsonl`, where evaluation leaves its
greedy answers. Questions with one answer share a table; what is played in
several turns is shown as `transcripts`.
"""

import html
import os
import re
from typing import Any

from posttrain import metrics, transcripts

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
  files = _files(os.path.join(workdir, 'rollouts'), stages)
  if not files:
    return ''
  # Before the first step, and the last of every stage.
  times = {} if files[0][1] else {'start': files[0][2]}
  times |= {f'after {stage}': path for stage, step, path in files if step}
  attempts = {name: metrics.read(path) for name, path in times.items()}
  played = transcripts.multi_turn(
      row for rows in attempts.values() for row in rows
  )
  parts = [_transcripts(env, attempts) for env in sorted(played)]
  if len(attempts) > 2:  # a table has no room for the start as well
    attempts.pop('start', None)
  return ''.join([_table(attempts, played), *parts])


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


def _files(folder: str, stages: list[str]) -> list[tuple[str, int, str]]:
  """(stage, step, path) of the evaluations' answers, in the run's order."""
  found = []
  for name in os.listdir(folder) if os.path.isdir(folder) else ():
    match = re.fullmatch(r'(.+)_eval_(\d+)\.jsonl', name)
    if match:
      stage, step = match[1], int(match[2])
      found.append((stage, step, os.path.join(folder, name)))
  order = {stage: place for place, stage in enumerate(stages)}
  return sorted(
      found, key=lambda x: (order.get(x[0], len(order)), x[1], x[2])
  )


def _answer(row: dict[str, Any]) -> str:
  kind = {True: 'good', False: 'bad'}.get(row.get('correct'), '')
  mark = {'good': '&#10003; ', 'bad': '&#10007; '}.get(kind, '')
  text = transcripts.cut(str(row.get('text', '')), LENGTH) or '(empty)'
  return f'<td class="text {kind}">{mark}{html.escape(text)}</td>'
