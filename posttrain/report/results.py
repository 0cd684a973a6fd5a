"""The results of runs: tables of evaluations, headline numbers, facts."""

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from posttrain.metrics import estimates, statistics
from posttrain.report import runs

# After `statistics.MEASURES`: metric, title ({} = the metric), number format.
RESULTS = (
  (r'pass_rate_\w+', '{}, greedy', '{:.1%}'),  # over a subset of the tasks
  (r'pass@\d+', '{}', '{:.1%}'),
  (r'maj@\d+', '{}, majority vote', '{:.1%}'),
  ('format_rate', 'format rate, greedy', '{:.1%}'),
  ('entropy', 'entropy, nats per token', '{:.4f}'),
  ('kl', 'KL to the start of the stage, nats per token', '{:.4f}'),
  ('length', 'length, tokens', '{:.1f}'),
)
SUITE = (  # the same, of the answers to `eval.suite`
  ('repetition', 'repeated 4-grams', '{:.1%}'),
  ('broken_characters', 'broken characters', '{:.1%}'),
  ('refusal', 'refusals in English', '{:.1%}'),
  ('code_syntax', 'blocks of code that parse', '{:.1%}'),
  ('truncated', 'answers cut off', '{:.1%}'),
  ('length', 'length, tokens', '{:.1f}'),
)
# The main number of a run without an evaluation.
_LOSS = statistics.Measure(
  'loss/(?P<env>total)', 'training loss', '{:.4g}', '', 'loss/total', 'noisy'
)
# The headline is the first that a run has, for each environment.
HEADLINES = (*statistics.MEASURES, *statistics.OTHERWISE, _LOSS)
MAX_HEADLINES = 6


class Value(NamedTuple):
  """A number as a text, and its interval, '' if it has none."""

  text: str
  interval: str = ''


# {title of a column: {(environment, metric): value}}
Columns = dict[str, dict[tuple[str, str], Value]]


def columns(run: runs.Run) -> Columns:
  """Returns the first evaluation, and that of every stage's end."""
  evaluations = [(row, _evaluated(row)) for row in run.rows]
  evaluations = [(row, values) for row, values in evaluations if values]
  if not evaluations:
    return {}
  table = {'start': evaluations[0][1]}
  for stage, (title, end) in run.ends.items():
    steps = [(r['step'], v) for r, v in evaluations if r['stage'] == stage]
    if steps:
      table[title] = dict(steps).get(end, steps[-1][1])
  return table


def side_by_side(all_runs: Sequence[runs.Run]) -> Columns:
  """Returns the columns of one run; of several, each run's start and end."""
  if len(all_runs) == 1:
    return columns(all_runs[0])
  table: Columns = {}
  for run in all_runs:
    of_run = columns(run)
    if of_run:
      *_, last = of_run
      for title in dict.fromkeys(('start', last)):
        table[f'{run.name}: {title}'] = of_run[title]
  return table


def keys(all_runs: Sequence[runs.Run], table: Columns) -> list[tuple[str, str]]:
  """Returns the (environment, metric) of the table's lines, in their order."""
  merged: dict[str, Any] = {}
  for row in (row for run in all_runs for row in run.rows):
    merged |= {k: v for k, v in row.items() if v is not None}
  cells = {key for values in table.values() for key in values}
  return [key for key in _evaluated(merged) if key in cells]


def headlines(run: runs.Run) -> list[dict[str, Any]]:
  """Returns the main number of each environment, at the start and the end."""
  for measure in HEADLINES:
    points: dict[statistics.Match, list[tuple[dict[str, Any], str]]] = {}
    for row in run.rows:
      for key in row:
        match = _match(measure, key, row)
        if match is not None:
          points.setdefault(match, []).append((row, key))
    if points:
      # The environments of the last stage come first.
      order = sorted(
        points, key=lambda x: -run.stages.index(points[x][-1][0]['stage'])
      )
      return [
        {**match._asdict(), **_headline(run, points[match], measure.style)}
        for match in order[:MAX_HEADLINES]
      ]
  return []


def _headline(
  run: runs.Run, rows: Sequence[tuple[dict[str, Any], str]], style: str
) -> dict[str, Any]:
  """Returns first and last value of a metric, and their difference."""
  (first, key), (last, _) = rows[0], rows[-1]
  end = run.ends[last['stage']][1]
  for row, _ in rows:
    if (row['stage'], row['step']) == (last['stage'], end):
      last = row
  change = last[key] - first[key]
  points = f'{100 * change:+.1f} points' if '%' in style else f'{change:+.4g}'
  return {
    'first': _value(first, key, style),
    'last': _value(last, key, style),
    'change': points.replace('-', '\N{MINUS SIGN}'),
    'moved': last is not first,
    'where': f'{last["stage"]}, step {last["step"]:,}',
  }


def _match(
  measure: statistics.Measure, key: str, row: Mapping[str, Any]
) -> statistics.Match | None:
  """Returns the match of a measured metric; None for bounds and nulls."""
  if not key.startswith(measure.key) or row[key] is None:
    return None
  # A bound has the name of a metric, and no bounds.
  if estimates.is_bound(key, row):
    return None
  return statistics.match(measure, key)


def _evaluated(row: dict[str, Any]) -> dict[tuple[str, str], Value]:
  """Returns {(environment, title): value}, in a fixed order."""
  keys = [key for key in row if key.startswith('eval/')]
  cells = {}
  for measure in (*statistics.MEASURES, *statistics.OTHERWISE):
    for key in keys:
      match = _match(measure, key, row)
      if match is not None:
        cells[match.env, match.title] = _value(row, key, measure.style)
  for pattern, title, style in RESULTS if keys else ():
    for key in keys:
      match = re.fullmatch(f'eval/({pattern})/(.+)', key)
      if match and row[key] is not None and not estimates.is_bound(key, row):
        cells[match[2], title.format(match[1])] = _value(row, key, style)
  for name, title, style in SUITE:
    if (value := row.get(f'eval/suite/{name}')) is not None:
      cells['suite', title] = Value(style.format(value))
  return dict(sorted(cells.items(), key=lambda item: item[0][0]))


def _value(row: Mapping[str, Any], key: str, style: str) -> Value:
  """Returns a metric of a row, with its interval."""
  name, _, env = key.rpartition('/')
  bounds = [row.get(f'{name}{side}/{env}') for side in estimates.BOUNDS]
  if None in bounds:
    return Value(style.format(row[key]))
  low, high = map(style.format, bounds)
  return Value(style.format(row[key]), f'[{low}, {high}]')


# --- Facts beside the metrics -----------------------------------------------


def subtitle(run: runs.Run) -> str:
  """Returns steps, tokens per second and compiled programs of each stage."""
  parts = []
  for stage in run.stages:
    rows = run.rows_of(stage)
    text = f'{stage}: {rows[-1]["step"]:,} steps'
    speeds = [s for row in rows if (s := row.get('time/tokens_per_second'))]
    if speeds:
      text += f', {np.median(speeds):,.0f} tokens/s (median)'
    if (compiles := rows[-1].get('compiles')) is not None:
      text += f', update compiled {compiles} time{"s" * (compiles != 1)}'
    parts.append(text)
  for row in reversed(run.rows):
    share, seconds = row.get('time/goodput'), row.get('time/elapsed')
    if share is not None and seconds is not None:
      minutes = f'{seconds / 60:,.1f} minutes'
      parts.append(f'{share:.0%} of {minutes} in rollouts and updates')
      break
  return '; '.join(parts) or 'No metrics yet.'


def status(run: runs.Run) -> tuple[str, str]:
  """Returns ('finished' | 'unfinished', the run's stage and step)."""
  if not run.rows:
    return 'unfinished', 'no step yet'
  last, steps = run.rows[-1], run.steps
  text = f'stage {last["stage"]}, step {last["step"]:,}'
  if last['stage'] in steps:
    place = list(steps).index(last['stage']) + 1
    text += f' of {steps[last["stage"]]:,} (stage {place} of {len(steps)})'
  return 'finished' if run.finished else 'unfinished', text


def facts(run: runs.Run) -> list[tuple[str, Any]]:
  """Returns (name, value) of the model, the device, the seed and so on."""
  starts = run.about.get('starts') or [{}]
  model = run.config.get('model') or {}
  shape = [
    f'{name}{model[key]}'
    for key, name in (('layers', 'layers '), ('embed_dim', 'width '))
    + (('dtype', ''),)
    if model.get(key)
  ]
  init = next(iter(run.nodes.values()), {}).get('init')
  sizes = {}
  for stage, node in (run.about.get('stages') or {}).items():
    part = ''
    if node['trained'] != node['parameters']:
      part = f', of which {node["trained"]:,} train'
    sizes[stage] = f'{node["parameters"]:,}{part}'
  tokens = sum(row.get('batch/tokens') or 0 for row in run.rows)
  written = datetime.datetime.fromtimestamp(run.written or 0, datetime.UTC)
  versions = starts[-1].get('versions', {})
  again = f', {len(starts)} starts' if len(starts) > 1 else ''
  pairs = [
    ('model', ', '.join(shape + [f'from {init}'] * bool(model and init))),
    (
      'parameters',
      '; '.join(f'{stage}: {text}' for stage, text in sizes.items())
      if len(set(sizes.values())) > 1
      else next(iter(sizes.values()), ''),
    ),
    ('device', starts[-1].get('devices')),
    ('host', starts[-1].get('host')),
    ('seed', run.config.get('seed')),
    ('tokens trained on', f'{tokens:,}' if tokens else ''),
    ('training time', _duration(run.rows)),
    ('started', starts[0].get('time') and starts[0]['time'] + again),
    ('last row', run.written and f'{written:%Y-%m-%d %H:%M} UTC'),
    ('versions', ', '.join(map(' '.join, versions.items()))),
  ]
  return [(name, value) for name, value in pairs if value not in (None, '')]


def _duration(rows: runs.Rows) -> str:
  seconds = [x for row in rows if (x := row.get('time/elapsed')) is not None]
  if not seconds:
    return ''
  minutes, rest = divmod(round(seconds[-1]), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours:,} h {minutes} min'
  return f'{minutes} min {rest} s' if minutes else f'{rest} s'


def differences(all_runs: Sequence[runs.Run]) -> list[tuple[str, list[str]]]:
  """Returns the options that differ: (dotted key, value of each run)."""

  def flat(node: Any, prefix: str = '') -> dict[str, Any]:
    if not isinstance(node, dict) or not node:
      return {prefix[:-1]: node}
    parts = (flat(child, f'{prefix}{key}.') for key, child in node.items())
    return {key: value for part in parts for key, value in part.items()}

  options = [flat(run.config) for run in all_runs]
  entries = []
  for key in dict.fromkeys(key for values in options for key in values):
    values = [repr(x[key]) if key in x else 'none' for x in options]
    if len(set(values)) > 1:
      entries.append((key, values))
  return entries
