"""Lowering of programs for absent accelerators.

`lower(fn, *args, target='h200')` returns the program that XLA would compile on
that device; Pallas kernels are custom calls with their compiled bodies.
Nothing is compiled further, so limits of registers and fast memory are not
checked.
"""

import contextlib

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

TARGETS = {  # (device kind, cores, platform), lowering platform
  'h200': (('NVIDIA H200', 132, 'gpu'), 'cuda'),
  'v5e': (('TPU v5 lite', 1, 'tpu'), 'tpu'),
  'v6e': (('TPU v6 lite', 1, 'tpu'), 'tpu'),
}
TRITON, MOSAIC_TPU = '__gpu$xla.gpu.triton', 'tpu_custom_call'
CUSTOM_CALLS = {'h200': TRITON, 'v5e': MOSAIC_TPU, 'v6e': MOSAIC_TPU}


@contextlib.contextmanager
def target(kind: str, cores: int, platform: str):
  """Sets an absent device as the device in use."""
  device = AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
  # An abstract device takes effect only with explicit axes.
  mesh = AbstractMesh(
    (1,), ('one',), (AxisType.Explicit,), abstract_device=device
  )
  with jax.sharding.use_abstract_mesh(mesh):
    yield


_device_in_use = target  # `lower` has an argument of that name


def lower(fn, *args, target: str = 'h200') -> str:
  """Lowers the program `fn(*args)` for a device.

  Args:
    fn: a function, jitted or not.
    *args: arrays or ShapeDtypeStructs, or trees of them.
    target: 'h200', 'v5e' or 'v6e'; or 'cpu', for comparison.

  Returns:
    StableHLO, as text.
  """
  fn = fn if hasattr(fn, 'trace') else jax.jit(fn)
  if target == 'cpu':
    return fn.trace(*args).lower(lowering_platforms=('cpu',)).as_text()
  device, platform = TARGETS[target]
  with _device_in_use(*device):
    return fn.trace(*args).lower(lowering_platforms=(platform,)).as_text()
