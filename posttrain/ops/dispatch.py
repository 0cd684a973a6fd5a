"""Which implementation of an op runs.

    'auto'          the kernels of the platform in use; XLA on a CPU, with
                    several devices, and for what a kernel cannot serve
    'xla'           plain XLA, on every platform
    'triton'        Pallas kernels for GPUs
    'mosaic_tpu'    Pallas kernels for TPUs
    'interpret'     the kernels for GPUs, as plain jax: slow, for tests

The platform in use is that of the default backend or, for programs that are
only lowered, of the abstract device of the ambient mesh. It decides what the
forward pass keeps for the backward one, which no lowering could change any
more; with 'auto' on an accelerator, the kernel itself is then chosen by the
platform that the program is really lowered for.

With several devices 'auto' is XLA: a compiler that partitions a program
cannot partition a kernel, and an op does not know the mesh of its arguments.
Whatever keeps 'auto' from the kernels of an accelerator is a warning, once.
Within `jax.shard_map` every axis is manual, and an op is alone again.
"""

import functools
import logging
from collections.abc import Callable

import jax

KERNELS = {'gpu': 'triton', 'tpu': 'mosaic_tpu'}
IMPLS = ('auto', 'xla', 'triton', 'mosaic_tpu', 'interpret')


def platform() -> str:
  """'cpu', 'gpu' or 'tpu': the platform in use."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def alone() -> bool:
  """Whether a traced op runs on one device, as far as can be known."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return jax.device_count() == 1
  manual = jax.sharding.AxisType.Manual
  return mesh.size == 1 or all(kind == manual for kind in mesh.axis_types)


def choose(impl: str, refuses: Callable[[str], str | None]) -> str:
  """Turns the name of an implementation into one that can serve.

  Args:
    impl: one of IMPLS.
    refuses: says of 'triton' or 'mosaic_tpu' why it cannot serve the
      arguments; None: it can.

  Returns:
    'xla', 'interpret', 'triton', 'mosaic_tpu', or 'auto': the kernels of the
    platform that the program is lowered for.

  Raises:
    ValueError: there is no such implementation.
    NotImplementedError: an explicitly named one cannot serve.
  """
  if impl not in IMPLS:
    raise ValueError(f'impl must be one of {IMPLS}: got {impl!r}')
  if impl == 'xla':
    return impl
  here = platform()
  if impl == 'auto':
    if here not in KERNELS:
      return 'xla'
    reason = refuses(KERNELS[here])
    if not alone():
      reason = 'several devices in use; call the op within jax.shard_map'
    if reason:
      _warn(f'attention runs as XLA, not as {KERNELS[here]}: {reason}')
    return 'xla' if reason else 'auto'
  reason = refuses('triton' if impl == 'interpret' else impl)
  if impl != 'interpret' and KERNELS.get(here) != impl:
    reason = f'platform must be one that it is written for: got {here!r}'
  if reason:
    raise NotImplementedError(f"{impl}: {reason}; use impl='auto' or 'xla'")
  return impl


@functools.cache  # once per message
def _warn(message):
  logging.getLogger('absl').warning(message)  # absl hides what is less
