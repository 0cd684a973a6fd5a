"""The report of one run or of several: an HTML page that needs no other file.

  1. read config.json, about.json, metrics.jsonl and rollouts of each run;
  2. compute the tables, and the numbers of the panels as JSON;
  3. render `assets/page.html` (jinja2, all texts escaped) with its style, its
     script and plotly.js, which draws the panels in the browser.

A section without data is left out: a run that has just begun has a report, too.
Without JavaScript the page has its tables and texts, and no curves.

The content security policy of the page allows nothing but the three scripts and
the style that are in it, by their hashes. plotly.js also fills style elements
that it creates empty, so the hash of an empty style is allowed; images are
those that it saves (`data:` and `blob:`).
"""

import base64
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jinja2

from posttrain.metrics import writers
from posttrain.report import (
  answers,
  facts,
  groups,
  panels,
  results,
  samples,
  seconds,
  transcripts,
)
from posttrain.report import runs as runs_lib
from posttrain.util import files

MAX_BYTES = 2_000_000  # size of a page
MAX_STORIES = 600_000  # characters of texts
_LEAST_STORIES = 20_000  # below, there are none
_POINT_BYTES = 8  # about so many in the JSON of a value
_ASSETS = pathlib.Path(__file__).parent / 'assets'
# Control characters but tab and line feed, as the pictures that Unicode has
# of them; what no UTF-8 can hold.
_CONTROLS = {i: 0x2400 + i for i in range(32) if i not in (9, 10)} | {
  127: 0x2421
}
_SURROGATES = re.compile('[\ud800-\udfff]')
_ESCAPES = {ord(x): f'\\u{ord(x):04x}' for x in '<>&\u2028\u2029'}


def write(workdir: str, path: str | None = None) -> str:
  """Writes the report of a run; returns its path.

  Args:
    workdir: the run's folder.
    path: the file; None = `WORKDIR/report.html`.

  Raises:
    ValueError: a file of the run is damaged.
  """
  path = path or path_of(workdir)
  write_all([workdir], path)
  return path


def path_of(workdir: str) -> str:
  """Returns the path of a run's own report."""
  return os.path.join(workdir, 'report.html')


def write_all(
  workdirs: Sequence[str], path: str, reload: float | None = None
) -> bool:
  """Writes the report of one run, or of several overlaid.

  Args:
    workdirs: the runs' folders.
    path: the file.
    reload: seconds after which an open page of unfinished runs loads itself
      again; None = never.

  Returns:
    Whether all runs are finished.

  Raises:
    ValueError: a file of a run is damaged.
  """
  names = runs_lib.names(workdirs)
  all_runs = [
    runs_lib.read(*pair) for pair in zip(workdirs, names, strict=True)
  ]
  finished = all(run.finished for run in all_runs)
  text = render(all_runs, None if finished else reload)
  with files.replacing(path) as f:
    f.write(text)
  return finished


def figure(workdir: str, png_path: str) -> None:
  """Saves the learning curves alone, as a PNG.

  Args:
    workdir: the run's folder.
    png_path: the file to write.

  Raises:
    ValueError: there are no metrics to draw.
  """
  # matplotlib takes most of a second to import, which a page does without.
  from posttrain.report import curves

  rows = writers.read_metrics(os.path.join(workdir, 'metrics.jsonl'))
  curve_figure = curves.draw(rows)
  if curve_figure is None:
    raise ValueError(
      f'{workdir} must hold a metrics.jsonl with something to draw: got '
      f'{len(rows)} lines; train first'
    )
  curve_figure.savefig(png_path, dpi=160)


def render(all_runs: Sequence[runs_lib.Run], reload: float | None) -> str:
  """Returns the page of runs; see `write_all`."""
  steps = [groups.read(run) for run in all_runs]
  charts = [
    {'run': i, **chart}
    for i, run_steps in enumerate(steps)
    for chart in groups.histograms(run_steps)
  ]
  table = results.side_by_side(all_runs)
  cells = [value for column in table.values() for value in column.values()]
  values = {
    'title': ', '.join(run.name for run in all_runs),
    'table': table,
    'keys': results.keys(all_runs, table),
    'intervals': any(value.interval for value in cells),
    'differences': facts.differences(all_runs),
    'histograms': charts,
    'components': panels.COMPONENTS,
    **_assets(),
  }
  space = MAX_STORIES
  while True:
    values['runs'] = [
      _context(run, run_steps, space // len(all_runs))
      for run, run_steps in zip(all_runs, steps, strict=True)
    ]
    # The panels get the space that the texts leave.
    empty = _page({**values, 'data': {'panels': []}, 'json': ''})
    left = MAX_BYTES - len(empty.encode())
    points = max(left, 0) * space // MAX_STORIES // _POINT_BYTES
    data = panels.build(all_runs, points)
    sent = {**data, 'histograms': charts, 'reload': reload}
    text = _page({**values, 'data': data, 'json': script_json(sent)})
    if len(text.encode()) <= MAX_BYTES or not space:
      return text
    space = space // 2 if space > _LEAST_STORIES else 0


def script_json(value: Any) -> str:
  """Returns JSON that can stand in a script element of a page."""
  text = json.dumps(value, allow_nan=False, separators=(',', ':'))
  return text.translate(_ESCAPES)


def clean(text: str) -> str:
  """Returns a text without characters that a page cannot have."""
  return _SURROGATES.sub('\ufffd', text).translate(_CONTROLS)


def _context(
  run: runs_lib.Run, steps: groups.Steps, space: int
) -> dict[str, Any]:
  """Returns the template's values of a run.

  Args:
    run: the run.
    steps: its logged training steps.
    space: about so many characters for its stories.
  """
  config = json.dumps(run.config, indent=2) if run.config else ''
  state, progress = facts.status(run)
  return {
    'name': run.name,
    'headlines': results.headlines(run),
    'subtitle': facts.subtitle(run.rows),
    'state': state,
    'progress': progress,
    'facts': facts.facts(run),
    'answers': clean(answers.write(run.workdir, run.ends, space // 2)),
    'suite': clean(answers.suite(run.workdir, run.ends, space // 4)),
    'samples': _fit(samples.read(run.workdir, run.ends), space // 8),
    'groups': _fit(groups.stories(steps), space // 4),
    'seconds': seconds.stages(run.rows),
    'summary': _fit(panels.summary(run), space // 2),
    'config': transcripts.cut(config, space // 4),
  }


def _fit(items: list[Any], limit: int) -> list[Any]:
  """Returns the first items, as many as fit into so many characters."""
  sizes = itertools.accumulate(len(json.dumps(item)) for item in items)
  return items[: sum(size <= limit for size in sizes)]


def _page(values: dict[str, Any]) -> str:
  """Returns the rendered template; its scripts and style are put in last."""
  return _template().render(values)


@functools.cache
def _template() -> jinja2.Template:
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_ASSETS),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_finalize,
  )
  return environment.get_template('page.html')


def _finalize(value: Any) -> Any:
  """Cleans every text that a template escapes."""
  is_html = hasattr(value, '__html__')
  return clean(value) if isinstance(value, str) and not is_html else value


@functools.cache
def _assets() -> dict[str, Any]:
  """Returns scripts and style of the page, and their policy."""
  read = {
    name: (_ASSETS / file).read_text(encoding='utf-8')
    for name, file in (
      ('plotly', 'plotly-basic.min.js'),
      ('plots', 'plots.js'),
      ('script', 'page.js'),
      ('style', 'page.css'),
    )
  }
  read['script'] = read.pop('plots') + read['script']
  read['style'] = (
    f':root {{ {transcripts.LIGHT} }}\n'
    '@media screen and (prefers-color-scheme: dark) '
    f'{{ :root:not([data-theme="light"]) {{ {transcripts.DARK} }} }}\n'
    f'@media screen {{ :root[data-theme="dark"] {{ {transcripts.DARK} }} }}\n'
    f'{transcripts.STYLE}{read["style"]}'
  )
  scripts = ' '.join(_hash(read[name]) for name in ('plotly', 'script'))
  policy = (
    f"default-src 'none'; script-src {scripts}; "
    f'style-src {_hash(read["style"])} {_hash("")}; img-src data: blob:; '
    "base-uri 'none'; form-action 'none'"
  )
  return {'policy': policy, **read}


def _hash(text: str) -> str:
  digest = hashlib.sha256(text.encode()).digest()
  return f"'sha256-{base64.b64encode(digest).decode()}'"
