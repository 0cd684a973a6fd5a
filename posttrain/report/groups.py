"""Groups of training rollouts to read, and the distribution of their rewards.

The logbook writes the rollouts of some training steps to
`rollouts/<stage>_train_<step>.jsonl`, see `pipeline.rollout_rows`. Of the
first, the middle and the last of these steps, the report shows for each
environment the group with the highest and that with the lowest mean reward,
with all their rollouts, and how the rewards of all groups are distributed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.report import runs as runs_lib
from posttrain.report import transcripts

MAX_ENVS = 8  # environments of a stage with groups on the page
MAX_ROLLOUTS = 16  # rollouts shown of a group
MAX_TEXT = 600  # characters shown of a completion
MAX_VALUES = 12  # different rewards with a bar each; more have bins
BINS = 20

Rows = list[dict[str, Any]]
# {(stage, environment): {step: rows}}
Steps = dict[tuple[str, str], dict[int, Rows]]


def read(run: runs_lib.Run) -> Steps:
  """Returns the rows of the first, the middle and the last logged steps."""
  files = runs_lib.files(run.workdir, run.stages, 'train')
  paths: dict[str, list[tuple[int, str]]] = {}
  for stage, step, path in files:
    paths.setdefault(stage, []).append((step, path))
  rows_by_step: Steps = {}
  for stage, places in paths.items():
    for index in sorted({0, len(places) // 2, len(places) - 1}):
      step, path = places[index]
      for row in runs_lib.read_rows(path, ('env', 'group')):
        key = stage, str(row['env'])
        rows_by_step.setdefault(key, {}).setdefault(step, []).append(row)
  return rows_by_step


def stories(steps: Steps) -> list[dict[str, Any]]:
  """Returns the best and the worst group of each environment and step."""
  return [
    {
      'stage': stage,
      'env': env,
      'steps': [_step(step, rows) for step, rows in sorted(by_step.items())],
    }
    for (stage, env), by_step in list(steps.items())[:MAX_ENVS]
  ]


def histograms(steps: Steps) -> list[dict[str, Any]]:
  """Returns the shares of rewards, of each environment and step, for bars.

  Where there are few different rewards, each has bars; else there are `BINS`
  bins of equal width, and x is their middle.
  """
  charts = []
  for (stage, env), by_step in list(steps.items())[:MAX_ENVS]:
    rewards = {
      step: np.array([x for row in rows if (x := _reward(row)) is not None])
      for step, rows in sorted(by_step.items())
    }
    rewards = {step: values for step, values in rewards.items() if values.size}
    if rewards:
      charts.append({'title': env, 'stage': stage, **_bars(rewards)})
  return charts


def _bars(rewards: Mapping[int, np.ndarray]) -> dict[str, Any]:
  values = np.unique(np.concatenate(list(rewards.values())))
  binned = len(values) > MAX_VALUES
  if binned:
    edges = np.linspace(values[0], values[-1], BINS + 1)
    x = (edges[1:] + edges[:-1]) / 2
    counts = {k: np.histogram(y, edges)[0] for k, y in rewards.items()}
  else:
    x = values
    counts = {k: (y[:, None] == values).sum(0) for k, y in rewards.items()}
  return {
    'binned': binned,
    'x': [float(f'{value:.4g}') for value in x],
    'bars': [
      {
        'step': step,
        'count': int(count.sum()),
        'y': [float(f'{share:.6g}') for share in count / count.sum()],
      }
      for step, count in counts.items()
    ],
  }


def _step(step: int, rows: Rows) -> dict[str, Any]:
  """Returns the best and the worst group of a step."""
  groups: dict[int, Rows] = {}
  for row in rows:
    groups.setdefault(row['group'], []).append(row)
  means = {number: _mean(group) for number, group in groups.items()}
  graded = {number: mean for number, mean in means.items() if mean is not None}
  titles = {}
  if graded:
    best = max(graded, key=lambda number: graded[number])
    worst = min(graded, key=lambda number: graded[number])
    titles = {'best group': best}
    if graded[worst] < graded[best]:
      titles['worst group'] = worst
    elif len(graded) > 1:
      titles = {'one group; all have the same mean': best}
  return {
    'step': step,
    'groups': len(groups),
    'mean': _mean(rows),
    'shown': [
      {'title': title, 'mean': graded[number], **_group(groups[number])}
      for title, number in titles.items()
    ],
  }


def _group(rows: Rows) -> dict[str, Any]:
  """Returns a group: its task, and its rollouts."""
  first = rows[0]
  return {
    'task': str(first.get('task', '')),
    'prompt': transcripts.cut(_messages(first.get('prompt')), MAX_TEXT),
    'answer': _plain(first.get('answer')),
    'rollouts': [_rollout(row) for row in rows[:MAX_ROLLOUTS]],
    'hidden': max(len(rows) - MAX_ROLLOUTS, 0),
  }


def _rollout(row: Mapping[str, Any]) -> dict[str, Any]:
  functions, advantage = row.get('rewards'), row.get('advantage')
  functions = functions if isinstance(functions, dict) else {}
  details = [f'{name} {_signed(value)}' for name, value in functions.items()]
  details.append(
    f'advantage {_signed(advantage)}'
    if isinstance(advantage, int | float)
    else 'does not train'
  )
  details += [str(row[x]) for x in ('stop_reason',) if row.get(x)]
  if isinstance(row.get('tokens'), int):
    details.append(f'{row["tokens"]} tokens')
  if row.get('error'):
    details.append(transcripts.cut(str(row['error']), MAX_TEXT))
  text = transcripts.cut(_messages(row.get('completion')), MAX_TEXT)
  return {
    'kind': {True: 'good', False: 'bad'}.get(row.get('correct'), ''),
    'reward': _signed(_reward(row)),
    'details': details,
    'text': text or '(empty)',
  }


def _messages(messages: Any) -> str:
  """Returns the text of one message; of several, a line per message."""
  texts = [
    (str(x.get('role', '')), str(x.get('content', '')))
    for x in (messages if isinstance(messages, list) else [])
    if isinstance(x, dict)
  ]
  if len(texts) == 1:
    return texts[0][1]
  return '\n'.join(f'{role}: {content}' for role, content in texts)


def _reward(row: Mapping[str, Any]) -> float | None:
  reward = row.get('reward')
  return float(reward) if isinstance(reward, int | float) else None


def _mean(rows: Sequence[Mapping[str, Any]]) -> float | None:
  rewards = [x for row in rows if (x := _reward(row)) is not None]
  return float(np.mean(rewards)) if rewards else None


def _signed(value: Any) -> str:
  if not isinstance(value, int | float):
    return 'n/a'
  if not value:
    return '0'
  return f'{value:+.3g}'.replace('-', '\N{MINUS SIGN}')


def _plain(value: Any) -> str:
  return transcripts.cut('' if value is None else str(value), MAX_TEXT)
