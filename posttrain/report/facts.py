"""Facts of a report beside the metrics: model, device, versions, progress."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.report import runs as runs_lib
from posttrain.report import series


def subtitle(rows: series.Rows) -> str:
  """Returns steps, tokens per second and compiled programs of each stage."""
  parts = []
  for stage in series.stages(rows):
    stage_rows = [row for row in rows if row['stage'] == stage]
    text = f'{stage}: {stage_rows[-1]["step"]:,} steps'
    speeds = [
      s for row in stage_rows if (s := row.get('time/tokens_per_second'))
    ]
    if speeds:
      text += f', {np.median(speeds):,.0f} tokens/s (median)'
    if (compiles := stage_rows[-1].get('compiles')) is not None:
      times = f'{compiles} time{"s" if compiles != 1 else ""}'
      text += f', update compiled {times}'
    parts.append(text)
  return '; '.join(parts + _goodput(rows)) or 'No metrics yet.'


def _goodput(rows: series.Rows) -> list[str]:
  """Returns a sentence on the share of time in steps that counted."""
  for row in reversed(rows):
    share, seconds = row.get('time/goodput'), row.get('time/elapsed')
    if isinstance(share, float) and isinstance(seconds, float):
      minutes = f'{seconds / 60:,.1f} minutes'
      return [f'{share:.0%} of {minutes} in rollouts and updates']
  return []


def status(run: runs_lib.Run) -> tuple[str, str]:
  """Returns ('finished' | 'unfinished', the run's stage and step)."""
  if not run.rows:
    return 'unfinished', 'no step yet'
  last, steps = run.rows[-1], run.steps
  text = f'stage {last["stage"]}, step {last["step"]:,}'
  if last['stage'] in steps:
    place = list(steps).index(last['stage']) + 1
    text += f' of {steps[last["stage"]]:,} (stage {place} of {len(steps)})'
  return ('finished', text) if run.finished else ('unfinished', text)


def facts(run: runs_lib.Run) -> list[tuple[str, str]]:
  """Returns (name, value) of the model, the device, the seed and so on."""
  start = (_starts(run.about) or [{}])[-1]
  tokens = sum(row.get('batch/tokens') or 0 for row in run.rows)
  pairs = [
    ('model', _model(run)),
    ('parameters', _parameters(run.about)),
    ('device', _text(start.get('devices'))),
    ('host', _text(start.get('host'))),
    ('seed', _text(run.config.get('seed'))),
    ('tokens trained on', f'{tokens:,}' if tokens else ''),
    ('training time', _duration(run.rows)),
    ('started', _started(run.about)),
    ('last row', _utc(run.written)),
    ('versions', _pairs(start.get('versions'))),
  ]
  return [(name, value) for name, value in pairs if value]


def differences(
  all_runs: Sequence[runs_lib.Run],
) -> list[tuple[str, list[str]]]:
  """Returns the options that differ: (dotted key, value of each run)."""
  flat = [dict(_flat(run.config)) for run in all_runs]
  entries = []
  for key in dict.fromkeys(key for values in flat for key in values):
    values = [repr(x[key]) if key in x else 'none' for x in flat]
    if len(set(values)) > 1:
      entries.append((key, values))
  return entries


def _flat(node: Any, prefix: str = '') -> list[tuple[str, Any]]:
  if not isinstance(node, dict) or not node:
    return [(prefix[:-1], node)]
  parts = [_flat(child, f'{prefix}{key}.') for key, child in node.items()]
  return [pair for part in parts for pair in part]


def _starts(about: Mapping[str, Any]) -> list[dict[str, Any]]:
  starts = about.get('starts')
  starts = starts if isinstance(starts, list) else []
  return [start for start in starts if isinstance(start, dict)]


def _started(about: Mapping[str, Any]) -> str:
  starts = _starts(about)
  if not starts:
    return ''
  again = f', {len(starts)} starts' if len(starts) > 1 else ''
  return _text(starts[0].get('time')) + again


def _parameters(about: Mapping[str, Any]) -> str:
  """Returns the number of parameters, of each stage where they differ."""
  nodes = about.get('stages')
  texts = {}
  for stage, node in nodes.items() if isinstance(nodes, dict) else ():
    count, trained = (node.get(x) for x in ('parameters', 'trained'))
    if isinstance(count, int) and isinstance(trained, int):
      part = '' if trained == count else f', of which {trained:,} train'
      texts[stage] = f'{count:,}{part}'
  if len(set(texts.values())) < 2:
    return next(iter(texts.values()), '')
  return '; '.join(f'{stage}: {text}' for stage, text in texts.items())


def _model(run: runs_lib.Run) -> str:
  """Returns the shape of the model, and the start of the first stage."""
  model = run.config.get('model')
  if not isinstance(model, dict):
    return ''
  shape = [
    f'{name} {model[key]}'
    for key, name in (('layers', 'layers'), ('embed_dim', 'width'))
    if key in model
  ]
  if model.get('dtype'):
    shape.append(str(model['dtype']))
  first = next(iter(run.nodes.values()), {})
  init = first.get('init')
  return ', '.join(shape + ([f'from {init}'] if init else []))


def _duration(rows: series.Rows) -> str:
  for row in reversed(rows):
    seconds = row.get('time/elapsed')
    if isinstance(seconds, int | float):
      minutes, rest = divmod(round(seconds), 60)
      hours, minutes = divmod(minutes, 60)
      if hours:
        return f'{hours:,} h {minutes} min'
      return f'{minutes} min {rest} s' if minutes else f'{rest} s'
  return ''


def _utc(seconds: float | None) -> str:
  if seconds is None:
    return ''
  moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
  return f'{moment:%Y-%m-%d %H:%M} UTC'


def _pairs(values: Any) -> str:
  if not isinstance(values, dict):
    return ''
  return ', '.join(f'{name} {value}' for name, value in values.items())


def _text(value: Any) -> str:
  return '' if value is None else str(value)
