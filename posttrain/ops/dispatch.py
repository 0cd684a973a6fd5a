"""The choice of an op's implementation.

    'auto'          the kernels of the platform in use; XLA on a CPU, with
                    several devices, and for unsupported arguments
    'xla'           plain XLA, on every platform
    'triton'        Pallas kernels for GPUs
    'mosaic_tpu'    Pallas kernels for TPUs
    'interpret'     the kernels for GPUs, as plain jax: slow, for tests

The platform in use is that of the default backend or, for programs that are
only lowered, of the abstract device of the ambient mesh. It determines the
residuals of the forward pass, which a lowering cannot change; with 'auto' on an
accelerator, the kernel is then chosen by the platform that the program is
lowered for.

With several devices 'auto' is XLA: the compiler cannot partition a kernel, and
an op cannot read the mesh of its arguments. If 'auto' does not choose an
accelerator's kernels, the reason is logged once as a warning. Within
`jax.shard_map` every axis is manual, and an op runs on one device.
"""

import functools
import logging
from collections.abc import Callable

import jax

KERNELS = {'gpu': 'triton', 'tpu': 'mosaic_tpu'}
IMPLS = ('auto', 'xla', 'triton', 'mosaic_tpu', 'interpret')


def platform() -> str:
  """Returns the platform in use: 'cpu', 'gpu' or 'tpu'."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def single_device() -> bool:
  """Returns whether a traced op is known to run on one device."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return jax.device_count() == 1
  manual = jax.sharding.AxisType.Manual
  return mesh.size == 1 or all(kind == manual for kind in mesh.axis_types)


def choose(impl: str, unsupported: Callable[[str], str | None]) -> str:
  """Resolves the name of an implementation to a supported one.

  Args:
    impl: one of IMPLS.
    unsupported: returns why 'triton' or 'mosaic_tpu' does not support the
      arguments, None if it does.

  Returns:
    'xla', 'interpret', 'triton', 'mosaic_tpu', or 'auto': the kernels of the
    platform that the program is lowered for.

  Raises:
    ValueError: the name is unknown.
    NotImplementedError: an implementation other than 'auto' does not support
      the arguments or the platform.
  """
  if impl not in IMPLS:
    raise ValueError(f'impl must be one of {IMPLS}: got {impl!r}')
  if impl == 'xla':
    return impl
  here = platform()
  if impl == 'auto':
    if here not in KERNELS:
      return 'xla'
    reason = unsupported(KERNELS[here])
    if not single_device():
      reason = 'several devices in use; call the op within jax.shard_map'
    if reason:
      _warn(f'attention runs as XLA, not as {KERNELS[here]}: {reason}')
    return 'xla' if reason else 'auto'
  reason = unsupported('triton' if impl == 'interpret' else impl)
  if impl != 'interpret' and KERNELS.get(here) != impl:
    reason = f'platform must be the one of these kernels: got {here!r}'
  if reason:
    raise NotImplementedError(f"{impl}: {reason}; use impl='auto' or 'xla'")
  return impl


@functools.cache  # once per message
def _warn(message):
  logging.getLogger('absl').warning(message)  # absl hides lower levels
