"""Kernels with the head counts and sizes of real models, compiled alone.

`compile` compiles a case; `assemble` reads what `ptxas` makes of its PTX.

Axes: B rows, T queries, S keys, N query heads, K kv heads, H head dim.
"""

import dataclasses
import functools
import importlib.util
import pathlib
import re
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import (
  AbstractDevice,
  AbstractMesh,
  AxisType,
  SingleDeviceSharding,
)

from kernels import attention

_ENTRY = re.compile(r'\.entry (\w+)\(')
_TARGET = re.compile(r'^\.target (\w+)', re.MULTILINE)
_SPILLS = re.compile(
  r'(\d+) bytes stack frame, (\d+) bytes spill stores, '
  r'(\d+) bytes spill loads'
)
_REGISTERS = re.compile(r'Used (\d+) registers')


NAMES = ('flash_forward', 'flash_dq', 'flash_dkv', 'decode')


@dataclasses.dataclass(frozen=True)
class Case:
  """A call of a kernel, and the names of the kernels it compiles to."""

  call: str  # 'attention' with its gradients, 'cached' or 'decode'
  queries: tuple[int, ...]  # [B, T, N, H], or [B, N, H] for decode
  keys: tuple[int, ...]  # [B, S, K, H]; [B, K, S, H] for a cache
  dtype: str = 'bfloat16'
  softcap: float | None = None
  splits: int | None = None
  trees: bool = False

  @property
  def kernels(self) -> tuple[str, ...]:
    """Names of the kernels that it compiles to."""
    return {'attention': NAMES[:3], 'cached': NAMES[:1], 'decode': NAMES[3:]}[
      self.call
    ]


HEADS = (16, 8, 128), (32, 8, 128), (64, 8, 128), (32, 8, 64)  # N, K, H
CASES = {
  **{
    f'training, {n}/{k} heads of {h}': Case(
      'attention', (4, 4096, n, h), (4, 4096, k, h)
    )
    for n, k, h in HEADS
  },
  'training, 16/8 heads of 128, softcap': Case(
    'attention', (4, 4096, 16, 128), (4, 4096, 8, 128), softcap=30.0
  ),
  'training, trees, 16/8 heads of 128': Case(
    'attention', (4, 4096, 16, 128), (4, 4096, 8, 128), trees=True
  ),
  'prefill, 32/8 heads of 128': Case(
    'cached', (32, 128, 32, 128), (32, 8, 4096, 128)
  ),
  **{
    f'decode, {n}/{k} heads of {h}': Case(
      'decode', (128, n, h), (128, k, 4096, h)
    )
    for n, k, h in HEADS
  },
  **{
    f'decode, prompts of groups of 8, {n}/{k} heads of {h}': Case(
      'cached', (32, 8 * n // k, k, h), (32, k, 4096, h)
    )
    for n, k, h in HEADS
  },
  'decode, 8/1 heads of 128, split': Case(
    'decode', (8, 8, 128), (8, 1, 4096, 128), splits=16
  ),
  'decode, 4/4 heads of 256, softcap': Case(
    'decode', (8, 4, 256), (8, 4, 4096, 256), softcap=50.0
  ),
}


def compile(
  case: Case,
  device: jax.Device,
  backend: str,
  platform: str,
  folder: str | None = None,
):
  """Compiles a case for one device.

  Args:
    case: one of CASES.
    device: the device, which need not be here.
    backend: the backend of `kernels`.
    platform: that the program is lowered for, 'cuda' or 'tpu'.
    folder: a folder for the compiler's dumps; None = none.
  """
  place = SingleDeviceSharding(device)

  def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

  ends = array(case.queries[: len(case.queries) - 2], jnp.int32)
  q, k = array(case.queries, case.dtype), array(case.keys, case.dtype)
  run = jax.jit(functools.partial(_run, case, backend))
  # The device that kernels are lowered for. An abstract one takes effect only
  # with explicit axes.
  cores = getattr(device, 'core_count', None) or 1
  abstract = AbstractDevice(
    device_kind=device.device_kind, num_cores=cores, platform=device.platform
  )
  mesh = AbstractMesh(
    (1,), ('one',), (AxisType.Explicit,), abstract_device=abstract
  )
  with jax.sharding.use_abstract_mesh(mesh):
    lowered = run.trace(q, k, k, ends, ends).lower(
      lowering_platforms=(platform,)
    )
  options = None if folder is None else {'xla_dump_to': folder}
  return lowered.compile(compiler_options=options)


def _run(case, backend, q, k, v, k_start, k_end):
  options = {'scale': 0.1, 'softcap': case.softcap, 'backend': backend}
  if case.call == 'decode' and case.splits:
    options['splits'] = case.splits
  call = functools.partial(getattr(attention, case.call), **options)
  if case.call != 'attention':
    return call(q, k, v, k_start, k_end)
  until = k_end if case.trees else None
  out, vjp = jax.vjp(lambda *x: call(*x, k_start, k_end, until), q, k, v)
  return out, vjp(out)


def assemble(
  folder: str | pathlib.Path, names: tuple[str, ...]
) -> list[dict[str, Any]]:
  """Assembles the kernels of a dump folder; returns a row of each.

  Args:
    folder: the compiler's `xla_dump_to`.
    names: the kernels' names.

  Raises:
    ValueError: the folder has no kernel of a name.
  """
  texts = {}
  for path in sorted(pathlib.Path(folder).glob('*.ptx')):
    text = path.read_text()
    texts |= {name: text for name in _ENTRY.findall(text)}
  for name in names:
    if name not in texts:
      raise ValueError(
        f'{folder} must have the kernel {name}: got {sorted(texts)}'
      )
  return [read(name, texts[name], _assemble(texts[name])) for name in names]


def read(name: str, text: str, report: str) -> dict[str, Any]:
  """Returns a kernel's figures from its PTX and the report of `ptxas -v`.

  Registers are those of a thread, at most 255; `stack` is a thread's bytes in
  local memory, spills included; `wgmma` and `mma` count the matrix instructions
  of a warp group and of a warp in the text.
  """
  spills = _SPILLS.search(report)
  registers = _REGISTERS.search(report)
  assert spills and registers, report
  stack, stores, loads = map(int, spills.groups())
  return {
    'kernel': name,
    'registers': int(registers[1]),
    'stack': stack,
    'spills': stores + loads,
    'wgmma': text.count('wgmma.mma_async'),
    'mma': text.count('mma.sync'),
  }


def _assemble(text: str) -> str:
  """Returns the report of `ptxas -v` on a PTX file of one kernel."""
  target = _TARGET.search(text)
  assert target, 'PTX names its target'
  spec = importlib.util.find_spec('nvidia')
  assert spec and spec.submodule_search_locations, 'no nvidia wheels'
  (ptxas,) = (
    path
    for folder in spec.submodule_search_locations
    for path in sorted(pathlib.Path(folder).glob('cu*/bin/ptxas'))[:1]
  )
  with tempfile.TemporaryDirectory() as folder:
    source = pathlib.Path(folder) / 'kernel.ptx'
    source.write_text(text)
    command = [str(ptxas), f'-arch={target[1]}', '-v', str(source)]
    done = subprocess.run(
      [*command, '-o', f'{folder}/kernel.cubin'],
      capture_output=True,
      text=True,
      check=True,
    )
  return done.stdout + done.stderr
