"""The report of a run: `WORKDIR/report.html`, and its curves as a PNG.

  1. read config.json, metrics.jsonl and the last answers of evaluation
     (`rollouts/<stage>_eval_<step>.jsonl`, and `_suite_`);
  2. draw the learning curves, stages side by side on one axis;
  3. write one HTML file that needs no other: the results, the curves, answers
     to the same prompts before and after, the suite, the seconds, all other
     metrics, the config.

A section without data is left out: a run that was stopped has a report, too.
"""

import html
import io
import json
import os
import re
from typing import Any

import matplotlib
import numpy as np

from posttrain.metrics import estimates, writers
from posttrain.report import answers, curves, transcripts, unlisted
from posttrain.util import files, json_files

RESULTS = (  # metric, title ({} = the metric), number format
  ('pass_rate', 'pass rate, greedy', '{:.1%}'),
  (r'pass_rate_\w+', '{}, greedy', '{:.1%}'),  # over a subset of the tasks
  ('sampled_pass_rate', 'pass rate, sampled', '{:.1%}'),
  (r'pass@\d+', '{}', '{:.1%}'),
  (r'maj@\d+', '{}, majority vote', '{:.1%}'),
  ('format_rate', 'format rate, greedy', '{:.1%}'),
  ('entropy', 'entropy, nats per token', '{:.4f}'),
  ('kl', 'KL to the start of the stage, nats per token', '{:.4f}'),
  ('length', 'length, tokens', '{:.1f}'),
)
STYLE = (
  f"""
:root {{ color-scheme: light dark; {transcripts.LIGHT} }}
@media screen and (prefers-color-scheme: dark) {{
  :root {{ {transcripts.DARK} }} }}
"""
  + """
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, -apple-system, 'Segoe UI', sans-serif;
  background: var(--paper); color: var(--ink); max-width: 62rem;
  margin: 3rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.9rem; letter-spacing: -0.02em; margin: 0; }
h2 { font-size: 1.1rem; margin: 2.8rem 0 0.8rem; }
p.note { color: var(--muted); margin: 0.3rem 0 1rem; font-size: 0.9rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem; }
th { text-align: left; color: var(--muted); font-weight: 500;
  border-bottom: 1px solid var(--rule); }
th, td { padding: 0.45rem 1rem 0.45rem 0; vertical-align: top; }
td { border-bottom: 1px solid var(--rule); }
.n { text-align: right; font-variant-numeric: tabular-nums; }
b.n { font-size: 1.05rem; }
td small { color: var(--muted); white-space: nowrap; }
.text { font: 0.82rem/1.5 ui-monospace, Menlo, Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.good { color: var(--good); } .bad { color: var(--bad); }
.bar { display: flex; height: 0.8rem; border-radius: 3px; overflow: hidden;
  margin: 0.4rem 0 0.8rem; background: var(--soft); }
.dot { display: inline-block; width: 0.65rem; height: 0.65rem;
  border-radius: 2px; margin-right: 0.5rem; }
svg { width: 100%; height: auto; background: #fff; border-radius: 4px; }
details { margin-top: 2.8rem; }
summary { cursor: pointer; font-weight: 600; }
pre { background: var(--soft); padding: 1rem; overflow-x: auto;
  font-size: 0.8rem; border-radius: 4px; }
"""
  + transcripts.STYLE
  + unlisted.STYLE
)

Rows = list[dict[str, Any]]


def write(workdir: str) -> str:
  """Writes the report of a run; returns the path of `report.html`."""
  rows = writers.read_metrics(os.path.join(workdir, 'metrics.jsonl'))
  config = _config(workdir)
  name = html.escape(os.path.basename(os.path.abspath(workdir)))
  parts = [
    f'<h1>{name}</h1>',
    _subtitle(rows),
    _results(rows),
    _curves(rows),
    answers.write(workdir, curves.stages(rows)),
    answers.suite(workdir, curves.stages(rows)),
    _seconds(rows),
    unlisted.write(rows, _env_names(config)),
    _details(config),
  ]
  path = os.path.join(workdir, 'report.html')
  with files.replacing(path) as f:
    f.write(
      '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
      '<meta name="viewport" content="width=device-width">'
      f'<title>{name}</title><style>{STYLE}</style>'
      f'</head><body>\n{"".join(parts)}\n</body></html>\n'
    )
  return path


def figure(workdir: str, png_path: str) -> None:
  """Saves the learning curves alone, as a PNG.

  Args:
    workdir: the run's folder.
    png_path: the file to write.

  Raises:
    ValueError: there are no metrics to draw.
  """
  rows = writers.read_metrics(os.path.join(workdir, 'metrics.jsonl'))
  curve_figure = curves.draw(rows)
  if curve_figure is None:
    raise ValueError(
      f'{workdir} must hold a metrics.jsonl with something to draw: got '
      f'{len(rows)} lines; train first'
    )
  curve_figure.savefig(png_path, dpi=160)


def _config(workdir: str) -> dict[str, Any]:
  path = os.path.join(workdir, 'config.json')
  return json_files.read_object(path) if os.path.exists(path) else {}


def _env_names(config: dict[str, Any]) -> set[str]:
  """Returns the names of the environments of all stages."""
  stages = config.get('stages')
  names = stages if isinstance(stages, list) else ()
  nodes = [config.get(name) for name in names if isinstance(name, str)]
  envs = [node.get('envs') for node in nodes if isinstance(node, dict)]
  return {name for node in envs if isinstance(node, dict) for name in node}


def _subtitle(rows: Rows) -> str:
  """Returns steps, tokens per second and compiled programs of each stage."""
  parts = []
  for stage in curves.stages(rows):
    mine = [row for row in rows if row['stage'] == stage]
    text = f'{stage}: {mine[-1]["step"]:,} steps'
    speeds = [s for row in mine if (s := row.get('time/tokens_per_second'))]
    if speeds:
      text += f', {np.median(speeds):,.0f} tokens/s (median)'
    if (compiles := mine[-1].get('compiles')) is not None:
      times = f'{compiles} time{"s" if compiles != 1 else ""}'
      text += f', update compiled {times}'
    parts.append(text)
  text = '; '.join(parts + _goodput(rows)) or 'No metrics yet.'
  return f'<p class="note">{html.escape(text)}</p>'


def _goodput(rows: Rows) -> list[str]:
  """Returns a sentence on the share of time in steps that counted."""
  for row in reversed(rows):
    share, seconds = row.get('time/goodput'), row.get('time/elapsed')
    if isinstance(share, float) and isinstance(seconds, float):
      return [f'{share:.0%} of {seconds / 60:,.1f} minutes in steps that count']
  return []


def _results(rows: Rows) -> str:
  """Returns a table of the first evaluation and the last of every stage."""
  evaluations = [(row, _evaluated(row)) for row in rows]
  evaluations = [(row, values) for row, values in evaluations if values]
  if not evaluations:
    return ''
  columns = {'start': evaluations[0][1]}
  columns |= {f'after {row["stage"]}': values for row, values in evaluations}
  heads = ''.join(f'<th class="n">{html.escape(name)}</th>' for name in columns)
  body = ''
  for env, name in dict.fromkeys(
    key for values in columns.values() for key in values
  ):
    cells = ''.join(
      f'<td class="n">{values.get((env, name), "n/a")}</td>'
      for values in columns.values()
    )
    body += (
      f'<tr><td>{html.escape(env)}</td><td>{html.escape(name)}</td>{cells}</tr>'
    )
  has_intervals = any(
    '<small>' in x for c in columns.values() for x in c.values()
  )
  note = '<p class="note">In brackets: 95 % intervals, over tasks.</p>'
  return (
    f'<h2>Held-out evaluation</h2>{note if has_intervals else ""}'
    f'<table><tr><th>environment</th><th></th>{heads}</tr>{body}</table>'
  )


def _evaluated(row: dict[str, Any]) -> dict[tuple[str, str], str]:
  """Returns {(environment, title): HTML of the value}, in a fixed order."""
  cells = {}
  for pattern, title, style in RESULTS:
    for key, value in row.items():
      match = re.fullmatch(f'eval/({pattern})/(.+)', key)
      if match and value is not None and not estimates.is_bound(key, row):
        interval = [
          row.get(f'eval/{match[1]}{side}/{match[2]}')
          for side in estimates.BOUNDS
        ]
        text = style.format(value)
        if None not in interval:
          low, high = map(style.format, interval)
          text += f' <small>[{low}, {high}]</small>'
        cells[match[2], title.format(match[1])] = text
  return dict(sorted(cells.items(), key=lambda item: item[0][0]))


def _curves(rows: Rows) -> str:
  figure = curves.draw(rows)
  if figure is None:
    return ''
  text = io.StringIO()
  with matplotlib.rc_context({'svg.hashsalt': 'posttrain'}):
    no_metadata = dict.fromkeys(('Date', 'Creator', 'Format', 'Type'))
    figure.savefig(text, format='svg', metadata=no_metadata)
  svg = text.getvalue()
  return f'<h2>Learning curves</h2>{svg[svg.index("<svg") :]}'


def _seconds(rows: Rows) -> str:
  """Returns a bar and a table of the seconds of each stage."""
  parts = ''
  for stage in curves.stages(rows):
    totals = {}
    for row in rows:
      if row['stage'] == stage:
        for name, seconds in _slices(row).items():
          totals[name] = totals.get(name, 0.0) + seconds
    if totals:
      parts += _bar(stage, totals)
  return f'<h2>Where the seconds went</h2>{parts}' if parts else ''


# Times that are not parts of the seconds of a row.
_NO_PARTS = tuple(
  f'time/{x}'
  for x in ('compile', 'programs', 'tokens_per_second', 'elapsed', 'goodput')
)


def _slices(row: dict[str, Any]) -> dict[str, float]:
  """Returns a row's seconds by name, each second counted once.

  The timers of the other parts include compiling. It is subtracted from them,
  so that the sum is the measured time.
  """
  seconds = {
    key.removeprefix('time/'): value
    for key, value in row.items()
    if key.startswith('time/') and value and key not in _NO_PARTS
  }
  left = row.get('time/compile') or 0.0
  for name in ('update', 'eval', 'rollout'):
    inside = min(left, seconds.get(name, 0.0))
    if inside > 0:
      left -= inside
      seconds[name] -= inside
      seconds['compile'] = seconds.get('compile', 0.0) + inside
  return seconds


def _bar(stage: str, totals: dict[str, float]) -> str:
  whole = sum(totals.values())
  bar, legend = '', ''
  ordered = sorted(totals.items(), key=lambda item: -item[1])
  for i, (name, seconds) in enumerate(ordered):
    color = curves.COLORS[i] if i < len(curves.COLORS) else curves.MUTED
    bar += (
      f'<span style="width:{seconds / whole:.2%};background:{color}"></span>'
    )
    legend += (
      f'<tr><td><span class="dot" style="background:{color}"></span>'
      f'{html.escape(name)}</td><td class="n">{seconds:,.1f} s</td>'
      f'<td class="n">{seconds / whole:.1%}</td></tr>'
    )
  return (
    f'<p class="note">{html.escape(stage)}: {whole:,.1f} s</p>'
    f'<div class="bar">{bar}</div><table>{legend}</table>'
  )


def _details(config: dict[str, Any]) -> str:
  if not config:
    return ''
  return (
    '<details><summary>Resolved config</summary><pre>'
    f'{html.escape(json.dumps(config, indent=2))}</pre></details>'
  )
