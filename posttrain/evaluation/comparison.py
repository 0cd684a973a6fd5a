"""The measurement of a policy, or of two, as a table and as JSON.

Two policies are compared task by task on the same tasks: the interval of the
difference of their rates can be narrower than that of either rate, see
`estimates.paired`. The difference is the first policy's rate minus the
second's. Values of the suite are compared prompt by prompt; a suite has too few
of them for an interval. Held-out pairs are tasks as well, for policies and for
reward models.
"""

import collections
import dataclasses
import itertools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.evaluation import answers as answers_lib
from posttrain.metrics import estimates

WIDTH = 79  # characters of a line of the suite's answers
LINES = 12  # of an answer that are shown; `to_json` has the whole text
_HEADS = ('metric', 'environment', 'value', '95 % interval')
_AGAINST = ('against', '95 % interval', 'difference', '95 % interval')


@dataclasses.dataclass(frozen=True)
class Measurement:
  """The evaluation of one policy."""

  # {'eval/<name>/<env>': value, 'eval/suite/<name>': value}
  values: dict[str, float]
  answers: list[answers_lib.Answer]
  suite: list[answers_lib.SuiteAnswer]


def differences(first: Measurement, second: Measurement) -> dict[str, float]:
  """Returns the differences of the rates, over tasks graded for both policies.

  Args:
    first, second: answers to the same tasks in the same order.

  Returns:
    {'difference/<name>/<env>'} of pass_rate, sampled_pass_rate and each measure
    beside the grade (the mean over tasks), with its bounds `_low` and `_high`;
    absent where fewer than two tasks have the value under both. And
    {'difference/suite/<name>'}, over the prompts whose answers have the value
    under both; absent where there is none.
  """
  pairs: dict[str, list] = {}
  for a, b in zip(first.answers, second.answers, strict=True):
    assert (a.env, a.id) == (b.env, b.id), 'the tasks must be the same'
    pairs.setdefault(a.env, []).append((a, b))
  values = {}
  for env, both in pairs.items():
    rates = {
      'pass_rate': lambda x: _rate([x.correct]),
      'sampled_pass_rate': lambda x: _rate(x.sampled),
      **{name: _measure(name) for a, _ in both for name in a.measures},
    }
    for name, rate in rates.items():
      difference = estimates.paired(
        *zip(*((rate(a), rate(b)) for a, b in both), strict=True)
      )
      for side, value in zip(
        ('', *estimates.BOUNDS), difference or (), strict=False
      ):
        values[f'difference/{name}{side}/{env}'] = value
  return values | _suite_differences(first, second)


def _suite_differences(
  first: Measurement, second: Measurement
) -> dict[str, float]:
  changes: dict[str, list[float]] = {}
  for a, b in zip(first.suite, second.suite, strict=True):
    assert a.prompt == b.prompt, 'the prompts must be the same'
    for name, value in a.values.items():
      if name in b.values:
        changes.setdefault(name, []).append(value - b.values[name])
  return {f'difference/suite/{k}': sum(x) / len(x) for k, x in changes.items()}


def _measure(name: str) -> Callable[[answers_lib.Answer], float | None]:
  """Returns a function that reads a measure of an answer."""
  return lambda x: x.measures.get(name)


def _rate(correct: Sequence[bool | None]) -> float | None:
  known = [x for x in correct if x is not None]
  return sum(known) / len(known) if known else None


def to_json(
  first: Measurement, second: Measurement | None = None
) -> dict[str, Any]:
  """Returns all numbers by name, flat, and the answers to the suite.

  `eval/...`; with a second policy `against/...` for its values, and
  `difference/...`; `suite` and `against/suite` where there is a suite.
  """
  result: dict[str, Any] = dict(first.values)
  if first.suite:
    result['suite'] = [dataclasses.asdict(x) for x in first.suite]
  if second is not None:
    result |= {
      f'against/{key.removeprefix("eval/")}': value
      for key, value in second.values.items()
    }
    result |= differences(first, second)
    if second.suite:
      result['against/suite'] = [dataclasses.asdict(x) for x in second.suite]
  return result


def text(first: Measurement, second: Measurement | None = None) -> list[str]:
  """Returns lines: the suite's answers, then the table, which stays in view."""
  answers = suite(first, second)
  above = [*answers, ''] if answers else []
  return [*above, *_tasks(first), *table(first, second)]


def _tasks(first: Measurement) -> list[str]:
  """Returns a line with the number of tasks of each environment, if any."""
  counts = collections.Counter(answer.env for answer in first.answers)
  parts = [f'{count:,} of {env}' for env, count in counts.items()]
  return [f'held-out tasks: {", ".join(parts)}'] if parts else []


def table(first: Measurement, second: Measurement | None = None) -> list[str]:
  """Returns lines: a header, and one per metric and environment."""
  sets = [first.values]
  if second is not None:
    difference = differences(first, second)
    sets += [
      second.values,
      {
        key.replace('difference/', 'eval/', 1): value
        for key, value in difference.items()
      },
    ]
  keys = dict.fromkeys(
    key
    for values in sets[:2]
    for key in values
    if not estimates.is_bound(key, values)
  )
  rows = [(*_HEADS, *(_AGAINST if second is not None else ()))] + [
    (*_names(key), *(cell for values in sets for cell in _cells(values, key)))
    for key in keys
  ]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return [
    '  '.join(
      f'{cell:<{width}}' if i < 2 else f'{cell:>{width}}'
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  ]


def _names(key: str) -> tuple[str, str]:
  """Returns the metric and the environment, or 'suite', of a name."""
  metric, _, env = key.removeprefix('eval/').rpartition('/')
  return (env, metric) if metric == 'suite' else (metric, env)


def _cells(values: dict[str, float], key: str) -> tuple[str, str]:
  """Returns a value and its interval, '' for a missing one."""
  if key not in values:
    return '', ''
  metric, _, env = key.rpartition('/')
  low, high = (values.get(f'{metric}{side}/{env}') for side in estimates.BOUNDS)
  interval = '' if low is None else f'[{low:.4f}, {high:.4f}]'
  return f'{values[key]:.4f}', interval


def suite(first: Measurement, second: Measurement | None = None) -> list[str]:
  """Returns lines: each prompt of the suite, and its answers side by side."""
  policies = {'checkpoint': first}
  if second is not None:
    policies['against'] = second
  lines = []
  for answers in zip(*(x.suite for x in policies.values()), strict=True):
    cells = [
      [
        f'{name} ({x.stop_reason}, {x.tokens} tokens):',
        *([f'[{_grades(x)}]'] if x.grades else []),
        *_first(_lines(x.text)),
      ]
      for name, x in zip(policies, answers, strict=True)
    ]
    lines += ['', *(f'> {x}' for x in _lines(answers[0].prompt))]
    lines += _side_by_side(cells)
  return lines


def _grades(answer: answers_lib.SuiteAnswer) -> str:
  return ', '.join(f'{name} {x:.2f}' for name, x in answer.grades.items())


def _lines(text: str) -> list[str]:
  """Returns a text's lines, with control characters replaced."""
  return [
    ''.join(x if x.isprintable() else '\N{REPLACEMENT CHARACTER}' for x in y)
    for y in text.expandtabs(4).splitlines()
  ]


def _first(lines: list[str]) -> list[str]:
  """Returns the first lines, and how many follow."""
  more = len(lines) - LINES
  return [*lines[:LINES], f'... {more} more lines'] if more > 1 else lines


def _side_by_side(cells: Sequence[Sequence[str]]) -> list[str]:
  """Returns lines of columns of equal width, wrapped."""
  width = (WIDTH - 3 * (len(cells) - 1)) // len(cells)
  columns = [
    [part for line in cell for part in textwrap.wrap(line, width) or ['']]
    for cell in cells
  ]
  return [
    ' | '.join(f'{part:<{width}}' for part in parts).rstrip()
    for parts in itertools.zip_longest(*columns, fillvalue='')
  ]
