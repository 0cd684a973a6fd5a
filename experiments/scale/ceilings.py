"""Ceilings of accelerators: what a prediction assumes, with the source of each.

Every number is one of three kinds:

    stated      the maker's
    measured    by the source that is named
    judged      a guess from compiled kernels; no device has confirmed it

`of` returns the numbers of a chip by name, `override` replaces some.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from experiments.aot import targets

Table = Mapping[str, 'Ceiling']


@dataclasses.dataclass(frozen=True)
class Ceiling:
  """An assumed number."""

  value: float
  unit: str
  kind: str  # 'stated', 'measured' or 'judged'
  source: str


def _stated(value: float, unit: str, source: str) -> Ceiling:
  return Ceiling(value, unit, 'stated', source)


def _judged(value: float, unit: str, source: str) -> Ceiling:
  return Ceiling(value, unit, 'judged', source)


_HOPPER = 'NVIDIA H100 SXM data sheet'
_HOPPER_2 = 'NVIDIA H200 SXM data sheet'
_MATMUL = (
  'a plain bf16 product reached 788 TFLOP/s, 0.80 of peak, on an H200 through '
  'PyTorch; a tenth less for norms, RoPE and narrow products'
)
_TRITON = (
  'Triton kernels as compiled: 64 x 64 tiles, wgmma, loads by cp.async, no TMA'
)

_GPU = {
  'peak_flops': _stated(989.4e12, 'FLOP/s', f'{_HOPPER}: bfloat16, dense'),
  'memory_bytes': _stated(
    targets.TARGETS['h100'].memory, 'B', 'what the driver reports'
  ),
  'memory_share': _judged(
    0.9, '', 'XLA_PYTHON_CLIENT_MEM_FRACTION=0.9; its default is 0.75'
  ),
  'plan_factor': Ceiling(
    1.0, '', 'measured', 'compiled train steps need 0.91 to 0.97 of the plan'
  ),
  'hbm_bandwidth': _stated(3.35e12, 'B/s', _HOPPER),
  'hbm_share': Ceiling(
    0.9, '', 'measured', 'copies on an H200: 4.3 of 4.8 TB/s, PyTorch'
  ),
  'matmul_share': _judged(0.72, '', _MATMUL),
  'attention_forward_share': _judged(0.34, '', f'{_TRITON}: 0.30 to 0.38'),
  'attention_backward_share': _judged(0.21, '', f'{_TRITON}: 0.18 to 0.25'),
  'cache_share': _judged(0.75, '', 'Triton decode kernel: 0.70 to 0.80'),
  'devices_per_host': _stated(8, '', 'HGX board: eight GPUs, one NVSwitch'),
  'inner_bandwidth': _judged(
    350e9, 'B/s', 'NCCL rings over NVLink: 0.78 of the 450 GB/s per direction'
  ),
  'outer_bandwidth': Ceiling(
    47e9,
    'B/s',
    'measured',
    'NCCL, a 400 Gb/s InfiniBand adapter per GPU: 46 to 48 GB/s, '
    'NVIDIA/nccl-tests issue 290',
  ),
  'start_latency': _judged(5e-6, 's', 'of an NCCL kernel'),
  'inner_latency': _judged(
    1.5e-6, 's', 'a hop over NVLink: small collectives of 8 take 15 us'
  ),
  'outer_latency': _judged(6e-6, 's', 'a hop between hosts'),
}

_TPU = {
  'memory_share': _judged(0.95, '', 'what the runtime leaves'),
  'plan_factor': Ceiling(
    1.2,
    '',
    'measured',
    'temporaries of a train step against their plan, which is made for GPUs: '
    '1.16 compiled with 256 columns of D per device; more with fewer',
  ),
  'hbm_share': _judged(0.9, '', 'as on GPUs'),
  'matmul_share': _judged(0.7, '', 'no measurement; large products of 128'),
  'attention_forward_share': _judged(
    0.4, '', 'flash kernel for TPUs: 0.35 to 0.45'
  ),
  'attention_backward_share': _judged(
    0.25, '', 'as forward and backward on GPUs'
  ),
  'cache_share': _judged(
    0.45, '', 'decode kernel for TPUs: 0.30 to 0.60, skipped blocks included'
  ),
  'devices_per_host': _stated(
    4, '', 'libtpu: a process of a slice of several hosts has 2 x 2 chips'
  ),
  'start_latency': _judged(2e-6, 's', 'of a collective'),
  'inner_latency': _judged(1e-6, 's', 'a hop over ICI'),
  'outer_latency': _judged(50e-6, 's', 'a hop over DCN'),
}


def _tpu(name: str, flops: float, hbm: float, ici: float) -> Table:
  """Returns the table of a TPU with four ICI links.

  Args:
    name: of Google's page.
    flops: FLOP/s of bfloat16.
    hbm: bytes/s of memory.
    ici: bytes/s of a chip's four links, both directions.
  """
  page = f'cloud.google.com/tpu/docs/{name}'
  return {
    **_TPU,
    'peak_flops': _stated(flops, 'FLOP/s', page),
    'memory_bytes': _stated(targets.TARGETS[name].memory, 'B', page),
    'hbm_bandwidth': _stated(hbm, 'B/s', page),
    'inner_bandwidth': _judged(
      0.9 * ici / 8,
      'B/s',
      f'0.9 of an ICI link in one direction; {page}: {ici / 1e9:.0f} GB/s for '
      'four links and both',
    ),
    'outer_bandwidth': _judged(
      0.9 * 6.4e12 / 8 / 256,
      'B/s',
      '0.9 of the 6.4 Tb/s of a v5e pod of 256 chips; no figure for v6e',
    ),
  }


CHIPS: dict[str, Table] = {
  'h100': _GPU,
  'h200': {
    **_GPU,
    'peak_flops': _stated(989.4e12, 'FLOP/s', f'{_HOPPER_2}: bfloat16, dense'),
    'memory_bytes': _stated(
      targets.TARGETS['h200'].memory, 'B', 'what the driver reports'
    ),
    'hbm_bandwidth': _stated(4.8e12, 'B/s', _HOPPER_2),
  },
  'v5e': _tpu('v5e', 197e12, 819e9, 400e9),
  'v6e': _tpu('v6e', 918e12, 1638e9, 800e9),
}


def override(
  chips: Mapping[str, Table], texts: Sequence[str]
) -> dict[str, Table]:
  """Returns the tables with some numbers replaced.

  Args:
    chips: tables by chip.
    texts: CHIP.NAME=NUMBER each.

  Raises:
    ValueError: a text names no chip or number, or has no positive number.
  """
  tables = {chip: dict(table) for chip, table in chips.items()}
  for text in texts:
    path, _, number = text.partition('=')
    chip, _, name = path.partition('.')
    known = [f'{x}.{y}' for x, table in tables.items() for y in table]
    try:
      value = float(number)
    except ValueError:
      value = 0.0
    if path not in known or value <= 0:
      raise ValueError(
        f'--assume must be CHIP.NAME=NUMBER above 0: got {text!r}, expected '
        f'one of {", ".join(known[: len(_GPU)])}, ...'
      )
    old = tables[chip][name]
    tables[chip][name] = Ceiling(value, old.unit, 'given', '--assume')
  return {**tables}


def values(table: Table) -> dict[str, float]:
  """Returns the numbers of a chip by name."""
  return {name: x.value for name, x in table.items()}
