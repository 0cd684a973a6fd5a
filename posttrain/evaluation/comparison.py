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
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.evaluation import answers
from posttrain.metrics import estimates, writers

WIDTH = 79  # characters of a line of the suite's answers
LINES = 12  # of an answer that are shown; `to_json` has the whole text
_HEADS = ('metric', 'environment', 'value', '95 % interval')
_AGAINST = ('against', '95 % interval', 'difference', '95 % interval')


@dataclasses.dataclass(frozen=True)
class Measurement:
  """The evaluation of one policy."""

  # {'eval/<name>/<env>': value, 'eval/suite/<name>': value}
  values: dict[str, float]
  answers: list[answers.Answer]
  suite: list[answers.SuiteAnswer]


def differences(first: Measurement, second: Measurement) -> dict[str, float]:
  """Returns the differences of the rates, over tasks graded for both policies.

  Args:
    first, second: answers; tasks of one alone are left out.

  Returns:
    {'difference/<name>/<env>'} of each measure (the mean over tasks), with its
    bounds `_low` and `_high`; absent where fewer than two tasks have the value
    under both. And
    {'difference/suite/<name>'}, over the prompts whose answers have the value
    under both; absent where there is none.
  """
  pairs: dict[str, list] = {}
  others = {(x.env, x.id): x for x in second.answers}
  for a in first.answers:
    if b := others.get((a.env, a.id)):
      pairs.setdefault(a.env, []).append((a, b))
  values = {}
  for env, both in pairs.items():
    for name in dict.fromkeys(name for a, _ in both for name in a.measures):
      one, other = zip(
        *([x.measures.get(name) for x in pair] for pair in both), strict=True
      )
      difference = estimates.paired(
        one, other, estimates.is_rate(name, one + other)
      )
      key = f'difference/{name}/{env}'
      keys = key, *estimates.bound_keys(key)
      values |= zip(keys, difference or (), strict=False)
  changes: dict[str, list[float]] = {}
  for a, b in zip(first.suite, second.suite, strict=True):
    assert a.prompt == b.prompt, 'the prompts must be the same'
    for name, value in a.values.items():
      if name in b.values:
        changes.setdefault(name, []).append(value - b.values[name])
  for name, x in changes.items():
    values[f'difference/suite/{name}'] = sum(x) / len(x)
  return values


def within(workdir: str, *rows: Mapping[str, Any]) -> dict[str, float]:
  """Returns the differences of two evaluations of a run, by stored answers.

  Args:
    workdir: the run's folder.
    *rows: two rows of metrics.jsonl, the later one first.
  """
  sets = []
  for row in rows:
    name = f'{row["stage"]}_eval_{row["step"]:06d}.jsonl'
    stored = writers.read(os.path.join(workdir, 'rollouts', name))
    sets.append(Measurement({}, [answers.Answer(**x) for x in stored], []))
  return differences(*sets)


def to_json(first: Measurement, second: Measurement | None) -> dict[str, Any]:
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


def text(first: Measurement, second: Measurement | None) -> list[str]:
  """Returns lines: the suite's answers, then the table, which stays in view."""
  lines = suite(first, second)
  lines += [''] if lines else []
  counts = collections.Counter(answer.env for answer in first.answers)
  tasks = ', '.join(f'{count:,} of {env}' for env, count in counts.items())
  lines += [f'held-out tasks: {tasks}'] if tasks else []
  return lines + table(first, second)


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
  rows = [(*_HEADS, *(_AGAINST if second is not None else ()))]
  for key in keys:
    path, _, env = key.rpartition('/')
    metric = path.removeprefix('eval/')
    row = [env, metric] if metric == 'suite' else [metric, env]
    for values in sets:
      row += estimates.formatted(values, key, '{:.4f}')
    rows.append(tuple(row))
  return layout(rows, 2)


def layout(rows: Sequence[Sequence[str]], left: int) -> list[str]:
  """Returns a line per row; the first `left` columns are aligned on the left.

  The others are aligned on the right.
  """
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return [
    '  '.join(
      f'{cell:<{width}}' if i < left else f'{cell:>{width}}'
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  ]


def suite(first: Measurement, second: Measurement | None = None) -> list[str]:
  """Returns lines: each prompt of the suite, and its answers side by side."""
  policies = {'checkpoint': first}
  if second is not None:
    policies['against'] = second
  width = (WIDTH - 3 * (len(policies) - 1)) // len(policies)
  lines = []
  for own in zip(*(x.suite for x in policies.values()), strict=True):
    columns = []
    for name, answer in zip(policies, own, strict=True):
      cell = [f'{name} ({answer.stop_reason}, {answer.tokens} tokens):']
      if answer.grades:
        grades = (f'{k} {x:.2f}' for k, x in answer.grades.items())
        cell.append(f'[{", ".join(grades)}]')
      text = _lines(answer.text)
      if (more := len(text) - LINES) > 1:
        text[LINES:] = [f'... {more} more lines']
      cell += text
      wrapped = (textwrap.wrap(line, width) or [''] for line in cell)
      columns.append([part for parts in wrapped for part in parts])
    lines += ['', *(f'> {x}' for x in _lines(own[0].prompt))]
    lines += [
      ' | '.join(f'{part:<{width}}' for part in parts).rstrip()
      for parts in itertools.zip_longest(*columns, fillvalue='')
    ]
  return lines


def _lines(text: str) -> list[str]:
  """Returns a text's lines, with control characters replaced."""
  return [
    ''.join(x if x.isprintable() else '\N{REPLACEMENT CHARACTER}' for x in y)
    for y in text.expandtabs(4).splitlines()
  ]
