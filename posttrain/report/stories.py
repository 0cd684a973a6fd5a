"""Texts of a run: answers before and after, episodes, groups of rollouts.

Evaluation writes its greedy answers to `rollouts/<stage>_eval_<step>.jsonl`,
with the texts of `eval.samples` answers at temperature 1 beside each, and those
to the prompts of a suite to `<stage>_suite_<step>.jsonl`, see
`evaluation.answers`. The logbook writes the rollouts of some training steps to
`<stage>_train_<step>.jsonl`, see `pipeline.batches`. Here they become what
the templates in `assets` show: tasks are the first ones, not selected; texts
are cut.
"""

import functools
import itertools
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from posttrain.report import runs

MAX_PROMPTS = 12  # prompts in the table of answers
MAX_SUITE = 100  # prompts of a suite
MAX_TASKS = 6  # tasks of each environment of several turns
MAX_SAMPLED_TASKS = 4  # tasks of each environment with sampled answers
MAX_ENVS = 8  # environments of each kind of story
MAX_TEXT = 600  # characters shown of a completion or an observation
MAX_VALUES = 12  # different rewards with a bar each; more have bins
BINS = 20
ASSETS = pathlib.Path(__file__).parent / 'assets'
# `QUERY: SELECT 1`: the kind of action, and its argument.
_ACTION = re.compile(r'([A-Z][A-Z_]+)(?::\s*|\s+)(?=\S)')
# Control characters but tab and line feed, as the pictures of them.
_CONTROLS = {i: 0x2400 + i for i in (*range(9), *range(11, 32))} | {127: 0x2421}

Row, Rows = runs.Row, runs.Rows
# {(stage, environment): {step: rows}}
Steps = dict[tuple[str, str], dict[int, Rows]]


def answers(run: runs.Run) -> Row:
  """Returns the greedy answers to the first tasks, before and after.

  Returns:
    `titles` of the columns, `count` of the tasks of one turn, the first of them
    in `tasks` (a row per column), and `episodes`: the environments of several
    turns, each with a `play` per column.
  """
  attempts = _attempts(run, 'eval')
  multi_turn = {
    row['env']
    for row in itertools.chain(*attempts.values())
    if len(row.get('messages') or ()) > 1
  }
  episodes = []
  for env in sorted(multi_turn)[:MAX_ENVS]:
    titles, tasks = _shared(attempts, lambda row, env=env: row['env'] == env)
    shown = [_task(titles, rows) for rows in tasks[:MAX_TASKS]]
    episodes.append({'env': env, 'count': len(tasks), 'tasks': shown})
  if len(attempts) > 2:  # one more column is too many for the table
    attempts.pop('start', None)
  titles, tasks = _shared(attempts, lambda row: row['env'] not in multi_turn)
  return {
    'titles': titles,
    'count': len(tasks),
    'tasks': tasks[:MAX_PROMPTS],
    'episodes': episodes,
  }


def suite(run: runs.Run) -> Row:
  """Returns the prompts of `eval.suite` and all answers; see `answers`.

  Stages may differ in their prompts: a row is None where a stage does not have
  the prompt.
  """
  attempts = {
    title: {row['prompt']: row for row in rows}
    for title, rows in _attempts(run, 'suite').items()
  }
  prompts = list(dict.fromkeys(itertools.chain(*attempts.values())))
  return {
    'titles': list(attempts),
    'count': len(prompts),
    'tasks': [
      [rows.get(prompt) for rows in attempts.values()]
      for prompt in prompts[:MAX_SUITE]
    ],
  }


def samples(run: runs.Run) -> list[Row]:
  """Returns the first tasks of each environment with their sampled answers."""
  attempts = list(_attempts(run, 'eval').items())
  titles, all_tasks = _shared(
    dict(attempts[:1] + attempts[-1:]), lambda row: row.get('sampled_texts')
  )
  by_env: dict[str, list[Rows]] = {}
  for rows in all_tasks:
    by_env.setdefault(rows[0]['env'], []).append(rows)
  return [
    {'env': env, 'titles': titles, 'tasks': tasks[:MAX_SAMPLED_TASKS]}
    for env, tasks in list(by_env.items())[:MAX_ENVS]
  ]


def _shared(
  attempts: Mapping[str, Rows], shows: Callable[[Row], Any]
) -> tuple[list[str], list[Rows]]:
  """Returns the titles of attempts at the same tasks, and a row each per task.

  Args:
    attempts: title -> rows of a file of answers.
    shows: whether a row is shown; attempts without one are left out.
  """
  columns = {
    title: {(row['env'], row['id']): row for row in rows if shows(row)}
    for title, rows in attempts.items()
  }
  columns = {title: rows for title, rows in columns.items() if rows}
  tasks = [
    [rows[key] for rows in columns.values()]
    for key in next(iter(columns.values()), ())
    if all(key in rows for rows in columns.values())
  ]
  return list(columns), tasks


def _attempts(run: runs.Run, what: str) -> dict[str, Rows]:
  """Returns the answers before the first step, and at every stage's end."""
  ends = run.ends
  files = runs.files(run.workdir, run.stages, what)
  paths = {}
  if files and files[0][1] == 0:
    stage, _, path = files[0]
    title = 'start' if stage in run.stages[:1] else f'before {stage}'
    paths[title] = path
  for stage, step, path in files:
    title, end = ends.get(stage, (f'after {stage}', None))
    if end == step or (end is None and step):
      paths[title] = path
  keys = ('prompt',) if what == 'suite' else ('env', 'id')
  attempts = {title: runs.read_rows(x, keys) for title, x in paths.items()}
  return {title: rows for title, rows in attempts.items() if rows}


def _task(titles: Sequence[str], rows: Rows) -> Row:
  """Returns a task and its attempts, turn by turn."""
  plays = []
  for title, row in zip(titles, rows, strict=True):
    rewards, turns = row.get('turn_rewards') or (), []
    # Zeros are not shown where only the end of an episode is rewarded.
    nonzero_rewards = iter(rewards if any(rewards) else ())
    for message in row.get('messages') or ():
      if message['role'] == 'assistant':
        text, verb = cut(message['content'], MAX_TEXT, '(empty)'), ''
        if match := _ACTION.match(text):
          verb, text = match[1], text[match.end() :]
        reward = next(nonzero_rewards, None)
        act = {'verb': verb, 'text': text, 'reward': reward}
        turns.append({'act': act, 'see': []})
      else:
        turns = turns or [{'act': None, 'see': []}]
        turns[-1]['see'].append(message['content'])
    plays.append({'title': title, 'turns': turns, 'row': row})
  return {'row': rows[-1], 'plays': plays}


def transcripts(attempts: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
  """Returns tasks as HTML with its own style, for a notebook.

  Args:
    attempts: {title: attempts}, at the same tasks in the same order.
  """
  tasks = [
    _task(list(attempts), list(rows))
    for rows in zip(*attempts.values(), strict=True)
  ]
  style = asset('stories.css')
  return template('transcripts.html').render(tasks=tasks, style=style)


@functools.cache
def asset(name: str) -> str:
  """Returns the text of a file of the folder `assets`."""
  return (ASSETS / name).read_text(encoding='utf-8')


@functools.cache
def template(name: str) -> jinja2.Template:
  """Returns a template of the folder `assets`; texts are escaped."""
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(ASSETS),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  environment.policies['json.dumps_kwargs'] = {
    'allow_nan': False,
    'separators': (',', ':'),
  }
  environment.filters |= {'cut': cut, 'messages': messages, 'signed': signed}
  return environment.get_template(name)


def cut(text: Any, size: int, empty: str = '', *, end: bool = False) -> str:
  """Returns at most `size` characters of a text, from its start or end."""
  text = ('' if text is None else str(text)).strip().translate(_CONTROLS)
  if len(text) <= size:
    return text or empty
  return f'... {text[-size:]}' if end else f'{text[:size]} ...'


# --- Groups of training rollouts ----------------------------------------------


def read_groups(run: runs.Run) -> Steps:
  """Returns the rows of the first, the middle and the last logged steps."""
  paths: dict[str, list[tuple[int, str]]] = {}
  for stage, step, path in runs.files(run.workdir, run.stages, 'train'):
    paths.setdefault(stage, []).append((step, path))
  rows_by_step: Steps = {}
  for stage, places in paths.items():
    for index in sorted({0, len(places) // 2, len(places) - 1}):
      step, path = places[index]
      for row in runs.read_rows(path, ('env', 'group')):
        by_step = rows_by_step.setdefault((stage, row['env']), {})
        by_step.setdefault(step, []).append(row)
  return dict(list(rows_by_step.items())[:MAX_ENVS])


def groups(steps: Steps) -> list[Row]:
  """Returns the best and the worst group of each environment and step."""
  return [
    {
      'stage': stage,
      'env': env,
      'steps': [_step(step, rows) for step, rows in sorted(by_step.items())],
    }
    for (stage, env), by_step in steps.items()
  ]


def histograms(steps: Steps) -> list[Row]:
  """Returns the shares of rewards, of each environment and step, for bars.

  Where there are few different rewards, each has bars; else there are `BINS`
  bins of equal width, and x is their middle.
  """
  charts = []
  for (stage, env), by_step in steps.items():
    rewards = {
      step: np.array(values)
      for step, rows in sorted(by_step.items())
      if (values := _rewards(rows))
    }
    if not rewards:
      continue
    x = np.unique(np.concatenate(list(rewards.values())))
    if binned := len(x) > MAX_VALUES:
      edges = np.linspace(x[0], x[-1], BINS + 1)
      x = (edges[1:] + edges[:-1]) / 2
      counts = {k: np.histogram(y, edges)[0] for k, y in rewards.items()}
    else:
      counts = {k: (y[:, None] == x).sum(0) for k, y in rewards.items()}
    bars = [
      {
        'step': step,
        'count': int(count.sum()),
        'y': [float(f'{share:.6g}') for share in count / count.sum()],
      }
      for step, count in counts.items()
    ]
    places = [float(f'{value:.4g}') for value in x]
    chart = {'title': env, 'stage': stage, 'binned': binned, 'x': places}
    charts.append({**chart, 'bars': bars})
  return charts


def _rewards(rows: Rows) -> list[float]:
  return [x for row in rows if (x := row.get('reward')) is not None]


def _step(step: int, rows: Rows) -> Row:
  """Returns the best and the worst group of a step."""
  by_group: dict[int, Rows] = {}
  for row in rows:
    by_group.setdefault(row['group'], []).append(row)
  means = {
    number: float(np.mean(rewards))
    for number, group in by_group.items()
    if (rewards := _rewards(group))
  }
  titles = {}
  if means:
    best, worst = (pick(means, key=means.__getitem__) for pick in (max, min))
    titles = {'best group': best}
    if means[worst] < means[best]:
      titles['worst group'] = worst
    elif len(means) > 1:
      titles = {'one group; all have the same mean': best}
  return {
    'step': step,
    'groups': len(by_group),
    'mean': float(np.mean(_rewards(rows))) if means else None,
    'shown': [
      {'title': title, 'mean': means[number], 'rollouts': by_group[number]}
      for title, number in titles.items()
    ],
  }


def messages(value: list[Row] | None) -> str:
  """Returns the text of one message; of several, a line per message."""
  value = value or []
  if len(value) == 1:
    return cut(value[0]['content'], MAX_TEXT)
  lines = [f'{x["role"]}: {x["content"]}' for x in value]
  return cut('\n'.join(lines), MAX_TEXT)


def signed(value: float | None) -> str:
  """Returns a number with its sign, three digits."""
  if value is None:
    return 'n/a'
  return f'{value:+.3g}'.replace('-', '\u2212') if value else '0'
