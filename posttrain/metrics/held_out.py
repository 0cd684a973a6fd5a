"""The main numbers of a held-out evaluation, in the order of every table.

One list for the last lines of a run, for the headlines, the table and the
curves of its report.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

_ENV = '(?P<env>.+)'
_NAMED = r'(?P<name>[^/]+)/(?P<env>.+)'


class Measure(NamedTuple):
  """A number that is measured on held-out tasks or pairs.

  Fields:
    pattern: regular expression of the metric, with the group `env`, and `name`
      where the measure is one of several functions.
    title: its title in a table; {} is the name.
    style: format of a value.
    panel: title of its curves.
    key: the metric, or its prefix up to a slash.
    kind: how the curves are drawn, see `report.runs.PANELS`.
  """

  pattern: str
  title: str
  style: str
  panel: str
  key: str
  kind: str


class Match(NamedTuple):
  """A metric of a measure: its environment, and its title in a table."""

  env: str
  title: str


_RATE, _NUMBER = '{:.1%}', '{:.3f}'
MEASURES = (
  Measure(
    f'eval/pass_rate/{_ENV}',
    'pass rate, greedy',
    _RATE,
    'Pass rate, greedy',
    'eval/pass_rate/',
    'rate',
  ),
  Measure(
    f'eval/sampled_pass_rate/{_ENV}',
    'pass rate, sampled',
    _RATE,
    'Pass rate, sampled',
    'eval/sampled_pass_rate/',
    'rate',
  ),
  Measure(
    f'eval/reward/{_NAMED}',
    'reward {}, greedy',
    _NUMBER,
    'Held-out reward, greedy',
    'eval/reward/',
    'plain',
  ),
  Measure(
    f'eval/sampled_reward/{_NAMED}',
    'reward {}, sampled',
    _NUMBER,
    'Held-out reward, sampled',
    'eval/sampled_reward/',
    'plain',
  ),
  Measure(
    f'eval/nll/{_ENV}',
    'NLL of demonstrations, nats per token',
    '{:.4f}',
    'Held-out NLL, nats per token',
    'eval/nll/',
    'plain',
  ),
  Measure(
    f'eval/token_accuracy/{_ENV}',
    'token accuracy on demonstrations',
    _RATE,
    'Held-out token accuracy',
    'eval/token_accuracy/',
    'rate',
  ),
  Measure(
    'eval/(?P<env>pairs)/rewards/accuracies',
    'accuracy on held-out pairs',
    _RATE,
    'Accuracy on held-out pairs',
    'eval/pairs/rewards/accuracies',
    'rate',
  ),
)
# For a run that has none of them. The reward of an environment is the weighted
# sum of its functions, or its own grade.
OTHERWISE = (
  Measure(
    'eval/reward/(?P<env>[^/]+)',
    'reward, greedy',
    _NUMBER,
    'Held-out reward, greedy',
    'eval/reward/',
    'plain',
  ),
  Measure(
    'eval/sampled_reward/(?P<env>[^/]+)',
    'reward, sampled',
    _NUMBER,
    'Held-out reward, sampled',
    'eval/sampled_reward/',
    'plain',
  ),
)


def match(measure: Measure, metric: str) -> Match | None:
  """Returns the environment and the title of a metric, None for others."""
  groups = re.fullmatch(measure.pattern, metric)
  if groups is None:
    return None
  names = groups.groupdict()
  return Match(names['env'], measure.title.format(names.get('name', '')))


def metrics(known: Iterable[str]) -> list[str]:
  """Returns the metrics of `MEASURES` among the known ones, in their order.

  Without any, those of `OTHERWISE`.
  """
  known = list(known)
  for measures in (MEASURES, OTHERWISE):
    if listed := [x for m in measures for x in known if match(m, x)]:
      return listed
  return []
