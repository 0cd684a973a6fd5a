"""Programs of the kernels, with the head counts and sizes of real models.

Axes: B rows, T queries, S keys, N query heads, K kv heads, H head dim.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import (
  AbstractDevice,
  AbstractMesh,
  AxisType,
  SingleDeviceSharding,
)

from experiments.aot import targets
from kernels import attention

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

  @property
  def kernels(self) -> tuple[str, ...]:
    """Names of the kernels that it compiles to."""
    return {'attention': NAMES[:3], 'cached': NAMES[:1], 'decode': NAMES[3:]}[
      self.call
    ]


def _training(heads, kv_heads, size, **options):
  return Case(
    'attention', (4, 4096, heads, size), (4, 4096, kv_heads, size), **options
  )


def _decoding(heads, kv_heads, size, **options):
  return Case('decode', (128, heads, size), (128, kv_heads, 4096, size))


CASES = {
  'training, 16/8 heads of 128': _training(16, 8, 128),
  'training, 32/8 heads of 128': _training(32, 8, 128),
  'training, 64/8 heads of 128': _training(64, 8, 128),
  'training, 32/8 heads of 64': _training(32, 8, 64),
  'training, 16/8 heads of 128, softcap': _training(16, 8, 128, softcap=30.0),
  'prefill, 32/8 heads of 128': Case(
    'cached', (32, 128, 32, 128), (32, 8, 4096, 128)
  ),
  'decode, 16/8 heads of 128': _decoding(16, 8, 128),
  'decode, 32/8 heads of 128': _decoding(32, 8, 128),
  'decode, 64/8 heads of 128': _decoding(64, 8, 128),
  'decode, 32/8 heads of 64': _decoding(32, 8, 64),
  'decode, 8/1 heads of 128, split': Case(
    'decode', (8, 8, 128), (8, 1, 4096, 128), splits=16
  ),
  'decode, 4/4 heads of 256, softcap': Case(
    'decode', (8, 4, 256), (8, 4, 4096, 256), softcap=50.0
  ),
}


def compile(case: Case, target: str, folder: str | None = None):
  """Compiles a case for one device of a target.

  Args:
    case: one of CASES.
    target: one of `targets.TARGETS`.
    folder: a folder for the compiler's dumps; None = none.
  """
  device = targets.devices(target)[0]
  place = SingleDeviceSharding(device)

  def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

  ends = array(case.queries[: len(case.queries) - 2], jnp.int32)
  q, k = array(case.queries, case.dtype), array(case.keys, case.dtype)
  run = jax.jit(functools.partial(_run, case, targets.TARGETS[target].kernels))
  with _in_use(device):
    platform = targets.TARGETS[target].platform
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
  out, vjp = jax.vjp(lambda *x: call(*x, k_start, k_end), q, k, v)
  return out, vjp(out)


def _in_use(device: jax.Device):
  """Sets the device that kernels are lowered for."""
  cores = getattr(device, 'core_count', None) or 1
  abstract = AbstractDevice(
    device_kind=device.device_kind, num_cores=cores, platform=device.platform
  )
  # An abstract device takes effect only with explicit axes.
  mesh = AbstractMesh(
    (1,), ('one',), (AxisType.Explicit,), abstract_device=abstract
  )
  return jax.sharding.use_abstract_mesh(mesh)
