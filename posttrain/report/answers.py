"""Answers of a run to the same tasks, before and after a stage, as HTML.

Evaluation writes its greedy answers to `rollouts/<stage>_eval_<step>.jsonl`.
Tasks of one turn share a table; tasks of several turns are shown as
`transcripts`. The prompts of a suite, in `rollouts/<stage>_suite_<step>.jsonl`,
have a table of their own, with the grades below each answer.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posttrain.report import runs, transcripts

MAX_PROMPTS = 12  # prompts in the table of answers
MAX_TASKS = 6  # tasks of each environment of several turns
MAX_LENGTH = 600  # characters shown of an answer
MAX_PROMPT = 800  # characters shown of a prompt, from its end
MAX_CHARACTERS = 300_000  # HTML characters of all tables

Rows = list[dict[str, Any]]
Ends = Mapping[str, tuple[str, int | None]]  # see `series.ends`


def write(workdir: str, ends: Ends, limit: int = MAX_CHARACTERS) -> str:
  """Returns the answers to the first evaluation tasks, before and after.

  Args:
    workdir: the run's folder.
    ends: the stages' ends, in the order of the stages, see `series.ends`.
    limit: about so many characters of HTML at most.

  Returns:
    HTML for a page with the style of `page`; '' without answers.
  """
  attempts = attempts_of(workdir, ends, 'eval')
  if not attempts:
    return ''
  multi_turn = transcripts.multi_turn(
    row for rows in attempts.values() for row in rows
  )
  columns = dict(attempts)
  if len(columns) > 2:  # one more column is too many for the table
    columns.pop('start', None)
  table = _table(columns, multi_turn, limit)
  left = limit - len(table)
  return table + _transcripts(sorted(multi_turn), attempts, left)


def suite(workdir: str, ends: Ends, limit: int = MAX_CHARACTERS) -> str:
  """Returns the prompts of `eval.suite` and all answers; args as in `write`.

  Stages may differ in their prompts: the answer to a prompt that a stage does
  not have is n/a.
  """
  attempts = {
    name: {row['prompt']: row for row in rows}
    for name, rows in attempts_of(workdir, ends, 'suite').items()
  }
  if not attempts:
    return ''
  prompts = dict.fromkeys(x for rows in attempts.values() for x in rows)
  lines = _fitting(
    (
      _line(
        [prompt],
        [
          _answer(rows[prompt], _grades(rows[prompt]))
          if prompt in rows
          else '<td class="n">n/a</td>'
          for rows in attempts.values()
        ],
      )
      for prompt in prompts
    ),
    limit,
  )
  heads = ''.join(f'<th>{html.escape(name)}</th>' for name in attempts)
  part = (
    f' The page has space for the first {len(lines)} of {len(prompts)} prompts.'
    if len(lines) < len(prompts)
    else ''
  )
  return (
    '<h2>The suite of prompts, before and after</h2><p class="note">Answered '
    f'greedily; the grades are below each answer.{part}</p>'
    f'<table><tr><th>prompt</th>{heads}</tr>{"".join(lines)}</table>'
  )


def attempts_of(workdir: str, ends: Ends, what: str) -> dict[str, Rows]:
  """Returns the answers before the first step, and at every stage's end."""
  stages = list(ends)
  files = runs.files(workdir, stages, what)
  if not files:
    return {}
  (first, step, path), paths = files[0], {}
  if step == 0:
    paths['start' if first in stages[:1] else f'before {first}'] = path
  for stage, step, path in files:
    title, end = ends.get(stage, (f'after {stage}', None))
    if end == step or (end is None and step):
      paths[title] = path
  keys = ('prompt',) if what == 'suite' else ('env', 'id')
  attempts = {name: runs.read_rows(x, keys) for name, x in paths.items()}
  return {name: rows for name, rows in attempts.items() if rows}


def _table(
  attempts: Mapping[str, Rows], multi_turn: set[str], limit: int
) -> str:
  """Returns a row per task of the environments of one turn, while they fit."""
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
  tasks = [[rows[key] for rows in answers] for key in shared[:MAX_PROMPTS]]
  lines = _fitting((_task(rows) for rows in tasks), limit)
  heads = ''.join(f'<th>{html.escape(name)}</th>' for name in attempts)
  return (
    '<h2>The same prompts, before and after</h2><p class="note">The first '
    f'{len(lines)} of {len(answers[0])} evaluation prompts, answered greedily; '
    'not selected.</p><table><tr><th>prompt</th>'
    f'<th>expected</th>{heads}</tr>{"".join(lines)}</table>'
  )


def _task(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns a row of the table: the answers to one task."""
  last = rows[-1]
  texts = (str(last.get(key, '')) for key in ('prompt', 'answer'))
  return _line(list(texts), [_answer(row) for row in rows])


def _line(texts: Sequence[str], cells: Sequence[str]) -> str:
  """Returns a row of a table: texts that are cut and escaped, and cells."""
  short = (transcripts.cut(text, MAX_PROMPT, end=True) for text in texts)
  heads = (f'<td class="text">{html.escape(text)}</td>' for text in short)
  return f'<tr>{"".join((*heads, *cells))}</tr>'


def _fitting(lines: Iterable[str], limit: int) -> list[str]:
  """Returns the first lines, as many as fit into so many characters."""
  fitting = []
  for line in lines:
    limit -= len(line)
    if limit < 0:
      break
    fitting.append(line)
  return fitting


def _transcripts(
  envs: Sequence[str], attempts: dict[str, Rows], limit: int
) -> str:
  """Returns the first tasks of each environment, turn by turn.

  The first task of every environment, then the second ones, while they fit.
  """
  shared = {env: _shared(env, attempts) for env in envs}
  texts: dict[str, list[str]] = {env: [] for env in envs}
  for place in range(MAX_TASKS):
    for env, tasks in shared.items():
      if place < len(tasks) and len(texts[env]) == place:
        text = transcripts.task(tasks[place])
        if len(text) <= limit:
          limit -= len(text)
          texts[env].append(text)
  lacking = ', '.join(env for env in envs if not texts[env])
  return ''.join(
    f'<h2>The same tasks of {html.escape(env)}, before and after</h2>'
    f'<p class="note">The first {len(own)} of {len(shared[env])} evaluation '
    f'tasks, played greedily; not selected.</p>{"".join(own)}'
    for env, own in texts.items()
    if own
  ) + (
    f'<p class="note">The page has no space for tasks of '
    f'{html.escape(lacking)}.</p>'
    if lacking
    else ''
  )


def _shared(env: str, attempts: dict[str, Rows]) -> list[dict[str, Any]]:
  """Returns {title: row} of each task that all attempts at it have."""
  by_id = {
    name: {row['id']: row for row in rows if row['env'] == env}
    for name, rows in attempts.items()
  }
  by_id = {name: rows for name, rows in by_id.items() if rows}
  first = next(iter(by_id.values()))
  return [
    {name: rows[id] for name, rows in by_id.items()}
    for id in first
    if all(id in rows for rows in by_id.values())
  ]


def _grades(row: dict[str, Any]) -> str:
  """Returns HTML of an answer's grades; '' for those of older runs."""
  grades = row.get('grades')
  if not isinstance(grades, dict):
    return ''
  texts = [
    f'{html.escape(str(name))} {value:.2f}'
    for name, value in grades.items()
    if isinstance(value, int | float)
  ]
  return f'<small>\n{", ".join(texts)}</small>' if texts else ''


def _answer(row: Mapping[str, Any], more: str = '') -> str:
  kind = {True: 'good', False: 'bad'}.get(row.get('correct'), '')
  mark = {'good': '&#10003; ', 'bad': '&#10007; '}.get(kind, '')
  text = transcripts.cut(str(row.get('text', '')), MAX_LENGTH) or '(empty)'
  return f'<td class="text {kind}">{mark}{html.escape(text)}{more}</td>'
