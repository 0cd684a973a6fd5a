"""Markdown of a report of `experiments.scale`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

KINDS = {
  'compiled': 'compiled',
  'depth': 'compiled at two depths',
  'scaled': 'extrapolated',
  'planned': 'planned',
}


def lines(report: Mapping[str, Any]) -> list[str]:
  """Returns the tables of a report."""
  rows = report['rows']
  train = [x for x in rows if x['program'] == 'train_step']
  host = [x for x in rows if x['program'] != 'train_step']
  parts: list[str] = []
  if train:
    parts += ['## Train step', '', *_train(train), '']
    parts += ['## What a train step sends', '', *_sent(train), '']
  if host:
    parts += ['## Prefill and decoding of a host', '', *_host(host), '']
  if report['refused']:
    parts += ['## Refused', '', *_refused(report['refused']), '']
  if report['errors']:
    parts += ['## Extrapolated against compiled', '', *_errors(report), '']
  parts += ['## Assumptions', '', *_ceilings(report['ceilings']), '']
  if report['compiled']:
    parts += ['## CPU seconds', '', *_seconds(report['compiled'])]
  return parts


def _train(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  head = (
    'model',
    'target',
    'mesh',
    'figures',
    'rows',
    'arguments',
    'temporaries',
    'run',
    'limit',
    'compute s',
    'communication s',
    'step s',
    'MFU %',
    'tokens/s',
  )
  return table(
    head,
    4,
    (
      (
        x['model'],
        x['target'],
        _mesh(x),
        _figures(x),
        x['rows'],
        f'{x["arguments_gib"]:.2f}',
        f'{x["temporaries_gib"]:.2f}',
        f'{x["held_gib"]:.1f}',
        f'{x["limit_gib"]:.1f}' + ('' if x['fits'] else ' **over**'),
        f'{x["compute_s"]:.3g}',
        f'{x["communication_s"]:.3g}',
        _range(x['step_s'], '.3g'),
        _range([100 * y for y in x['mfu']], '.0f'),
        _range(x['tokens_per_s'], ',.0f'),
      )
      for x in rows
    ),
  )


def _sent(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  kinds = ('all-gather', 'reduce-scatter', 'all-reduce')
  head = (
    'model',
    'target',
    'mesh',
    'figures',
    'collectives',
    *kinds,
    'others',
    'NVLink or ICI',
    'InfiniBand or DCN',
    'in groups of several hosts',
  )
  return table(
    head,
    4,
    (
      (
        x['model'],
        x['target'],
        _mesh(x),
        _figures(x),
        x['collectives'],
        *(f'{x["sent_gib"].get(kind, 0):.2f}' for kind in kinds),
        f'{sum(v for k, v in x["sent_gib"].items() if k not in kinds):.2f}',
        f'{x["inner_gib"]:.2f}',
        f'{x["outer_gib"]:.2f}',
        f'{x["hosts_gib"]:.2f}',
      )
      for x in rows
    ),
  )


def _host(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  head = (
    'program',
    'model',
    'target',
    'mesh of a host',
    'figures',
    'slots of a host',
    'arguments',
    'temporaries',
    'collectives',
    'sent MiB',
    'compute ms',
    'communication ms',
    'call ms',
    'tokens/s of all hosts',
  )
  return table(
    head,
    5,
    (
      (
        x['program'],
        x['model'],
        x['target'],
        _mesh(x),
        _figures(x),
        x['slots'],
        f'{x["arguments_gib"]:.2f}',
        f'{x["temporaries_gib"]:.2f}',
        x['collectives'],
        f'{1024 * sum(x["sent_gib"].values()):.1f}',
        f'{1000 * x["compute_s"]:.3g}',
        f'{1000 * x["communication_s"]:.3g}',
        _range([1000 * y for y in x['step_s']], '.3g'),
        _range(x['tokens_per_s'], ',.0f'),
      )
      for x in rows
    ),
  )


def _refused(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  return table(
    ('model', 'target', 'reason'),
    3,
    ((x['model'], x['target'], x['reason']) for x in rows),
  )


def _errors(report: Mapping[str, Any]) -> list[str]:
  head = (
    'program',
    'model',
    'target',
    'mesh',
    'from',
    'peak GiB: extrapolated',
    'compiled',
    'error %',
    'sent GiB: extrapolated',
    'compiled',
    'error %',
  )
  return table(
    head,
    5,
    (
      (
        x['program'],
        x['model'],
        x['target'],
        _mesh(x),
        x['source'],
        *_pair(x['peak_gib']),
        *_pair(x['sent_gib']),
      )
      for x in report['errors']
    ),
  )


def _pair(values: Sequence[float]) -> tuple[str, str, str]:
  predicted, actual = values
  error = f'{100 * (predicted / actual - 1):+.1f}' if actual > 1e-6 else ''
  return f'{predicted:.3g}', f'{actual:.3g}', error


def _ceilings(chips: Mapping[str, Mapping[str, Any]]) -> list[str]:
  return table(
    ('assumption', 'kind', 'source', 'value'),
    3,
    (
      (
        f'{chip}.{name}',
        x['kind'],
        x['source'],
        f'{x["value"]:.4g} {x["unit"]}'.strip(),
      )
      for chip, numbers in chips.items()
      for name, x in sorted(numbers.items())
    ),
  )


def _seconds(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  total = sum(x['cpu_seconds'] for x in rows)
  return [
    f'{total:.0f} CPU seconds for {len(rows)} programs.',
    '',
    *table(
      ('compiled program', 'CPU s'),
      1,
      ((x['program'], f'{x["cpu_seconds"]:.0f}') for x in rows),
    ),
  ]


def _mesh(row: Mapping[str, Any]) -> str:
  return ','.join(map(str, row['mesh']))


def _figures(row: Mapping[str, Any]) -> str:
  """Returns whether a row's figures are compiled, and from what if not."""
  kind, source = KINDS[row['kind']], row['source']
  if row['kind'] in ('compiled', 'planned'):
    return kind
  return f'{kind}: {source}'


def _range(values: Sequence[float], spec: str) -> str:
  """Returns two bounds, or one number where both read the same."""
  low, high = (format(x, spec) for x in sorted(values))
  return low if low == high else f'{low} to {high}'


def table(
  head: Sequence[str], texts: int, rows: Iterable[Sequence[Any]]
) -> list[str]:
  """Returns a Markdown table; columns after the first `texts` hold numbers."""
  rule = ['---'] * texts + ['---:'] * (len(head) - texts)
  return [f'| {" | ".join(map(str, x))} |' for x in (head, rule, *rows)]
