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
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from posttrain.report import runs

MAX_PROMPTS = 12  # prompts in the table of answers
MAX_SUITE = 100  # prompts of a suite
MAX_TASKS = 6  # tasks of each environment of several turns
MAX_SAMPLED_TASKS = 4  # tasks of each environment with sampled answers
MAX_SAMPLES = 4  # sampled answers to each task
MAX_ENVS = 8  # environments of each kind of story
MAX_ROLLOUTS = 16  # rollouts shown of a group
MAX_TEXT = 600  # characters shown of a completion or an observation
MAX_PROMPT = 800  # characters shown of a prompt, from its end
MAX_SAMPLE = 300  # characters shown of a sampled answer
MAX_VALUES = 12  # different rewards with a bar each; more have bins
BINS = 20
ASSETS = pathlib.Path(__file__).parent / 'assets'
# `QUERY: SELECT 1`: the kind of action, and its argument.
_ACTION = re.compile(r'([A-Z][A-Z_]+)(?::\s*|\s+)(?=\S)')
# Control characters but tab and line feed, as the pictures of them.
_CONTROLS = {i: 0x2400 + i for i in (*range(9), *range(11, 32))} | {127: 0x2421}
_KINDS = {True: 'good', False: 'bad'}

Row, Rows = runs.Row, runs.Rows
# {(stage, environment): {step: rows}}
Steps = dict[tuple[str, str], dict[int, Rows]]


def answers(run: runs.Run) -> Row:
  """Returns the greedy answers to the first tasks, before and after.

  Returns:
    `titles` of the columns, `count` of the tasks of one turn, the first of them
    in `tasks`, and `episodes`: the environments of several turns.
  """
  attempts = _attempts(run, 'eval')
  multi_turn = {
    row['env']
    for row in itertools.chain(*attempts.values())
    if len(row.get('messages') or ()) > 1
  }
  columns = dict(attempts)
  if len(columns) > 2:  # one more column is too many for the table
    columns.pop('start', None)
  by_task = [
    {
      (row['env'], row['id']): row
      for row in rows
      if row['env'] not in multi_turn
    }
    for rows in columns.values()
  ]
  shared = [x for x in next(iter(by_task), ()) if all(x in y for y in by_task)]
  return {
    'titles': list(columns),
    'count': len(by_task[0]) if by_task else 0,
    'tasks': [
      {
        'prompt': cut(by_task[-1][key].get('prompt'), MAX_PROMPT, end=True),
        'answer': cut(by_task[-1][key].get('answer'), MAX_PROMPT, end=True),
        'cells': [_answer(rows[key]) for rows in by_task],
      }
      for key in shared[:MAX_PROMPTS]
    ],
    'episodes': [_episodes(x, attempts) for x in sorted(multi_turn)[:MAX_ENVS]],
  }


def suite(run: runs.Run) -> Row:
  """Returns the prompts of `eval.suite` and all answers; see `answers`.

  Stages may differ in their prompts: a cell is None where a stage does not have
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
      {
        'prompt': cut(prompt, MAX_PROMPT, end=True),
        'cells': [
          _answer(rows[prompt]) if prompt in rows else None
          for rows in attempts.values()
        ],
      }
      for prompt in prompts[:MAX_SUITE]
    ],
  }


def samples(run: runs.Run) -> list[Row]:
  """Returns the first tasks of each environment with their sampled answers."""
  attempts = list(_attempts(run, 'eval').items())
  by_task = {
    title: {(x['env'], x['id']): x for x in rows if x.get('sampled_texts')}
    for title, rows in (attempts[:1] + attempts[1:][-1:])
  }
  by_task = {title: rows for title, rows in by_task.items() if rows}
  envs: dict[str, list[Row]] = {}
  for key, row in next(iter(by_task.values()), {}).items():
    tasks = envs.setdefault(key[0], [])
    if all(key in x for x in by_task.values()):
      if len(tasks) < MAX_SAMPLED_TASKS:
        question = row.get('question') or row.get('prompt')
        tasks.append(
          {
            'question': cut(question, MAX_SAMPLE, end=True),
            'answer': cut(row.get('answer'), MAX_SAMPLE),
            'columns': [_sampled(rows[key]) for rows in by_task.values()],
          }
        )
  return [
    {'env': env, 'titles': list(by_task), 'tasks': tasks}
    for env, tasks in list(envs.items())[:MAX_ENVS]
    if tasks
  ]


def _sampled(row: Row) -> Row:
  """Returns the sampled answers to a task, with their grades."""
  texts = row['sampled_texts']
  grades = row.get('sampled') or [None] * len(texts)
  graded = any(x is not None for x in grades)
  right = f'{sum(x is True for x in grades)} of {len(texts)} correct'
  return {
    'right': right if graded else '',
    'answers': [
      {'kind': _KINDS.get(grade, ''), 'text': cut(text, MAX_SAMPLE, '(empty)')}
      for text, grade in list(zip(texts, grades, strict=True))[:MAX_SAMPLES]
    ],
    'hidden': max(len(texts) - MAX_SAMPLES, 0),
  }


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


def _answer(row: Row) -> Row:
  return {
    'kind': _KINDS.get(row.get('correct'), ''),
    'text': cut(row.get('text'), MAX_TEXT, '(empty)'),
    'grades': [f'{k} {x:.2f}' for k, x in (row.get('grades') or {}).items()],
  }


def _episodes(env: str, attempts: Mapping[str, Rows]) -> Row:
  """Returns the first tasks of an environment, turn by turn."""
  by_id = {
    title: {row['id']: row for row in rows if row['env'] == env}
    for title, rows in attempts.items()
  }
  by_id = {title: rows for title, rows in by_id.items() if rows}
  first = next(iter(by_id.values()))
  shared = [x for x in first if all(x in rows for rows in by_id.values())]
  return {
    'env': env,
    'count': len(shared),
    'tasks': [
      _task({title: rows[x] for title, rows in by_id.items()})
      for x in shared[:MAX_TASKS]
    ],
  }


def _task(attempts: Mapping[str, Mapping[str, Any]]) -> Row:
  """Returns the attempts at a task; {title: row as in a file of answers}."""
  *_, last = attempts.values()
  return {
    'id': last['id'],
    'question': cut(last.get('question'), MAX_PROMPT, end=True),
    'answer': cut(last.get('answer'), MAX_PROMPT),
    'plays': [{'title': k, **_play(row)} for k, row in attempts.items()],
  }


def _play(row: Mapping[str, Any]) -> Row:
  """Returns the turns of an attempt and its grade."""
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
      turns[-1]['see'].append(cut(message['content'], MAX_TEXT))
  details = [row.get('stop_reason')]
  if row.get('reward') is not None:
    details.append(f'reward {row["reward"]:+.2f}'.replace('-', '\u2212'))
  details.append(cut(row.get('error'), MAX_TEXT))
  return {
    'kind': _KINDS.get(row.get('correct'), ''),
    'turns': turns,
    'details': [x for x in details if x],
  }


def transcripts(attempts: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
  """Returns tasks as HTML with its own style, for a notebook.

  Args:
    attempts: {title: attempts}, at the same tasks in the same order.
  """
  tasks = [
    _task(dict(zip(attempts, rows, strict=True)))
    for rows in zip(*attempts.values(), strict=True)
  ]
  style = (ASSETS / 'stories.css').read_text(encoding='utf-8')
  return template('transcripts.html').render(tasks=tasks, style=style)


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
      step: np.array(found)
      for step, rows in sorted(by_step.items())
      if (found := _rewards(rows))
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
    charts.append(
      {'title': env, 'stage': stage, 'binned': binned, 'x': places}
      | {'bars': bars}
    )
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
      {
        'title': title,
        'mean': means[number],
        'prompt': _messages(by_group[number][0].get('prompt')),
        'answer': cut(by_group[number][0].get('answer'), MAX_TEXT),
        'rollouts': [_rollout(x) for x in by_group[number][:MAX_ROLLOUTS]],
        'hidden': max(len(by_group[number]) - MAX_ROLLOUTS, 0),
      }
      for title, number in titles.items()
    ],
  }


def _rollout(row: Row) -> Row:
  advantage = row.get('advantage')
  details = [f'{k} {_signed(x)}' for k, x in (row.get('rewards') or {}).items()]
  details += [
    'does not train'
    if advantage is None
    else f'advantage {_signed(advantage)}',
    row.get('stop_reason'),
    f'{row["tokens"]} tokens' if row.get('tokens') is not None else '',
    cut(row.get('error'), MAX_TEXT),
  ]
  return {
    'kind': _KINDS.get(row.get('correct'), ''),
    'reward': _signed(row.get('reward')),
    'details': [x for x in details if x],
    'text': _messages(row.get('completion')) or '(empty)',
  }


def _messages(messages: list[Row] | None) -> str:
  """Returns the text of one message; of several, a line per message."""
  messages = messages or []
  if len(messages) == 1:
    return cut(messages[0]['content'], MAX_TEXT)
  lines = [f'{x["role"]}: {x["content"]}' for x in messages]
  return cut('\n'.join(lines), MAX_TEXT)


def _signed(value: float | None) -> str:
  if value is None:
    return 'n/a'
  return f'{value:+.3g}'.replace('-', '\u2212') if value else '0'
