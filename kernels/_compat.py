"""Differences between versions of jax, and between backends.

Compiler parameters are built per backend: a lowering for one rejects those of
another. Interpreted calls have none.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

load, store = plgpu.load, plgpu.store
PrefetchScalarGridSpec = pltpu.PrefetchScalarGridSpec
VMEM = pltpu.VMEM


def triton(
  interpret: bool, *, num_warps: int, num_stages: int
) -> dict[str, Any]:
  """Returns keywords of `pl.pallas_call` for the Triton backend."""
  if interpret:
    return {'interpret': True}
  params = plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages)
  return {'compiler_params': params}


def mosaic_tpu(interpret: bool, *semantics: str) -> dict[str, Any]:
  """Returns keywords of `pl.pallas_call` for TPUs.

  Args:
    interpret: whether the call is interpreted.
    *semantics: 'parallel' or 'arbitrary' per grid dimension.
  """
  if interpret:
    return {'interpret': True}
  params = pltpu.CompilerParams(dimension_semantics=semantics)
  return {'compiler_params': params}


def struct(
  shape: tuple[int, ...], dtype: jnp.dtype, like: jax.Array
) -> jax.ShapeDtypeStruct:
  """Returns a kernel's result type, which varies over mesh axes as `like`."""
  axis_type = jax.typeof(like).manual_axis_type
  return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axis_type)
