"""The report of one run or of several: an HTML page that needs no other file.

  1. read config.json, about.json, metrics.jsonl and rollouts of each run;
  2. compute the tables and texts, and the numbers of the panels as JSON;
  3. render `assets/page.html` (jinja2, all texts escaped) with its style, its
     script and plotly.js, which draws the panels in the browser.

A section without data is left out: a run that has just begun has a report, too.
Without JavaScript the page has its tables and texts, and no curves. `Periodic`
writes the report of a run that is under way.
"""

import functools
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.metrics import writers
from posttrain.report import panels, results, runs, stories
from posttrain.util import disk, errors

MAX_CHARACTERS = 100_000  # of the summary and of the config
SECONDS = 20.0  # between two reports of a run under way, at least
SHARE = 0.01  # largest share of the run's time for reports
RELOAD = 20.0  # seconds after which an open page loads itself again


class Periodic:
  """Writes the report of a run when it is due.

  The first time at once; then after `SECONDS`, or so much later that writing
  takes at most `SHARE` of the time. The first failure is a warning.
  """

  def __init__(self, workdir: str, log: Callable[[runs.Row], None]):
    """Writes nothing yet.

    Args:
      workdir: the run's folder.
      log: called with each new row of metrics.jsonl.
    """
    self._workdir, self.log = workdir, log
    self._due = 0.0  # time of `time.monotonic`
    self._warned = False

  @property
  def is_due(self) -> bool:
    return time.monotonic() >= self._due

  def write(self) -> None:
    """Writes the report."""
    begin = time.monotonic()
    try:
      write_all([self._workdir], path_of(self._workdir), RELOAD)
    except Exception as error:  # a run never fails because of its report
      if not self._warned:
        logging.getLogger('absl').warning(
          'the report could not be written: %s; the run goes on',
          errors.describe(error),
        )
      self._warned = True
    end = time.monotonic()
    self._due = end + max(SECONDS, (end - begin) / SHARE)


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
  names = runs.names(workdirs)
  all_runs = [runs.read(*pair) for pair in zip(workdirs, names, strict=True)]
  finished = all(run.finished for run in all_runs)
  text = render(all_runs, None if finished else reload)
  with disk.replacing(path) as f:
    # Texts may have halves of surrogate pairs, which no UTF-8 can hold.
    f.write(text.encode(errors='replace').decode())
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


def render(all_runs: Sequence[runs.Run], reload: float | None) -> str:
  """Returns the page of runs; see `write_all`."""
  steps = [stories.read_groups(run) for run in all_runs]
  charts = [
    {'run': i, **chart}
    for i, run_steps in enumerate(steps)
    for chart in stories.histograms(run_steps)
  ]
  table = results.side_by_side(all_runs)
  cells = [value for column in table.values() for value in column.values()]
  data = panels.build(all_runs)
  contexts = []
  for run, run_steps in zip(all_runs, steps, strict=True):
    state, progress = results.status(run)
    sizes = itertools.accumulate(map(len, map(str, panels.summary(run))))
    config = json.dumps(run.config, indent=2) if run.config else ''
    contexts.append(
      {
        'name': run.name,
        'headlines': results.headlines(run),
        'subtitle': results.subtitle(run),
        'state': state,
        'progress': progress,
        'facts': results.facts(run),
        'answers': stories.answers(run),
        'suite': stories.suite(run),
        'samples': stories.samples(run),
        'groups': stories.groups(run_steps),
        'seconds': panels.seconds(run),
        'summary': panels.summary(run)[: sum(x < 3e5 for x in sizes)],
        'config': stories.cut(config, MAX_CHARACTERS),
      }
    )
  return stories.template('page.html').render(
    title=', '.join(run.name for run in all_runs),
    table=table,
    keys=results.keys(all_runs, table),
    intervals=any(value.interval for value in cells),
    differences=results.differences(all_runs),
    histograms=charts,
    components=panels.COMPONENTS,
    runs=contexts,
    data=data,
    sent={**data, 'histograms': charts, 'reload': reload},
    **_assets(),
  )


@functools.cache
def _assets() -> dict[str, Any]:
  """Returns scripts and style of the page."""

  def read(*names: str) -> str:
    return ''.join(
      (stories.ASSETS / name).read_text(encoding='utf-8') for name in names
    )

  return {
    'plotly': read('plotly-basic.min.js'),
    'script': read('plots.js', 'page.js'),
    'style': read('stories.css', 'page.css'),
  }
