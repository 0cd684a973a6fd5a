"""The report of a run that is under way, written now and then by the run."""

import logging
import time

from posttrain.report import page
from posttrain.util import foreign

SECONDS = 20.0  # between two reports at least
SHARE = 0.01  # largest share of the run's time for reports
RELOAD = 20.0  # seconds after which an open page loads itself again


class Periodic:
  """Writes the report of a run when it is due.

  The first time at once; then after `SECONDS`, or so much later that writing
  takes at most `SHARE` of the time. The first failure is a warning.
  """

  def __init__(self, workdir: str):
    self._workdir = workdir
    self._due = 0.0  # time of `time.monotonic`
    self._warned = False

  @property
  def is_due(self) -> bool:
    return time.monotonic() >= self._due

  def write(self) -> None:
    """Writes the report."""
    begin = time.monotonic()
    try:
      page.write_all([self._workdir], page.path_of(self._workdir), RELOAD)
    except Exception as error:  # a run never fails because of its report
      if not self._warned:
        logging.getLogger('absl').warning(
          'the report could not be written, and the run goes on: %s',
          foreign.error(error),
        )
      self._warned = True
    end = time.monotonic()
    self._due = end + max(SECONDS, (end - begin) / SHARE)
