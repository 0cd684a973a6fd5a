"""The seconds of a run by part of the loop, each second counted once."""

from collections.abc import Mapping
from typing import Any

from posttrain.report import series

# Times that are not parts of the seconds of a row.
_NO_PARTS = tuple(
  f'time/{x}'
  for x in (
    'compile',
    'programs',
    'tokens_per_second',
    'elapsed',
    'cpu',
    'goodput',
  )
)


def stages(rows: series.Rows) -> list[dict[str, Any]]:
  """Returns the stages with their seconds: of each part, the largest first."""
  by_stage = []
  for stage in series.stages(rows):
    totals: dict[str, float] = {}
    for row in rows:
      if row['stage'] == stage:
        for name, seconds in slices(row).items():
          totals[name] = totals.get(name, 0.0) + seconds
    if whole := sum(totals.values()):
      parts, begin = [], 0.0
      for name in sorted(totals, key=lambda x: -totals[x]):
        share = totals[name] / whole
        parts.append(
          {
            'name': name,
            'seconds': f'{totals[name]:,.1f} s',
            'share': f'{share:.1%}',
            'begin': f'{begin:.3%}',
            'width': f'{share:.3%}',
          }
        )
        begin += share
      by_stage.append(
        {'name': stage, 'seconds': f'{whole:,.1f} s', 'parts': parts}
      )
  return by_stage


def slices(row: Mapping[str, Any]) -> dict[str, float]:
  """Returns a row's seconds by name, each second counted once.

  The timers of the other parts include compiling, and that of rollouts includes
  scoring. They are subtracted, so that the sum is the measured time.
  """
  seconds = {
    key.removeprefix('time/'): value
    for key, value in row.items()
    if key.startswith('time/') and value and key not in _NO_PARTS
  }
  if 'scoring' in seconds:  # within the rollouts
    rollout = seconds.get('rollout', 0.0)
    seconds['scoring'] = min(seconds['scoring'], rollout)
    seconds['rollout'] = rollout - seconds['scoring']
  left = row.get('time/compile') or 0.0
  for name in ('update', 'eval', 'rollout', 'scoring'):
    inside = min(left, seconds.get(name, 0.0))
    if inside > 0:
      left -= inside
      seconds[name] -= inside
      seconds['compile'] = seconds.get('compile', 0.0) + inside
  return seconds
