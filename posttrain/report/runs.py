"""A run as the report reads it: the files of its workdir, tables and facts.

`PANELS` lists the metrics with a panel of their own, in their order; the report
draws all others as well, grouped by prefix. The results are a table of
evaluations, a headline number per environment, and facts beside the metrics.
"""

import dataclasses
import datetime
import functools
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.evaluation import comparison
from posttrain.metrics import estimates, statistics, writers
from posttrain.util import disk

PANELS = (  # title, metric or its prefix, how it is drawn
  *(
    (x.panel, x.key, 'rate' if '%' in x.style else 'plain')
    for x in statistics.MEASURES
  ),
  ('Pass rate of k answers', 'eval/pass@', 'rate'),
  ('Format rate', 'eval/format_rate/', 'rate'),
  ('Reward of rollouts', 'rollout/reward/', 'noisy'),
  ('Groups with credit', 'rollout/mixed_groups/', 'rate'),
  ('Draws of the curriculum', 'curriculum/draws/', 'rate'),
  ('Pass rates of its pools', 'curriculum/pass_rate/', 'rate'),
  ('Entropy, nats per token', 'eval/entropy/', 'plain'),
  ('Length of answers, tokens', 'eval/length/', 'plain'),
  ('KL to the start, nats per token', 'eval/kl/', 'plain'),
  ('KL to the reference', 'ref_kl/kl', 'noisy'),
  ('Sampler against trainer, |nats|', 'mismatch/', 'log'),
  ('Reward margin of pairs', 'rewards/margins', 'noisy'),
  ('Training loss', 'loss/total', 'noisy'),
  ('Gradient norm', 'optim/grad_norm', 'noisy'),
  ('Learning rate', 'optim/lr', 'plain'),
  ('Tokens of batches, shared ones once', 'batch/tokens', 'sum'),
  ('Memory, GiB', 'memory/', 'plain'),
)

# Beside `statistics.MEASURES`: key, title, format, rest of the metric.
_RESULTS = (
  # A rate over some of the tasks.
  ('', '{}, greedy', '{:.1%}', r'(?P<name>pass_rate_\w+)/(?P<env>.+)'),
  ('', '{}', '{:.1%}', r'(?P<name>pass@\d+)/(?P<env>.+)'),
  ('', '{}, majority vote', '{:.1%}', r'(?P<name>maj@\d+)/(?P<env>.+)'),
  ('format_rate/', 'format rate, greedy', '{:.1%}'),
  ('entropy/', 'entropy, nats per token', '{:.4f}'),
  ('kl/', 'KL to the start of the stage, nats per token', '{:.4f}'),
  ('length/', 'length, tokens', '{:.1f}'),
  # Of the answers to `eval.suite`.
  ('suite/repetition', 'repeated 4-grams', '{:.1%}', ''),
  ('suite/broken_characters', 'broken characters', '{:.1%}', ''),
  ('suite/refusal', 'refusals in English', '{:.1%}', ''),
  ('suite/right_refusal', 'right to refuse, or not to', '{:.1%}', ''),
  ('suite/code_syntax', 'blocks of code that parse', '{:.1%}', ''),
  ('suite/truncated', 'answers cut off', '{:.1%}', ''),
  ('suite/length', 'length, tokens', '{:.1f}', ''),
)
_MEASURES = (
  *statistics.MEASURES,
  *statistics.OTHERWISE,
  *(
    statistics.Measure(f'eval/{key}', title, style, '', *rest)
    for key, title, style, *rest in _RESULTS
  ),
)
# The main number of a run without an evaluation.
_LOSS = statistics.Measure('loss/total', 'training loss', '{:.4g}', '', '')
# The headline is the first that a run has, for each environment.
HEADLINES = (*statistics.MEASURES, *statistics.OTHERWISE, _LOSS)
MAX_HEADLINES = 6

Row = dict[str, Any]
Rows = list[Row]


@dataclasses.dataclass(frozen=True)
class Run:
  """The files of a run, as far as they are written.

  Fields:
    workdir: its folder.
    name: its name in the report.
    rows: rows of metrics.jsonl.
    config: config.json, {} if there is none.
    about: about.json, with devices and versions; {} if there is none.
    written: seconds since 1970 of the last row; None without a row.
  """

  workdir: str
  name: str
  rows: Rows
  config: Row
  about: Row
  written: float | None

  @functools.cached_property
  def stages(self) -> list[str]:
    """The stages that have begun, in their order."""
    return list(dict.fromkeys(row['stage'] for row in self.rows))

  @property
  def nodes(self) -> dict[str, Row]:
    """The options of each stage, in the order of the config."""
    return {x: self.config[x] for x in self.config.get('stages', ())}

  @property
  def steps(self) -> dict[str, int]:
    """{stage: number of its steps}, in the order of the config."""
    return {k: x['steps'] for k, x in self.nodes.items() if x.get('steps')}

  @property
  def envs(self) -> set[str]:
    """The names of the environments of all stages."""
    return {x for node in self.nodes.values() for x in node.get('envs') or ()}

  @property
  def finished(self) -> bool:
    """Whether the run has come to its end."""
    return bool(self.about.get('ended'))

  def rows_of(self, stage: str) -> Rows:
    """Returns the rows of a stage."""
    return [row for row in self.rows if row['stage'] == stage]

  @property
  def ends(self) -> dict[str, tuple[str, int | None]]:
    """{stage: (title of its end, step whose weights it hands on)}.

    The step is None for the last one; where the stage selects, it is the best.
    """
    ends = {}
    for stage in self.stages:
      rows, step = self.rows_of(stage), None
      title = f'after {stage}'
      optim = self.nodes.get(stage, {}).get('optim') or {}
      if optim.get('average') is not None:
        title += ', averaged weights'
      if any('select/best_step' in row for row in rows):
        step = writers.end(rows)['step']
        title += f', at its best step {step}'
      if not self.finished and rows[-1] is self.rows[-1]:
        if rows[-1]['step'] < self.steps.get(stage, 0):
          title = f'{stage} so far'
      ends[stage] = title, step
    return ends


def read(workdir: str, name: str) -> Run:
  """Reads a workdir; files that are missing are left out.

  Args:
    workdir: the run's folder.
    name: its name in the report.

  Raises:
    ValueError: a file is damaged.
  """
  metrics, *others = (
    os.path.join(workdir, x)
    for x in ('metrics.jsonl', 'config.json', 'about.json')
  )
  rows = writers.read_metrics(metrics)
  config, about = (
    disk.read_json_object(x) if os.path.exists(x) else {} for x in others
  )
  written = os.path.getmtime(metrics) if rows else None
  return Run(workdir, name, rows, config, about, written)


def files(
  workdir: str, stages: Sequence[str], what: str
) -> list[tuple[str, int, str]]:
  """Returns (stage, step, path) of the files of rollouts, in the run's order.

  Args:
    workdir: the run's folder.
    stages: its stages, in their order.
    what: 'eval', 'suite' or 'train'.
  """
  folder, rollout_files = os.path.join(workdir, 'rollouts'), []
  for name in os.listdir(folder) if os.path.isdir(folder) else ():
    if match := re.fullmatch(rf'(.+)_{what}_(\d+)\.jsonl', name):
      path = os.path.join(folder, name)
      rollout_files.append((match[1], int(match[2]), path))
  order = {stage: place for place, stage in enumerate(stages)}
  return sorted(
    rollout_files, key=lambda x: (order.get(x[0], len(order)), x[1], x[2])
  )


def read_rows(path: str, keys: Sequence[str]) -> Rows:
  """Returns the rows of a file of rollouts; warns of lines that are none.

  Args:
    path: the file.
    keys: the names that each row must have, with a text or a whole number.
  """
  try:
    return writers.read(path, keys)
  except (OSError, ValueError) as error:
    warnings.warn(f'the report leaves rollouts out: {error}', stacklevel=2)
    return []


def names(workdirs: Sequence[str]) -> list[str]:
  """Returns the folders' paths, without the parent that all share."""
  paths = [os.path.abspath(workdir) for workdir in workdirs]
  parent = os.path.commonpath([os.path.dirname(path) for path in paths])
  return [os.path.relpath(path, parent) for path in paths]


def shows(key: str, name: str) -> bool:
  """Returns whether a panel's key is a metric, or its prefix up to / or @."""
  return name == key or key[-1] in '/@' and name.startswith(key)


# --- Results and facts --------------------------------------------------------


Cells = dict[tuple[str, str], estimates.Value]  # (environment, metric) -> it
Columns = dict[str, Cells]  # by title


def columns(run: Run) -> Columns:
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


def side_by_side(all_runs: Sequence[Run]) -> Columns:
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


def keys(all_runs: Sequence[Run], table: Columns) -> list[tuple[str, str]]:
  """Returns the (environment, metric) of the table's lines, in their order."""
  merged: dict[str, Any] = {}
  for row in (row for run in all_runs for row in run.rows):
    merged |= {k: v for k, v in row.items() if v is not None}
  cells = {key for values in table.values() for key in values}
  return [key for key in _evaluated(merged) if key in cells]


def headlines(run: Run) -> list[Row]:
  """Returns the main number of each environment, at the start and the end."""
  points: dict[tuple[str, str], list[tuple[Row, str]]] = {}
  for measure in HEADLINES:
    for row in run.rows:
      for key in row:
        if match := _match(measure, key, row):
          points.setdefault(match, []).append((row, key))
    if points:
      break
  lines = []
  # The environments of the last stage come first.
  for (env, title), cells in sorted(
    points.items(), key=lambda x: -run.stages.index(x[1][-1][0]['stage'])
  )[:MAX_HEADLINES]:
    (first, key), (last, _) = cells[0], cells[-1]
    end = run.ends[last['stage']][1]
    for row, _ in cells:
      if (row['stage'], row['step']) == (last['stage'], end):
        last = row
    compared = last | comparison.within(run.workdir, last, first)
    change = last[key] - first[key]
    is_rate = '%' in measure.style
    text = f'{100 * change:+.1f} points' if is_rate else f'{change:+.4g}'
    lines.append(
      {
        'env': env,
        'title': title,
        'first': estimates.formatted(first, key, measure.style),
        'last': estimates.formatted(last, key, measure.style),
        'words': (estimates.change(first, compared, key) or [''])[-1],
        'change': text.replace('-', '\N{MINUS SIGN}'),
        'moved': last is not first,
        'where': f'{last["stage"]}, step {last["step"]:,}',
      }
    )
  return lines


def _match(
  measure: statistics.Measure, key: str, row: Mapping[str, Any]
) -> tuple[str, str] | None:
  """Returns the match of a measured metric; None for bounds and nulls."""
  # A bound has the name of a metric, and no bounds.
  if row[key] is None or estimates.is_bound(key, row):
    return None
  return statistics.match(measure, key)


def _evaluated(row: Row) -> Cells:
  """Returns {(environment, title): value}, in a fixed order."""
  cells = {}
  for measure in _MEASURES:
    for key in row:
      if match := _match(measure, key, row):
        cells[match] = estimates.formatted(row, key, measure.style)
  # Numbers of the suite come last.
  return dict(
    sorted(cells.items(), key=lambda x: (x[0][0] == 'suite', x[0][0]))
  )


# --- Facts beside the metrics -----------------------------------------------


def subtitle(run: Run) -> str:
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


def status(run: Run) -> tuple[str, str]:
  """Returns ('finished' | 'unfinished', the run's stage and step)."""
  if not run.rows:
    return 'unfinished', 'no step yet'
  last, steps = run.rows[-1], run.steps
  text = f'stage {last["stage"]}, step {last["step"]:,}'
  if last['stage'] in steps:
    place = list(steps).index(last['stage']) + 1
    text += f' of {steps[last["stage"]]:,} (stage {place} of {len(steps)})'
  return 'finished' if run.finished else 'unfinished', text


def facts(run: Run) -> list[tuple[str, Any]]:
  """Returns (name, value) of the model, the device, the seed and so on."""
  starts = run.about.get('starts') or [{}]
  model = run.config.get('model') or {}
  shape = ''
  if model:
    init = next(iter(run.nodes.values()), {}).get('init')
    shape = (
      f'layers {model["layers"]}, width {model["embed_dim"]}, '
      f'{model["dtype"]}, from {init}'
    )
  sizes = {}
  for stage, node in (run.about.get('stages') or {}).items():
    part = ''
    if node['trained'] != node['parameters']:
      part = f', of which {node["trained"]:,} train'
    sizes[stage] = f'{node["parameters"]:,}{part}'
  tokens = sum(row.get('batch/tokens') or 0 for row in run.rows)
  times = [row['time/elapsed'] for row in run.rows if 'time/elapsed' in row]
  elapsed = datetime.timedelta(seconds=round(times[-1] if times else 0))
  written = datetime.datetime.fromtimestamp(run.written or 0, datetime.UTC)
  versions = starts[-1].get('versions', {})
  again = f', {len(starts)} starts' if len(starts) > 1 else ''
  pairs = [
    ('model', shape),
    (
      'parameters',
      '; '.join(f'{stage}: {text}' for stage, text in sizes.items())
      if len(set(sizes.values())) > 1
      else next(iter(sizes.values()), ''),
    ),
    ('device', starts[-1].get('devices')),
    ('host', starts[-1].get('host')),
    ('seed', run.config.get('seed')),
    ('tokens of batches', f'{tokens:,}' if tokens else ''),
    ('training time', f'{elapsed}' if times else ''),
    ('started', starts[0].get('time') and starts[0]['time'] + again),
    ('last row', run.written and f'{written:%Y-%m-%d %H:%M} UTC'),
    ('versions', ', '.join(map(' '.join, versions.items()))),
  ]
  return [(name, value) for name, value in pairs if value not in (None, '')]


def differences(all_runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
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
