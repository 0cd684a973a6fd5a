"""The report of one run or of several: an HTML page that needs no other file.

  1. read config.json, about.json, metrics.jsonl and rollouts of each run;
  2. compute the tables and texts, and the numbers of the panels as JSON;
  3. render `assets/page.html` (jinja2, all texts escaped) with its style, its
     script and plotly.js, which draws the panels in the browser.

A section without data is left out: a run that has just begun has a report, too.
Without JavaScript the page has its tables and texts, and no curves. `Periodic`
writes the report of a run that is under way.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Sequence

from posttrain.report import curves, runs, stories
from posttrain.util import disk, errors

MAX_METRICS = 2000  # lines of the summary
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


def render(all_runs: Sequence[runs.Run], reload: float | None) -> str:
  """Returns the page of runs; see `write_all`."""
  steps = [stories.read_groups(run) for run in all_runs]
  charts = [
    {'run': i, **chart}
    for i, run_steps in enumerate(steps)
    for chart in stories.histograms(run_steps)
  ]
  table = runs.side_by_side(all_runs)
  cells = [value for column in table.values() for value in column.values()]
  data = curves.build(all_runs)
  contexts = []
  for run, run_steps in zip(all_runs, steps, strict=True):
    state, progress = runs.status(run)
    config = json.dumps(run.config, indent=2) if run.config else ''
    contexts.append(
      {
        'name': run.name,
        'headlines': runs.headlines(run),
        'subtitle': runs.subtitle(run),
        'state': state,
        'progress': progress,
        'facts': runs.facts(run),
        'answers': stories.answers(run),
        'suite': stories.suite(run),
        'samples': stories.samples(run),
        'groups': stories.groups(run_steps),
        'seconds': curves.seconds(run),
        'summary': curves.summary(run)[:MAX_METRICS],
        'config': config,
      }
    )
  return stories.template('page.html').render(
    title=', '.join(run.name for run in all_runs),
    table=table,
    keys=runs.keys(all_runs, table),
    intervals=any(value.interval for value in cells),
    differences=runs.differences(all_runs),
    histograms=charts,
    components=curves.COMPONENTS,
    runs=contexts,
    data=data,
    sent={**data, 'histograms': charts, 'reload': reload},
    plotly=stories.asset('plotly-basic.min.js'),
    script=stories.asset('plots.js') + stories.asset('page.js'),
    style=stories.asset('stories.css') + stories.asset('page.css'),
  )
