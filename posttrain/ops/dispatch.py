"""The choice of attention's implementation.

    'auto'          the kernels of the platform in use; XLA on a CPU, and for
                    unsupported arguments
    'xla'           plain XLA, on every platform
    'pallas'        the kernels of the platform in use, or an error
    'cudnn'         cuDNN on a GPU, or an error; over a cache, as 'auto'
    'interpret'     the kernels for GPUs, as plain jax: slow, for tests

The platform in use is that of the default backend or, for programs that are
only lowered, of the abstract device of the ambient mesh. It determines the
residuals of the forward pass, which a lowering cannot change; with 'auto' on an
accelerator, the kernel is then chosen by the platform that the program is
lowered for.

The compiler cannot partition a kernel: under a mesh an op calls it within
`jax.shard_map`, on one device. A program that is traced for no mesh, in a
process of several devices, may run on one of them or on all: there 'auto' is
XLA. If 'auto' does not choose an accelerator's kernels, the reason is logged
once as a warning.
"""

import functools
import logging
from collections.abc import Callable

import jax

from posttrain import schema

KERNELS = {'gpu': 'triton', 'tpu': 'mosaic_tpu'}


def platform() -> str:
  """Returns the platform in use: 'cpu', 'gpu' or 'tpu'."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def choose(
  impl: str,
  unsupported: Callable[[str], str | None],
  avoid: Callable[[str], str | None] = lambda _: None,
  here: str | None = None,
) -> str:
  """Resolves the name of an implementation to a supported one.

  Args:
    impl: one of `schema.ATTENTION`.
    unsupported: returns why 'triton', 'mosaic_tpu' or 'cudnn' does not support
      the arguments, None if it does.
    avoid: returns why 'auto' does not choose supported kernels, None if it
      does.
    here: the platform; None = the one in use.

  Returns:
    'xla', 'interpret', 'cudnn', 'triton', 'mosaic_tpu', or 'auto': the kernels
    of the platform that the program is lowered for.

  Raises:
    FieldError: an implementation other than 'auto' does not support the
      arguments or the platform.
  """
  assert impl in schema.ATTENTION, impl
  if impl == 'xla':
    return impl
  here = here or platform()
  kernels = KERNELS.get(here)
  if impl == 'auto':
    if kernels is None:
      return 'xla'
    mesh, several = jax.sharding.get_abstract_mesh(), None
    manual = jax.sharding.AxisType.Manual
    if mesh.empty and jax.device_count() > 1:
      several = (
        'several devices and no mesh; trace it within sharding.use(mesh)'
      )
    elif mesh.size > 1 and any(kind != manual for kind in mesh.axis_types):
      several = 'not all axes of the mesh are manual'
    reason = several or unsupported(kernels) or avoid(kernels)
    if reason:
      _warn(f'attention runs as XLA, not as {kernels}: {reason}')
    return 'xla' if reason else 'auto'
  target = {'interpret': 'triton', 'pallas': kernels}.get(impl, impl)
  platforms = {'pallas': tuple(KERNELS), 'cudnn': ('gpu',)}.get(impl, (here,))
  if here in platforms:
    reason = unsupported(target or '')
  else:
    reason = f'it is for a {" or ".join(platforms)}, not for a {here}'
  if reason:
    hint = f"{reason}; use 'auto', 'xla' or, for tests, 'interpret'"
    raise schema.FieldError('attention', 'be supported here', impl, hint)
  return target if target and impl == 'pallas' else impl


@functools.cache  # once per message
def _warn(message):
  logging.getLogger('absl').warning(message)  # absl hides lower levels
