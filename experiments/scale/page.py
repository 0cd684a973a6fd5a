"""Markdown of a report of `experiments.scale`."""

import collections
import datetime
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

INTRO = """# Runs on many devices, predicted

Train steps, prefill and decoding on devices that are not here. Bytes and
collectives are those of programs compiled for the very topology, or scaled from
such programs: the column *figures* says which. Seconds are predictions from the
assumptions below; nothing ran. Sizes are GiB per device.

```
aot=experiments/aot/run.sh scale="python -m experiments.scale --models=MODELS"
$aot with cuda $scale --targets=h100:8,h100:64,h100:512
$aot with tpu $scale --targets=v5e:256,v6e:256
$scale --targets=TARGETS > experiments/results/scale.md
```

The first two compile what [scale.jsonl](scale.jsonl) does not have yet; the
last needs no compiler.

"""
FORMULA = """## How figures are made

- *compiled*: by the compiler of that chip for that many devices, all layers.
- *compiled at two depths*: prefill and decoding repeat their layers in the
  text, so they are compiled with a < b layers, and every figure X of L layers
  is X(a) + (X(b) - X(a)) (L - a) / (b - a).
- *extrapolated*: from the named compiled program. Bytes held are its own plan
  (`stage.program_bytes`) times compiled / plan of the other program. Bytes sent
  are those of the placement (`stage.communication`), and the ratio is taken for
  each set of mesh axes.
- *run* is what a device holds that trains and samples: state, decode view and
  cache, and the largest program's temporaries, with `rollout.sleep`.
  It is planned, and at least what the train step takes. **over**: the mesh fits
  by plan, but not by the figures of the row; on TPUs the plan is too small
  where `fsdp` leaves a device few columns.
- The mesh (data, fsdp, tensor) is the fastest that fits, of almost equal ones
  that with the smallest `tensor`, then `fsdp` (`experiments/scale/choices.py`).
- Sent, of an array of S bytes among g devices: S (g - 1) / g, an all-reduce
  twice that. In a group of several hosts with d devices each, InfiniBand has
  1 / d of what NVLink has (`experiments/scale/links.py`). A TPU slice has ICI
  alone, also between hosts.
- Compute: products take 8 N FLOPs per token, as layers and logits are computed
  twice; causal attention twice forward, once backward; each at its share of
  peak. The update passes eight times over float32 weights. MFU counts PaLM's
  6 N + 12 L H Q T per token (`experiments/scale/roofline.py`).
- Where *other model* is off by more than a tenth of what is sent, the plan is:
  a tied table's gradient is summed over `data` twice, once for each use, and
  XLA for GPUs joins the five sums over `tensor` of a layer's backward pass to
  two. Rows of such models are scaled from one alike where there is one.
- *step*: from communication hidden behind compute to none hidden.
- Prefill is one call, decoding one token of every slot; the hosts of a target
  work alike, each on its own slots.
- Left out: work of hosts and environments, stragglers, congestion, and weights
  handed from training to decoding.
"""
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
  parts = [*INTRO.splitlines(), _made(report['sizes']), '', _count(rows), '']
  if train:
    parts += ['## Train step', '', *_train(train), '']
    parts += ['## What a train step sends', '', *_sent(train), '']
  if host:
    parts += ['## Prefill and decoding of a host', '', *_host(host), '']
  if report['refused']:
    parts += ['## Refused', '', *_refused(report['refused']), '']
  if report['errors']:
    parts += ['## Extrapolated against compiled', '']
    parts += [*_largest(report['errors']), '', *_errors(report), '']
  parts += FORMULA.splitlines() + ['']
  parts += ['## Assumptions', '', *_ceilings(report['ceilings']), '']
  if report['compiled']:
    parts += ['## CPU seconds', '', *_seconds(report['compiled'])]
  return parts


def _made(sizes: Mapping[str, int]) -> str:
  """Returns date, versions and the sizes of the programs."""
  names = [f'{x} {importlib.metadata.version(x)}' for x in ('jax', 'jaxlib')]
  return (
    f'{datetime.date.today().isoformat()}, Python {platform.python_version()}, '
    f'{", ".join(names)}. Rows of {sizes["row_tokens"]:,} tokens, '
    f'{sizes["device_rows"]} per device where they fit; slots of '
    f'{sizes["capacity"]:,} tokens, {sizes["device_slots"]} per device where '
    f'they fit, of which decoding reads {sizes["context"]:,}; prefill of '
    f'{sizes["prefill_rows"]} rows x {sizes["prefill_tokens"]} tokens on a '
    'host, at the longest prefix.'
  )


def _count(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns how many rows have compiled figures, and how many others."""
  counts = collections.Counter(x['kind'] for x in rows)
  texts = [f'{counts[x]} {KINDS[x]}' for x in KINDS if counts[x]]
  return f'Of {len(rows)} programs: {", ".join(texts)}.'


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
    'targets',
    'mesh of a host',
    'figures',
    'slots',
    'arguments',
    'temporaries',
    'collectives',
    'sent MiB',
    'compute ms',
    'communication ms',
    'call ms',
    'tokens/s of a host',
  )
  alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
  for x in rows:  # hosts of several targets may be alike
    key = (x['program'], x['model'], _mesh(x), _figures(x), x['slots'])
    chip = x['target'].split(':')[0]
    alike.setdefault((*key, chip), []).append(x)
  return table(
    head,
    5,
    (
      (
        x['program'],
        x['model'],
        ', '.join(y['target'] for y in same),
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
        _range([y / x['hosts'] for y in x['tokens_per_s']], ',.0f'),
      )
      for same in alike.values()
      for x in same[:1]
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
    'from',
    'program',
    'model',
    'target',
    'mesh',
    'compiled program',
    'peak GiB: extrapolated',
    'compiled',
    'error %',
    'sent GiB: extrapolated',
    'compiled',
    'error %',
  )
  return table(
    head,
    6,
    (
      (
        x['way'],
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


def _largest(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns a line per way with its largest errors."""
  lines = []
  for way in sorted({x['way'] for x in rows}):
    pairs = [(x['peak_gib'], x['sent_gib']) for x in rows if x['way'] == way]
    peak, sent = (
      max(abs(_error(x)) for x in values) for values in zip(*pairs, strict=True)
    )
    lines.append(
      f'- {way}: {len(pairs)} programs, at most {peak:.1f} % of the peak and '
      f'{sent:.1f} % of what is sent'
    )
  return lines


def _error(values: Sequence[float]) -> float:
  """Returns the error in percent; 0 if next to nothing is compiled."""
  predicted, actual = values
  return 100 * (predicted / actual - 1) if actual > 1e-6 else 0.0


def _pair(values: Sequence[float]) -> tuple[str, str, str]:
  return f'{values[0]:.3g}', f'{values[1]:.3g}', f'{_error(values):+.1f}'


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
